# SPDX-License-Identifier: Apache-2.0
"""Samples fit their row; what is taken from long texts, and that every token is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_longctx.data.formats import Conversation, RowError, RowReader
from ms_longctx.data.samples import Built, Lengths, SampleBuilder
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError

MIXED = "Große Straße 🚀 👩‍🚀 大型语言模型的长上下文训练。 Plain words follow, then more. "


def _article(text: str, abstract: str = "Short.") -> Conversation:
    record = RowReader("article", {}).read({"article": text, "abstract": abstract})
    assert isinstance(record, Conversation)
    return record


def _parts(built: Built) -> tuple[list[int], list[int]]:
    ((tokens, runs),) = built.samples
    assert len(runs) == 2 and runs.sum() == len(tokens)
    return tokens[: runs[0]].tolist(), tokens[runs[0] :].tolist()


def _accounted(built: Built) -> None:
    """In = written + left out."""
    assert built.encoded == sum(len(tokens) for tokens, _ in built.samples) + sum(built.lost.values())


def test_short_article_is_untouched(smollm2: Tokenizer) -> None:
    built = SampleBuilder(smollm2, "sft", Lengths(8192, 7936, 256)).build(_article("A text."))
    prompt, answer = _parts(built)
    assert not built.lost
    assert smollm2.decode(prompt, skip_special_tokens=False).endswith("A text.<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.decode(answer, skip_special_tokens=False) == "Short.<|im_end|>"
    _accounted(built)


def test_long_article_is_cut_and_the_answer_kept(smollm2: Tokenizer, articles: list[dict[str, Any]]) -> None:
    """A prompt longer than its limit must not push the answer out (UniVR#13, trl#6668)."""
    row = max(articles, key=lambda row: len(row["article"]))
    built = SampleBuilder(smollm2, "sft", Lengths(8192, 7936, 256)).build(_article(row["article"], "The gist."))
    prompt, answer = _parts(built)
    assert len(prompt) == 7936
    assert smollm2.decode(answer, skip_special_tokens=False) == "The gist.<|im_end|>"
    text = smollm2.decode(prompt, skip_special_tokens=False)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    inside = text.split("article.\n\n")[1].removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert row["article"].startswith(inside) and len(inside) > 20_000
    assert built.lost.keys() == {"prompts"}
    _accounted(built)


def test_answer_takes_the_room_it_needs_when_lengths_are_free(smollm2: Tokenizer) -> None:
    answer_text = " ".join(["answer"] * 100)
    built = SampleBuilder(smollm2, "sft", Lengths(256)).build(_article(MIXED * 50, answer_text))
    prompt, answer = _parts(built)
    assert len(prompt) + len(answer) == 256
    assert smollm2.decode(answer) == answer_text and answer[-1] == smollm2.eos_id


def test_answer_cut_to_its_limit_loses_its_end_token(smollm2: Tokenizer) -> None:
    """A cut answer must not teach the model to stop in the middle."""
    built = SampleBuilder(smollm2, "sft", Lengths(128, 96, 32)).build(_article("Text.", "word " * 200))
    _, answer = _parts(built)
    assert len(answer) == 32 and smollm2.eos_id not in answer
    assert built.lost["answers"] > 100
    _accounted(built)


@settings(max_examples=60, deadline=None)
@given(
    room=st.integers(60, 150), cut=st.sampled_from(["right", "left", "middle"]), repeats=st.integers(5, 12),
    start=st.integers(0, 30),
)  # fmt: skip
def test_cut_never_splits_a_character(
    smollm2: Tokenizer, mistral: Tokenizer, room: int, cut: str, repeats: int, start: int
) -> None:
    source = (MIXED * repeats)[start:].strip()
    for tokenizer in (smollm2, mistral):
        built = SampleBuilder(tokenizer, "sft", Lengths(room + 20, room, 20, truncation=cut)).build(_article(source))
        prompt, _ = _parts(built)
        assert room - 8 <= len(prompt) <= room  # up to one character is given away besides
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert "\ufffd" not in text
        inside = text.split("article.\n\n")[1].removesuffix("<|im_end|>\n<|im_start|>assistant\n").rstrip("\n")
        if cut == "right":
            assert source.startswith(inside)
        elif cut == "left":
            assert source.endswith(inside)
        else:
            ends = len(source) - len(inside)
            assert any(source[:k] + source[ends + k :] == inside for k in range(len(inside)))
        _accounted(built)


def test_cutting_leaves_every_other_token_as_it_was(smollm2: Tokenizer) -> None:
    record = _article(MIXED * 20)
    whole, _ = _parts(SampleBuilder(smollm2, "sft", Lengths(4096)).build(record))
    cut, _ = _parts(SampleBuilder(smollm2, "sft", Lengths(220, 200, 20)).build(record))
    same_start = next(i for i, (a, b) in enumerate(zip(whole, cut, strict=False)) if a != b)
    assert whole[-(len(cut) - same_start) :] == cut[same_start:] and same_start > 100


def test_tokenizer_that_normalises_is_cut_in_parts(smollm2_gguf: Path, tmp_path: Path) -> None:
    """With NFC in front, bytes of tokens and text differ, so there are no offsets to cut at."""
    import json

    reference = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    reference.save_pretrained(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path)
    source = "e\u0301tude 大型 " * 100
    assert tokenizer.byte_offsets(source, tokenizer.encode(source)) is None
    built = SampleBuilder(tokenizer, "sft", Lengths(120, 100, 20)).build(_article(source))
    prompt, answer = _parts(built)
    assert len(prompt) <= 100 and "\ufffd" not in tokenizer.decode(prompt)
    assert tokenizer.decode(answer) == "Short."


def test_delete_drops_and_counts(smollm2: Tokenizer) -> None:
    for record in (_article(MIXED * 50), _article("Text.", "word " * 200)):
        with pytest.raises(RowError) as caught:
            SampleBuilder(smollm2, "sft", Lengths(128, 96, 32, truncation="delete")).build(record)
        assert caught.value.reason == "too_long"


def test_prompt_that_cannot_be_shortened_is_dropped(smollm2: Tokenizer) -> None:
    record = RowReader("article", {}, system="rule " * 200).read({"article": "Text.", "abstract": "A."})
    with pytest.raises(RowError, match="nothing to take") as caught:
        SampleBuilder(smollm2, "sft", Lengths(128)).build(record)
    assert caught.value.reason == "too_long"


def test_longest_user_message_is_shortened_in_a_conversation(smollm2: Tokenizer) -> None:
    row = {"query": "And?", "response": "Two.", "history": [[MIXED * 20, "One."]]}
    record = RowReader("query_response", {}).read(row)
    ((tokens, runs),) = SampleBuilder(smollm2, "sft", Lengths(200)).build(record).samples
    assert len(tokens) == 200 and len(runs) == 4
    text = smollm2.decode(tokens, skip_special_tokens=False)
    assert "<|im_start|>user\nAnd?<|im_end|>" in text and "One.<|im_end|>" in text and text.endswith("Two.<|im_end|>")


def test_plain_text_pieces_are_consecutive_and_counted(mistral: Tokenizer, articles: list[dict[str, Any]]) -> None:
    """An over-long text is neither dropped nor lost silently."""
    text = articles[0]["article"]
    built = SampleBuilder(mistral, "lm", Lengths(1000, min_tokens=50)).build(text)
    joined = np.concatenate([tokens for tokens, _ in built.samples])
    expected = mistral.encode(text, add_bos=True, add_eos=True)
    assert joined.tolist() == expected[: len(joined)] and len(expected) - len(joined) < 50
    assert [len(tokens) for tokens, _ in built.samples[:-1]] == [1000] * (len(built.samples) - 1)
    assert all(runs.tolist() == [0, len(tokens)] for tokens, runs in built.samples)
    _accounted(built)


def test_tail_that_is_too_short_is_counted(mistral: Tokenizer) -> None:
    text = "word " * 30
    ids = mistral.encode(text, add_bos=True, add_eos=True)
    built = SampleBuilder(mistral, "lm", Lengths(len(ids) - 1)).build(text)
    assert len(built.samples) == 1 and built.lost == {"short_ends": 1}
    _accounted(built)


def test_too_short_and_no_answer(mistral: Tokenizer) -> None:
    with pytest.raises(RowError) as caught:
        SampleBuilder(mistral, "lm", Lengths(100, min_tokens=20)).build("Hi")
    assert caught.value.reason == "too_short"
    with pytest.raises(RowError, match="layout lm") as caught:
        SampleBuilder(mistral, "sft", Lengths(100)).build("Hi")
    assert caught.value.reason == "no_answer"


@pytest.mark.parametrize("arguments", [
    {"seq_length": 1}, {"seq_length": 10, "min_tokens": 11}, {"seq_length": 10, "truncation": "top"},
    {"seq_length": 10, "prompt_length": 8, "answer_length": 3},
    {"seq_length": 10, "prompt_length": 0}])  # fmt: skip
def test_impossible_lengths(arguments: dict[str, Any]) -> None:
    with pytest.raises(MsLongctxError):
        Lengths(**arguments)
