# SPDX-License-Identifier: Apache-2.0
"""Ids and texts of every kind of tokenizer against transformers, sentencepiece and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_longctx.data.gguf_metadata import read_gguf_metadata
from ms_longctx.data.tokenizer import Tokenizer, load_tokenizer
from ms_longctx.errors import MsLongctxError

GOLDEN = json.loads((Path(__file__).parent / "llama_cpp_smollm2.json").read_text())["rows"]
TEXTS = [row["text"] for row in GOLDEN]
# SmolLM2's vocabulary lacks these bytes altogether (its own tokenizer drops them too).
SMOLLM2_LACKS = set(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")
# SentencePiece writes a space as U+2581, so that character itself cannot come back; surrogates are not text.
ANY_TEXT = st.text(st.characters(exclude_characters="\u2581", exclude_categories=("Cs",)), max_size=60)
SMOLLM2_TEXT = ANY_TEXT.filter(lambda text: not SMOLLM2_LACKS & set(text.encode()))


@pytest.fixture(scope="session", params=["legacy", "metaspace"])
def llama_directory(
    request: pytest.FixtureRequest, sentencepiece_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """tokenizer.json of the SentencePiece family, as transformers converts it, in both of its layouts."""
    folder = tmp_path_factory.mktemp(f"llama-{request.param}")
    reference = transformers.LlamaTokenizerFast(
        vocab_file=str(sentencepiece_model), legacy=request.param == "legacy", from_slow=True
    )
    reference.save_pretrained(folder)
    return folder


# --- ids equal the reference ---


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: ascii(row["text"])[:30])
def test_gguf_ids_equal_llama_cpp(smollm2: Tokenizer, row: dict) -> None:
    assert smollm2.encode(row["text"]) == row["ids"]
    assert smollm2.encode(row["text"], parse_special=False) == row["plain"]


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_other_gguf_families_equal_llama_cpp(smollm2_gguf: Path, tmp_path: Path, pre: str) -> None:
    """The same vocabulary with Llama 3's and GPT-2's way to split text, in a file the gguf package writes."""
    metadata = read_gguf_metadata(smollm2_gguf)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(row["text"]) for row in GOLDEN] == [row[pre] for row in GOLDEN]
    assert sum(row[pre] != row["ids"] for row in GOLDEN) in (1, 5)  # so the choice shows
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, 0)


def test_unknown_gguf_family_is_refused(tmp_path: Path) -> None:
    for model, pre, message in (
        ("gpt2", "mystery", "pre is 'mystery'; supported are gpt-2"),
        ("bert", "x", "'bert'"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(MsLongctxError, match=message):
            load_tokenizer(tmp_path / "model.gguf")


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT)
def test_sentencepiece_ids_equal_sentencepiece(mistral: Tokenizer, sentencepiece_model: Path, text: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert mistral.encode(text, parse_special=False) == reference.encode(text)


@pytest.mark.parametrize("text", [*TEXTS, "<s>\nHi", "a</s>\n\nb", "</s> x", "x<s>哈哈", "<s><s> y"], ids=ascii)
def test_sentencepiece_ids_equal_transformers(mistral: Tokenizer, sentencepiece_model: Path, text: str) -> None:
    """After a special token no space is put before the text (the extra 29871 of Chinese-LLaMA-Alpaca#475)."""
    reference = transformers.LlamaTokenizer(vocab_file=str(sentencepiece_model), legacy=False)
    assert mistral.encode(text) == reference.encode(text, add_special_tokens=False)


def test_sentencepiece_newline_and_chinese_have_no_stray_space_after_special(mistral: Tokenizer) -> None:
    space = mistral.encode("")
    assert space == []
    newline, chinese = mistral.encode("</s>\n"), mistral.encode("</s>哈哈哈")
    assert newline == [mistral.eos_id, 13]
    assert len(chinese) == 4 and len(set(chinese[1:])) == 1


@settings(max_examples=150, deadline=None)
@given(ANY_TEXT)
def test_hf_ids_equal_transformers(smollm2_directory: Path, text: str) -> None:
    mine, reference = _pair(smollm2_directory)
    assert mine.encode(text) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", [*TEXTS, "<s>\nHi", "a</s>\n\nb", "x<s>哈哈"], ids=ascii)
def test_hf_llama_ids_equal_transformers(llama_directory: Path, text: str) -> None:
    mine, reference = _pair(llama_directory)
    assert mine.encode(text) == reference.encode(text, add_special_tokens=False)
    assert mine.encode(text, add_bos=True) == (
        reference.encode(text) if not text.startswith("<s>") else mine.encode(text)
    )


def test_hf_directory_settings(llama_directory: Path) -> None:
    mine, reference = _pair(llama_directory)
    assert (mine.bos_id, mine.eos_id, mine.adds_bos) == (reference.bos_token_id, reference.eos_token_id, True)
    assert mine.vocab_size == len(reference)


_PAIRS: dict[Path, tuple[Tokenizer, transformers.PreTrainedTokenizerFast]] = {}


def _pair(folder: Path) -> tuple[Tokenizer, transformers.PreTrainedTokenizerFast]:
    if folder not in _PAIRS:
        _PAIRS[folder] = (load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder))
    return _PAIRS[folder]


# --- decode(encode(x)) == x ---


@settings(max_examples=300, deadline=None)
@given(SMOLLM2_TEXT)
def test_round_trip(smollm2: Tokenizer, mistral: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, mistral):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, add_bos=True, add_eos=True)) == text


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_round_trip_hf_llama(llama_directory: Path, text: str) -> None:
    mine, _ = _pair(llama_directory)
    assert mine.decode(mine.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_decode_equals_transformers(smollm2_directory: Path, llama_directory: Path, text: str) -> None:
    for folder in (smollm2_directory, llama_directory):
        mine, reference = _pair(folder)
        ids = reference.encode(text)
        assert mine.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# --- streaming ---


@settings(max_examples=150, deadline=None)
@given(SMOLLM2_TEXT, st.lists(st.integers(1, 5), max_size=8))
def test_stream_joins_to_decode(smollm2: Tokenizer, mistral: Tokenizer, text: str, chunks: list[int]) -> None:
    for tokenizer in (smollm2, mistral):
        ids = tokenizer.encode(text)
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(index) for index in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_every_split_of_bytes_streams_without_replacement(mistral: Tokenizer) -> None:
    """One byte a token, cut anywhere: emoji with a zero-width joiner never shows U+FFFD in the middle."""
    text = "客单价👩‍🚀"
    ids = [3 + byte for byte in text.encode()]  # byte pieces start at id 3 in this model
    for cut in range(len(ids) + 1):
        decoder = mistral.stream_decoder(continues=True)
        first = "".join(decoder.push(index) for index in ids[:cut])
        second = "".join(decoder.push(index) for index in ids[cut:]) + decoder.flush()
        assert first + second == text
        assert text.startswith(first)


def test_broken_utf8_is_replaced_once_at_the_end(mistral: Tokenizer) -> None:
    ids = [3 + byte for byte in "价".encode()[:2]]
    decoder = mistral.stream_decoder()
    assert [decoder.push(index) for index in ids] == ["", ""]
    assert decoder.flush() == "\ufffd" == mistral.decode(ids)


def test_stream_after_prompt_keeps_the_leading_space(mistral: Tokenizer) -> None:
    ids = mistral.encode("The cat sat")
    decoder = mistral.stream_decoder(continues=True)
    assert "".join(decoder.push(index) for index in ids[1:]) == " cat sat"
    assert mistral.encode("cat sat", continues=True)[-1] == ids[-1]


# --- special tokens, offsets, errors ---


def test_exactly_one_bos(mistral: Tokenizer, sentencepiece_model: Path) -> None:
    with_bos = load_tokenizer(sentencepiece_model, "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]")
    without = load_tokenizer(sentencepiece_model, "[INST] {{ messages[0].content }} [/INST]")
    message = [{"role": "user", "content": "Hi"}]
    for tokenizer in (with_bos, without):
        ids = tokenizer.encode_chat(message)
        assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert mistral.encode("<s>Hi", add_bos=True).count(mistral.bos_id) == 1


def test_chat_template_equals_transformers(smollm2: Tokenizer, smollm2_directory: Path) -> None:
    mine, reference = _pair(smollm2_directory)
    messages = [{"role": "user", "content": "Hi\n"}, {"role": "assistant", "content": " 好的。"}]
    for add_generation_prompt in (False, True):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        assert mine.apply_chat_template(messages, add_generation_prompt) == expected
        assert smollm2.apply_chat_template(messages, add_generation_prompt) == expected
        assert mine.encode_chat(messages, add_generation_prompt) == reference.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt
        )


@settings(max_examples=100, deadline=None)
@given(SMOLLM2_TEXT)
def test_byte_offsets_find_every_token(smollm2: Tokenizer, mistral: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, mistral):
        for continues in (False, True):
            ids = tokenizer.encode(text, continues=continues)
            offsets = tokenizer.byte_offsets(text, ids, continues)
            assert offsets is not None and len(offsets) == len(ids) + 1
            for index, start, end in zip(ids, offsets[:-1], offsets[1:], strict=True):
                if start > 0:
                    assert text.encode()[start:end] == tokenizer.token_bytes(index)


def test_fingerprint_depends_on_the_vocabulary_not_the_file(
    smollm2: Tokenizer, mistral: Tokenizer, smollm2_directory: Path
) -> None:
    assert smollm2.fingerprint() == _pair(smollm2_directory)[0].fingerprint() != mistral.fingerprint()


def test_gguf_sentencepiece_vocabulary(sentencepiece_model: Path, tmp_path: Path) -> None:
    """A SentencePiece vocabulary written by the gguf package gives the ids of the original model."""
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    count = reference.get_piece_size()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([reference.id_to_piece(i) for i in range(count)])
    writer.add_token_scores([reference.get_score(i) for i in range(count)])
    kinds = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1
        for i in range(count)
    ]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, count)
    for text in TEXTS:
        assert tokenizer.encode(text, parse_special=False) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("adds_bos", [False, True])
def test_transformers_opens_what_is_saved(smollm2_gguf: Path, tmp_path: Path, adds_bos: bool) -> None:
    """The vocabulary of a GGUF file as a Hugging Face directory, for a model with and without BOS."""
    tokenizer = load_tokenizer(smollm2_gguf)
    tokenizer.adds_bos = adds_bos
    tokenizer.save_pretrained(tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.adds_bos == adds_bos and ours.fingerprint() == tokenizer.fingerprint()
    for text in TEXTS:
        assert ours.encode(text) == tokenizer.encode(text)
        if not (adds_bos and text.startswith("<|im_start|>")):  # it adds a second one there
            assert theirs(text).input_ids == tokenizer.encode(text, add_bos=adds_bos)
    messages = [{"role": "user", "content": "Grüße, 世界!"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == rendered
    assert ours.apply_chat_template(messages, add_generation_prompt=True) == rendered
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)


def test_transformers_opens_a_saved_sentencepiece_model(mistral: Tokenizer, tmp_path: Path) -> None:
    mistral.save_pretrained(tmp_path)
    theirs, ours = transformers.LlamaTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, add_bos=True) == mistral.encode(text, add_bos=True)
        if "<s>" not in text:  # it adds a second one there
            assert theirs(text).input_ids == mistral.encode(text, add_bos=True)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.model", b"{}"),
        ("empty.model", b""),
        ("tokenizer.json", b"[1]"),
        ("tokenizer.json", b"\xff"),
        ("m.gguf", b"GGUF\x03\x00\x00\x00"),
        ("m.gguf", b"PK\x03\x04"),
        ("m.gguf", b""),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MsLongctxError, match=name):
        load_tokenizer(tmp_path / name)


def test_missing_and_empty_directories(tmp_path: Path) -> None:
    with pytest.raises(MsLongctxError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(MsLongctxError, match="should hold"):
        load_tokenizer(tmp_path)


def test_ids_outside_the_vocabulary(smollm2: Tokenizer) -> None:
    with pytest.raises(MsLongctxError, match="49152"):
        smollm2.decode([49152])
