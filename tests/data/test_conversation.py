# SPDX-License-Identifier: Apache-2.0
"""What is learned is the assistant's text and its end token, in every kind of template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_longctx.data.conversation import Renderer
from ms_longctx.data.formats import Conversation, RowError, RowReader
from ms_longctx.data.samples import Lengths, SampleBuilder
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer

ROOMY = Lengths(seq_length=4096)
TEXTS = [
    "Hi.",
    " leading",
    "trailing \n",
    "\n\nnewlines first",
    "大型语言模型。",
    "👩‍🚀",
    "1. a\n2. b",
    "x" * 40,
]
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
NO_PROMPT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"  # ignores the flag


def _conversation(*turns: tuple[str, str, bool]) -> Conversation:
    messages: list[dict[str, Any]] = []
    for question, answer, loss in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "loss": loss})
    record = RowReader("messages", {}).read({"messages": messages})
    assert isinstance(record, Conversation)
    return record


def _learned(tokenizer: Tokenizer, record: Conversation) -> list[list[int]]:
    """Token ids of every supervised stretch."""
    ((tokens, runs),) = SampleBuilder(tokenizer, "sft", ROOMY).build(record).samples
    ends = np.cumsum(runs)
    return [tokens[end - length : end].tolist() for end, length in zip(ends[1::2], runs[1::2], strict=True)]


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(index) for index in ids).decode()


@pytest.mark.parametrize("answer", TEXTS, ids=ascii)
def test_supervised_text_is_answer_and_end_token(smollm2: Tokenizer, mistral: Tokenizer, answer: str) -> None:
    (learned,) = _learned(smollm2, _conversation(("Q", answer, True)))
    assert learned[-1] == smollm2.eos_id
    assert _text(smollm2, learned) == answer + "<|im_end|>"
    (learned,) = _learned(mistral, _conversation(("Q", answer, True)))  # the built-in plain template
    assert learned[-1] == mistral.eos_id and learned.count(mistral.eos_id) == 1
    assert _text(mistral, learned) == answer + "</s>"


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab \n中🚀<|>_"), min_size=1).filter(str.strip))
def test_supervised_text_fuzz(smollm2: Tokenizer, answer: str) -> None:
    (learned,) = _learned(smollm2, _conversation(("Q", answer, True)))
    assert _text(smollm2, learned) == answer + "<|im_end|>"


def test_prompt_tokens_are_those_of_generation(smollm2: Tokenizer) -> None:
    """Training reads exactly what the model is given when it is used."""
    record = _conversation(("First?", "One.", True), ("Second?\n", "\nTwo.", True))
    ((tokens, runs),) = SampleBuilder(smollm2, "sft", ROOMY).build(record).samples
    prompt = smollm2.encode_chat(record.messages[:1], add_generation_prompt=True)
    assert tokens[: runs[0]].tolist() == prompt
    whole_prompt = smollm2.encode_chat(record.messages[:3], add_generation_prompt=True)
    assert tokens[: runs[:3].sum()].tolist() == whole_prompt


def test_ids_equal_transformers_on_ordinary_text(smollm2: Tokenizer, smollm2_directory: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(smollm2_directory)
    record = _conversation(("Why is the sky blue?", "Because of Rayleigh scattering.", True))
    ((tokens, _),) = SampleBuilder(smollm2, "sft", ROOMY).build(record).samples
    messages = [{"role": m["role"], "content": m["content"]} for m in record.messages]
    expected = reference.apply_chat_template(messages)
    assert tokens.tolist() == expected[: len(tokens)]
    assert reference.decode(expected[len(tokens) :]) == "\n"  # what follows the last answer teaches nothing


def test_loss_flags_are_honoured(smollm2: Tokenizer) -> None:
    record = _conversation(("a", "first", False), ("b", "second", True), ("c", "third", False))
    assert [_text(smollm2, ids) for ids in _learned(smollm2, record)] == ["second<|im_end|>"]
    with pytest.raises(RowError, match="no assistant") as caught:
        _learned(smollm2, _conversation(("a", "first", False)))
    assert caught.value.reason == "no_answer"


@pytest.mark.parametrize("template, prefix", [(LLAMA2, " "), (NO_END, " "), (NO_PROMPT, "")])
def test_other_templates(sentencepiece_model: Path, template: str, prefix: str) -> None:
    tokenizer = load_tokenizer(sentencepiece_model, template)
    learned = _learned(tokenizer, _conversation(("Q1", "One two.", True), ("Q2", "三。", True)))
    end = " </s>" if template == LLAMA2 else "</s>"
    assert [_text(tokenizer, ids) for ids in learned] == [f"{prefix}One two.{end}", f"{prefix}三。{end}"]
    assert all(ids[-1] == tokenizer.eos_id for ids in learned)


def test_exactly_one_bos_whoever_writes_it(sentencepiece_model: Path) -> None:
    record = _conversation(("Q", "A", True))
    for template in (NO_END, "{{ bos_token }}" + NO_END):
        tokenizer = load_tokenizer(sentencepiece_model, template)
        for layout in ("sft", "lm"):
            ((tokens, _),) = SampleBuilder(tokenizer, layout, ROOMY).build(record).samples
            assert tokens[0] == tokenizer.bos_id and (tokens == tokenizer.bos_id).sum() == 1


def test_template_that_rewrites_earlier_turns_is_refused(sentencepiece_model: Path) -> None:
    """Templates that drop an answer once another follows cannot be trained on in one go."""
    template = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    tokenizer = load_tokenizer(sentencepiece_model, template)
    with pytest.raises(RowError, match="message 2") as caught:
        Renderer(tokenizer).segments(_conversation(("a", "one", True), ("b", "two", True)))
    assert caught.value.reason == "template"
    assert Renderer(tokenizer).segments(_conversation(("a", "one", True)))


def test_empty_answer_and_refusing_template(smollm2: Tokenizer, sentencepiece_model: Path) -> None:
    with pytest.raises(RowError) as caught:
        _learned(smollm2, _conversation(("a", " \n", True)))
    assert caught.value.reason == "empty"
    strict = load_tokenizer(sentencepiece_model, "{{ raise_exception('no') }}")
    with pytest.raises(RowError) as caught:
        _learned(strict, _conversation(("a", "b", True)))
    assert caught.value.reason == "template"
