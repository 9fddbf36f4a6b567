# SPDX-License-Identifier: Apache-2.0
"""Which models a strategy can split: what has to divide what, refused before anything is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ms_longctx.config import LlamaConfig
from ms_longctx.errors import MsLongctxError

if TYPE_CHECKING:
    from ms_longctx.parallel.strategy import Strategy


def check_model(strategy: Strategy, config: LlamaConfig, seq_length: int, batch_size: int) -> None:
    """See :meth:`~ms_longctx.parallel.strategy.Strategy.check_model`."""
    _check_tensors(strategy, config)
    _check_ulysses(strategy, config)
    _check_layers(strategy, config)
    _check_sequence(strategy, seq_length, batch_size)


def _check_tensors(strategy: Strategy, config: LlamaConfig) -> None:
    mp = strategy.mp
    if config.kv_heads < mp:
        # MindSpore's compiler does not refuse this: it crashes.
        raise MsLongctxError(
            f"num_key_value_heads = {config.kv_heads} is below mp = {mp}: tensor parallelism gives each worker whole "
            f"key/value heads; expected mp of at most {config.kv_heads}"
        )
    for name, size in (
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.kv_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        _divide(name, size, f"mp = {mp}", mp)
    if strategy.vocab_parallel:
        _divide("vocab_size", config.vocab_size, f"mp = {mp} (vocab_parallel)", mp)


def _check_ulysses(strategy: Strategy, config: LlamaConfig) -> None:
    """Ulysses gives each worker some heads; key/value heads that are too few are copied, whole ones."""
    degree = strategy.ulysses_degree
    heads, kv_heads = config.num_attention_heads // strategy.mp, config.kv_heads // strategy.mp
    if heads % degree:
        raise MsLongctxError(
            f"{_share('num_attention_heads', config.num_attention_heads, strategy.mp)} must be divisible by "
            f"ulysses_degree = {degree}; expected a divisor of {heads}, or attention_mode ring"
        )
    if kv_heads % degree and degree % kv_heads:
        raise MsLongctxError(
            f"{_share('num_key_value_heads', config.kv_heads, strategy.mp)} and ulysses_degree = {degree}: one must "
            "divide the other; choose another ulysses_degree, or attention_mode ring"
        )


def _share(name: str, count: int, mp: int) -> str:
    return f"{name} = {count}" if mp == 1 else f"{name} {count} / mp {mp} = {count // mp}"


def _check_layers(strategy: Strategy, config: LlamaConfig) -> None:
    layers, stages = config.num_hidden_layers, strategy.pp
    if strategy.pipeline_layers is not None:
        total = sum(strategy.pipeline_layers)
        if total != layers:
            raise MsLongctxError(
                f"pipeline_layers = {list(strategy.pipeline_layers)} are {total} layers; expected num_hidden_layers = "
                f"{layers}"
            )
    elif layers < stages:
        raise MsLongctxError(f"num_hidden_layers = {layers} is below pp = {stages}: a stage would be empty")
    elif layers % stages:
        raise MsLongctxError(
            f"num_hidden_layers = {layers} is not divisible by pp = {stages}; choose another pp, or say with "
            f"pipeline_layers how many each stage has, for example {_spread(layers, stages)}"
        )


def _check_sequence(strategy: Strategy, seq_length: int, batch_size: int) -> None:
    cp, multiple = strategy.cp, strategy.sequence_multiple
    rule = f"cp = {cp}" if multiple == cp else f"2 x cp = {multiple} (a causal ring gives each worker two pieces)"
    _divide("sequence length", seq_length, rule, multiple)
    if strategy.sequence_parallel:
        # The mp group splits the tokens of the batch, not each sequence.
        tokens = batch_size * seq_length // cp
        name = f"batch size {batch_size} x sequence length {seq_length}{f' / cp {cp}' if cp > 1 else ''}"
        _divide(name, tokens, f"mp = {strategy.mp} (sequence parallel)", strategy.mp)


def _divide(name: str, size: int, rule: str, divisor: int) -> None:
    if size % divisor:
        raise MsLongctxError(f"{name} = {size} is not divisible by {rule}")


def _spread(layers: int, stages: int) -> list[int]:
    """As even as it goes, longer stages in the middle: the ends hold embedding and output."""
    base, rest = divmod(layers, stages)
    longer = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))[:rest]
    return [base + (stage in longer) for stage in range(stages)]
