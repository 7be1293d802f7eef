"""Tokenizers: the tokens of the packages that made them, without their special cases."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError
from offloadtrain.integrations.own_model import tokenizer_files
from tests import levels
from tests.data import tiny

TEXTS = ["the cat", "", "what is it? \u00e9\u4e2d\n\n  the hat", "<|im_end|>the"]


@levels.examples(100)
@given(text=st.text(), tokens=st.lists(st.integers(0, 255)))
def test_bytes_decode_to_their_text_and_any_bytes_to_some_text(
    text: str, tokens: list[int]
) -> None:
    encoding = tokenizer("bytes")
    (encoded,) = encoding.encode_batch([text])
    assert encoding.decode(encoded.tolist()) == text
    assert isinstance(encoding.decode(tokens), str)


def test_an_exported_folder_of_bytes_is_the_tokenizer_of_bytes(tmp_path: Path) -> None:
    _, fast = tokenizer_files("bytes")
    fast.save_pretrained(tmp_path)
    assert tokenizer(str(tmp_path)).identity == tokenizer("bytes").identity
    assert tokenizer(str(tiny.folder(tmp_path / "other"))).identity != "bytes"


def test_a_folder_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Its identity tells it apart from others."""
    identities = []
    for name, begin in (("a", ""), ("b", ""), ("c", "<s>")):
        ours = tokenizer(str(tiny.folder(tmp_path / name, begin=begin)))
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
            assert [*ours.begin, *ids.tolist()] == reference(text)["input_ids"]
            assert ours.decode(ids.tolist()) == text
        assert ours.end_of_document == reference.eos_token_id
        assert ours.vocab_size == len(reference)
        assert ours.name == str((tmp_path / name).resolve())
        identities += [ours.identity, pickle.loads(pickle.dumps(ours)).identity]
    assert identities[:4] == identities[:1] * 4 and len(set(identities)) == 2


def test_a_file_is_read_whatever_it_pads_or_truncates(tmp_path: Path) -> None:
    made = tiny.backend()
    expected = [made.encode(text).ids for text in TEXTS]
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        ours = tokenizer(str(name))
        assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == expected
        assert ours.end_of_document == made.token_to_id("<|endoftext|>")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer 'words': give bytes, a folder with"):
        tokenizer("words")
    words = tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="none of the usual end-of-sequence tokens"):
        tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        tokenizer(str(tmp_path / "tokenizer.json"))
