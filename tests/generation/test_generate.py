# SPDX-License-Identifier: Apache-2.0
"""Generated tokens against transformers (fp32, torch), and the ways of asking for them against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import torch
import transformers
from mindspore import Tensor

from ms_longctx.config import GenerationConfig
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.generation.engine import CHUNK, GraphEngine
from ms_longctx.generation.generate import complete, generate, generate_ids, stream_text
from ms_longctx.models.llama import LlamaForCausalLM
from tests.models.reference import same_model, torch_model

LONG = 3 * CHUNK // 2
QUESTIONS = ("What is the capital of France?", "写一首关于春天的短诗。", "List three prime numbers, then stop. 🙂")


@pytest.fixture(autouse=True)
def pynative() -> Iterator[None]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    model = torch_model(num_attention_heads=6, num_key_value_heads=3, head_dim=10, max_position_embeddings=2 * LONG)
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def model(reference: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return same_model(reference, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    return LlamaForCausalLM.from_pretrained(smollm2_gguf), load_tokenizer(smollm2_gguf)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 103, length).tolist() for length in lengths]


def tokens(model: LlamaForCausalLM, rows: list[list[int]], **settings: object) -> list[list[int | None]]:
    """New tokens of each row."""
    steps = list(generate_ids(model, rows, replace(GenerationConfig(), **settings)))  # type: ignore[arg-type]
    return [list(row) for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("length", [1, 31, CHUNK, LONG])
def test_greedy_tokens_equal_transformers(
    length: int, model: LlamaForCausalLM, reference: transformers.PreTrainedModel
) -> None:
    (prompt,) = prompts(length)
    ids = torch.tensor([prompt])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    expected = out[0, length:].tolist()
    assert tokens(model, [prompt], max_new_tokens=20) == [expected]


def test_cached_equals_uncached(model: LlamaForCausalLM) -> None:
    (prompt,) = prompts(31)
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(model(Tensor([ids], ms.int32)).asnumpy()[0, -1].argmax()))
    assert tokens(model, [prompt], max_new_tokens=12) == [ids[31:]]


def test_graph_engine_logits_equal_the_whole_forward_pass(model: LlamaForCausalLM) -> None:
    """1e-4; prompts of unequal length side by side, across a chunk border."""
    rows = prompts(LONG, 5)
    engine = GraphEngine(model, rows, 4)
    logits = [engine.prefill(), engine.step(np.array([7, 8], np.int32))]
    for row, extra in zip((0, 1), (7, 8), strict=True):
        whole = model(Tensor([[*rows[row], extra]], ms.int32)).asnumpy()[0]
        np.testing.assert_allclose(logits[0][row], whole[-2], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits[1][row], whole[-1], rtol=0, atol=1e-4)


def test_rows_of_a_batch_equal_single_rows(model: LlamaForCausalLM) -> None:
    rows = prompts(3, 40, 17)
    for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 20}):
        together = tokens(model, rows, max_new_tokens=10, **sampling)
        assert together[0] == tokens(model, rows[:1], max_new_tokens=10, **sampling)[0]
        if not sampling:  # rows draw from generators of their own number
            assert together[1:] == [tokens(model, [row], max_new_tokens=10)[0] for row in rows[1:]]


def test_seed_decides(model: LlamaForCausalLM) -> None:
    rows = prompts(9)
    drawn = [tokens(model, rows, max_new_tokens=16, do_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_rows_end_apart(model: LlamaForCausalLM) -> None:
    rows = prompts(9, 12)
    free = tokens(model, rows, max_new_tokens=12)
    eos = free[0][3]
    assert eos is not None
    end = free[0].index(eos) + 1
    steps = list(generate_ids(model, rows, GenerationConfig(max_new_tokens=12), (eos,)))
    assert [step[0] for step in steps[:end]] == free[0][:end]
    assert all(step[0] is None for step in steps[end:])
    array = generate(model, [rows[0]], eos_token_id=eos, max_new_tokens=12)
    assert array.tolist() == [[*rows[0], *free[0][:end]]]


def test_padded_array_equals_rows(model: LlamaForCausalLM) -> None:
    short, long = prompts(4, 9)
    ids = np.array([[0] * 5 + short, long])
    mask = np.array([[0] * 5 + [1] * 4, [1] * 9])
    result = model.generate(Tensor(ids, ms.int32), attention_mask=mask, max_new_tokens=6)
    assert result[:, 9:].tolist() == [tokens(model, [row], max_new_tokens=6)[0] for row in (short, long)]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([[]], {}, "prompt 0 has no tokens"),
        ([], {}, "there is no prompt"),
        ([[1, 103]], {}, r"token id 103, but the model knows 0 to 102"),
        ([[1] * 500], {"max_new_tokens": 300}, "prompt 0 has 500 tokens; with max_new_tokens 300 .* context of 768"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"top_q": 1}, "unknown setting 'top_q'"),
    ],
)
def test_errors(rows: list[list[int]], settings: dict[str, int], message: str, model: LlamaForCausalLM) -> None:
    with pytest.raises(MsLongctxError, match=message):
        if "top_q" in settings:
            model.generate(rows, **settings)
        else:
            list(generate_ids(model, rows, replace(GenerationConfig(), **settings)))


@pytest.mark.slow
def test_real_answers_equal_transformers(smollm2: tuple[LlamaForCausalLM, Tokenizer], tmp_path: Path) -> None:
    """48 greedy tokens of SmolLM2-135M-Instruct, alone and as one left-padded batch."""
    model, tokenizer = smollm2
    model.save_pretrained(tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rows = [
        tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True) for text in QUESTIONS
    ]
    expected = []
    for row in rows:
        ids = torch.tensor([row])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=2
        )
        expected.append(out[0, len(row) :].tolist())
    settings = GenerationConfig(max_new_tokens=48)
    alone = [complete(model, tokenizer, [row], settings)[0] for row in rows]
    assert [answer.token_ids for answer in alone] == expected
    together = complete(model, tokenizer, rows, settings)
    assert together == alone
    for answer, ids in zip(alone, expected, strict=True):
        assert answer.text == tokenizer.decode(ids)
        assert answer.finish_reason == ("stop" if ids[-1] == tokenizer.eos_id else "length")


@pytest.mark.slow
def test_stream_and_stop_strings(smollm2: tuple[LlamaForCausalLM, Tokenizer]) -> None:
    model, tokenizer = smollm2
    row = tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[1]}], add_generation_prompt=True)
    settings = GenerationConfig(max_new_tokens=40)
    pieces = list(stream_text(model, tokenizer, [row], settings))
    whole = "".join(piece.text for piece in pieces)
    assert "\ufffd" not in whole and len(whole) > 5
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    stop = whole[3:6]
    (cut,) = complete(model, tokenizer, [row], replace(settings, stop=[stop]))
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
