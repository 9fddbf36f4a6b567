# SPDX-License-Identifier: Apache-2.0
"""From prompts to answers: token ids first, text on top of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ms_longctx.config import GenerationConfig
from ms_longctx.data.tokenizer import Tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.generation.engine import Engine, EngineSource, GraphEngine
from ms_longctx.generation.kernel_engine import KernelEngine, usable
from ms_longctx.generation.sampling import Sampler
from ms_longctx.generation.stopping import StopStrings
from ms_longctx.models.llama import LlamaForCausalLM

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """An answer: its text, its token ids (the end token included) and why it ended."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Piece:
    """The next piece of the answer of one row; ``finish_reason`` is set on the last one."""

    row: int
    text: str
    token_id: int
    finish_reason: FinishReason | None = None


def generate_ids(
    model: LlamaForCausalLM | EngineSource,
    prompts: Sequence[Sequence[int]],
    settings: GenerationConfig,
    eos_ids: Sequence[int] = (),
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, ``None`` for rows that have ended.

    A row ends with the first of ``eos_ids`` (which is yielded) or after ``settings.max_new_tokens``. A
    consumer that wants no more at all closes the iterator.

    Args:
        model: the model, or what brings an engine of its own.
        prompts: token ids of each row.
        settings: how to choose tokens.
        eos_ids: tokens that end an answer.

    Raises:
        MsLongctxError: an empty prompt, an id outside the vocabulary, more tokens than the model's context.
    """
    check_prompts(model, prompts, settings.max_new_tokens)
    engine = make_engine(model, prompts, settings.max_new_tokens)
    sampler = Sampler(settings, prompts)
    running = [True] * len(prompts)
    logits = engine.prefill()
    for count in range(settings.max_new_tokens):
        tokens = [sampler.choose(row, logits[row]) if running[row] else None for row in range(len(prompts))]
        running = [token is not None and token not in eos_ids for token in tokens]
        yield tokens
        if not any(running) or count + 1 == settings.max_new_tokens:
            return
        logits = engine.step(np.array([token or 0 for token in tokens], np.int32))


def make_engine(
    model: LlamaForCausalLM | EngineSource, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Engine:
    """The engine that suits the model and the device."""
    if not isinstance(model, LlamaForCausalLM):
        return model.engine(prompts, max_new_tokens)
    engine = KernelEngine if usable(model) else GraphEngine
    return engine(model, prompts, max_new_tokens)


def stream_text(
    model: LlamaForCausalLM | EngineSource,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: GenerationConfig,
) -> Iterator[Piece]:
    """Yield the answers piece by piece as text is certain: no broken characters, nothing of a stop string.

    Args:
        model: the model.
        tokenizer: decodes the answers; its ``eos_id`` ends them.
        prompts: token ids of each row.
        settings: how to choose and when to stop.
    """
    eos_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    decoders = [tokenizer.stream_decoder() for _ in prompts]
    stops = [StopStrings(settings.stop) for _ in prompts]
    open_rows = set(range(len(prompts)))
    for count, tokens in enumerate(generate_ids(model, prompts, settings, eos_ids), start=1):
        for row in sorted(open_rows):
            token = tokens[row]
            if token is None:
                continue
            ended = token in eos_ids
            text = "" if ended else decoders[row].push(token)
            text = stops[row].push(text)
            reason: FinishReason | None = "stop" if ended or stops[row].stopped else None
            if reason is None and count == settings.max_new_tokens:
                reason = "length"
            if reason is not None:
                open_rows.discard(row)
                text += stops[row].push(decoders[row].flush()) + stops[row].finish()
            yield Piece(row, text, token, reason)
        if not open_rows:
            return


def complete(
    model: LlamaForCausalLM | EngineSource,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: GenerationConfig,
) -> list[Completion]:
    """The answers to ``prompts``; see :func:`stream_text`."""
    texts = ["" for _ in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length" for _ in prompts]
    for piece in stream_text(model, tokenizer, prompts, settings):
        texts[piece.row] += piece.text
        ids[piece.row].append(piece.token_id)
        reasons[piece.row] = piece.finish_reason or reasons[piece.row]
    return [Completion(*parts) for parts in zip(texts, ids, reasons, strict=True)]


def generate(
    model: LlamaForCausalLM,
    input_ids: ArrayLike,
    attention_mask: ArrayLike | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    **settings: Any,
) -> NDArray[np.int32]:
    """Prompts and answers as one array, in the manner of transformers.

    Args:
        model: the model.
        input_ids: ``(B, S)`` or ``(S,)`` ids; an array, a list or a MindSpore tensor. Padding is on the left.
        attention_mask: ``(B, S)``, 0 where ``input_ids`` is padding.
        eos_token_id: what ends an answer; the model's own if ``None``.
        pad_token_id: fills rows that ended early; the model's own, or the end token, if ``None``.
        settings: fields of :class:`~ms_longctx.config.GenerationConfig`, e.g. ``max_new_tokens=256``.

    Returns:
        ``(B, S + longest answer)`` int32.
    """
    prompt = np.atleast_2d(np.asarray(getattr(input_ids, "asnumpy", lambda: input_ids)()))
    kept = np.ones_like(prompt, bool) if attention_mask is None else np.atleast_2d(attention_mask).astype(bool)
    rows = [ids[keep].tolist() for ids, keep in zip(prompt, kept, strict=True)]
    wanted = _settings(settings)
    eos = model.config.eos_token_id if eos_token_id is None else eos_token_id
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)
    pad = next((i for i in (pad_token_id, model.config.pad_token_id, *eos_ids) if i is not None), 0)
    steps = [
        [pad if token is None else token for token in tokens] for tokens in generate_ids(model, rows, wanted, eos_ids)
    ]
    answers = np.array(steps, np.int32).reshape(-1, len(rows)).T
    return np.concatenate((prompt.astype(np.int32), answers), axis=1)


def check_prompts(
    model: LlamaForCausalLM | EngineSource, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts that the model cannot take; see :func:`generate_ids`."""
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if not prompts:
        raise MsLongctxError("generate: there is no prompt")
    if max_new_tokens < 1:
        raise MsLongctxError(f"generate: max_new_tokens is {max_new_tokens}; expected 1 or more")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise MsLongctxError(f"generate: prompt {row} has no tokens; expected at least one")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise MsLongctxError(
                f"generate: prompt {row} holds token id {max(max(prompt), -min(prompt))}, but the model "
                f"knows 0 to {vocab - 1}; use the tokenizer of this model"
            )
        if len(prompt) + max_new_tokens > limit:
            raise MsLongctxError(
                f"generate: prompt {row} has {len(prompt)} tokens; with max_new_tokens {max_new_tokens} "
                f"that is more than the model's context of {limit}; {_advice(limit - max_new_tokens)} or set "
                "model.rope_scaling for a longer context"
            )


def _advice(room: int) -> str:
    return f"shorten the prompt to {room} tokens" if room > 0 else "lower max_new_tokens"


def _settings(values: dict[str, Any]) -> GenerationConfig:
    """Settings with those given replaced; unknown ones are an error."""
    known = GenerationConfig.__dataclass_fields__
    for name in values:
        if name not in known:
            raise MsLongctxError(f"generate: unknown setting {name!r}; expected one of {', '.join(known)}")
    return replace(GenerationConfig(), **values)
