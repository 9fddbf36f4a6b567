# SPDX-License-Identifier: Apache-2.0
"""The configuration file as dataclasses: one class a section, one field a key; this is the schema.

``None`` in a field means "not given"; what happens then stands in the field's description.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ms_longctx.config.model import LlamaConfig


@dataclass(frozen=True)
class ModelConfig(LlamaConfig):
    """Section ``model``: every field of :class:`LlamaConfig` (Hugging Face names), and the weights.

    Args:
        pretrained: Hugging Face directory or ``.gguf`` file. Its architecture is used; see
            :func:`~ms_longctx.config.pretrained.merge_architecture` for keys that the run states beside it.
            ``None``: random weights.
    """

    pretrained: str | None = None


@dataclass(frozen=True)
class DataConfig:
    """Section ``data``: where samples come from and how they are laid out.

    Args:
        path: training data, a MindRecord file that ``ms-longctx prepare`` wrote.
        eval_path: held-out data of the same kind.
        tokenizer: SentencePiece ``.model``, Hugging Face directory, ``tokenizer.json`` or ``.gguf``.
            ``None``: the tokenizer beside ``model.pretrained``.
        format: shape of the source records; ``auto`` looks at the first record.
        fields: our field name -> name in the records, e.g. ``{article: text, abstract: summary}``.
        layout: ``sft`` masks the prompt's labels, ``lm`` trains on every token. Follows ``train.objective``
            when the run does not state it.
        seq_length: tokens of one sample.
        prompt_length, answer_length: fixed split of ``seq_length`` for the ``sft`` layout. With one given the
            other is the rest; with none the split is free.
        system: system message for records without one.
        chat_template: Jinja template text or a file that holds it. ``None``: the tokenizer's own.
        num_parallel_workers: reader threads.
        shuffle: new order every epoch, derived from ``seed``.
        drop_last: drop the last incomplete batch of an epoch.
    """

    path: str | None = None
    eval_path: str | None = None
    tokenizer: str | None = None
    format: Literal["auto", "article", "messages", "query_response", "alpaca", "text"] = "auto"
    fields: dict[str, str] = field(default_factory=dict)
    layout: Literal["sft", "lm"] = "lm"
    seq_length: int = 2048
    prompt_length: int | None = None
    answer_length: int | None = None
    system: str | None = None
    chat_template: str | None = None
    num_parallel_workers: int = 2
    shuffle: bool = True
    seed: int = 42
    drop_last: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """Section ``parallel`` and the strategy file: degrees of every kind of parallelism.

    What they mean together, for a number of workers, is decided by :class:`ms_longctx.parallel.strategy.Strategy`.

    Args:
        dp: data parallel copies.
        mp: tensor parallel degree.
        sp: Megatron-style sequence parallel over the ``mp`` group: 1 or equal to ``mp``; ``true`` means ``mp``.
            Where dp x mp x pp x sp is the number of workers, it is read as ``cp``.
        pp: pipeline stages.
        cp: context parallel degree (``sequence_parallel_size``).
        attention_mode: attention over the ``cp`` pieces of a sequence. ``None``: ``ring``, unless
            ``ulysses_degree`` says otherwise; ``none`` goes with ``cp`` 1.
        ulysses_degree: divisor of ``cp``; ``hybrid`` needs it, the other modes imply it.
        micro_batch_num: micro batches in the pipeline. ``None``: ``train.gradient_accumulation_steps``, at least
            ``pp``.
        optimizer_shard: split the optimizer's state over the workers that hold the same weights (Ascend).
        vocab_parallel: split embedding and output layer by vocabulary over the ``mp`` group.
        pipeline_layers: decoder layers of each pipeline stage. ``None``: the same number in each.
        mode: who decides how operators are split (Ascend): we (``semi_auto``), or MindSpore for those of which we say
            nothing (``sharding_propagation``).
        recompute_communication: what ``train.recompute`` computes again it also receives again from the ``mp`` group
            and, with ``optimizer_shard``, from the owners of weights: less memory, more traffic (Ascend).
        comm_fusion: megabytes up to which gradients, and weights with ``optimizer_shard``, travel together (Ascend).
            ``None``: one by one.
        comm_overlap: communication and computation at the same time where MindSpore offers it (Ascend).
        save_strategy, load_strategy: MindSpore's own strategy files of the parameters (Ascend). The name gets the
            rank: ``s.ckpt`` becomes ``s_rank3.ckpt``.
    """

    dp: int = 1
    mp: int = 1
    sp: int | bool = 1
    pp: int = 1
    cp: int = 1
    attention_mode: Literal["none", "ring", "ulysses", "hybrid"] | None = None
    ulysses_degree: int | None = None
    micro_batch_num: int | None = None
    optimizer_shard: bool = False
    vocab_parallel: bool = False
    pipeline_layers: list[int] | None = None
    mode: Literal["semi_auto", "sharding_propagation"] = "semi_auto"
    recompute_communication: bool = False
    comm_fusion: int | None = None
    comm_overlap: bool = False
    save_strategy: str | None = None
    load_strategy: str | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """Section ``optimizer``: AdamW, its learning rate schedule and clipping.

    Args:
        learning_rate: peak learning rate.
        warmup_steps, warmup_ratio: length of the linear warm-up, in optimizer steps or as a part of all.
        min_lr_ratio: last learning rate of ``cosine`` and ``linear`` as a part of the peak.
        max_grad_norm: global gradient norm to clip to. ``None``: no clipping.
    """

    type: Literal["adamw"] = "adamw"
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.0
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """Section ``train``: objective, length, precision, checkpoints and logs of one run.

    Args:
        objective: what is trained; decides ``data.layout`` when that is not given.
        max_steps, epochs: end of training in optimizer steps or passes over the data, whichever comes first.
            With neither, one epoch.
        batch_size: sequences of one micro batch on one device.
        gradient_accumulation_steps: micro batches of one optimizer step.
        dtype: compute precision. ``fp16`` uses the dynamic loss scale below; ``bf16`` needs Ascend.
        loss_scale_init, loss_scale_window, loss_scale_min: first scale, good steps until it doubles, floor.
        max_skipped_steps: skipped steps in a row after which training stops with an error.
        recompute: keep only layer inputs and recompute the rest in the backward pass; ``selective`` recomputes
            norms and the MLP's gate only, which cost little time.
        output_dir: checkpoints, metrics and pictures.
        save_steps, eval_steps: optimizer steps between checkpoints, evaluations. ``None``: only at the end.
        keep_checkpoints: how many of the newest checkpoints stay on disk.
        log_steps: optimizer steps between log lines.
        resume: ``latest`` or a checkpoint directory. ``None``: a fresh start.
    """

    objective: Literal["pretrain", "sft"] = "pretrain"
    max_steps: int | None = None
    epochs: int | None = None
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    loss_scale_init: float = 65536.0
    loss_scale_window: int = 1000
    loss_scale_min: float = 1.0
    max_skipped_steps: int = 50
    recompute: bool | Literal["selective"] = False
    seed: int = 42
    output_dir: str = "outputs"
    save_steps: int | None = 500
    keep_checkpoints: int = 3
    log_steps: int = 10
    eval_steps: int | None = None
    device_target: Literal["auto", "Ascend", "GPU", "CPU"] = "auto"
    resume: str | None = None


@dataclass(frozen=True)
class LoraSection:
    """Section ``lora``: low-rank adapters, with the names of peft's ``LoraConfig``.

    Args:
        enabled: train adapters only; the base weights stay frozen.
        target_modules: names of the linear layers, or ``all-linear``.
        modules_to_save: other modules that train in full and are saved with the adapter.
    """

    enabled: bool = False
    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: list[str] | str = field(default_factory=lambda: ["q_proj", "v_proj"])
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: list[str] | None = None
    use_rslora: bool = False


@dataclass(frozen=True)
class GenerationConfig:
    """Section ``generation``: how tokens are chosen and when to stop.

    Args:
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens up to this probability; 1 keeps all.
        min_p: drop tokens less likely than this part of the most likely one's probability; 0 keeps all.
        do_sample: draw from the distribution; ``False`` takes the most likely token.
        stop: strings that end the text and are not part of it.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    do_sample: bool = False
    stop: list[str] = field(default_factory=list)
    seed: int = 42


@dataclass(frozen=True)
class EvaluateConfig:
    """Section ``evaluate``: which metrics, on how many samples. ``max_samples`` of ``None`` takes all."""

    metrics: list[Literal["perplexity", "rouge"]] = field(default_factory=lambda: ["perplexity", "rouge"])
    max_samples: int | None = None
    batch_size: int = 1


@dataclass(frozen=True)
class RunConfig:
    """One whole run. ``given`` holds the dotted names of the keys that the file or the command line state."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraSection = field(default_factory=LoraSection)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    given: frozenset[str] = frozenset()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every section as plain data; dumped as YAML, :func:`load_config` reads it back."""
        return {name: _plain(getattr(self, name)) for name in SECTIONS}


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "lora": LoraSection,
    "generation": GenerationConfig,
    "evaluate": EvaluateConfig,
}


def _plain(section: Any) -> dict[str, Any]:
    """Fields of a section, tuples as lists so that YAML's safe dumper takes them."""
    values = {name: getattr(section, name) for name in section.__dataclass_fields__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
