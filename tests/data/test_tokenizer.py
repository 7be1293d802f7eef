"""Tokenizers: what the packages make of a text, without their special cases in between."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest

from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError
from tests.data import tiny

TEXTS = ["the cat", "", "what is it? \u00e9\u4e2d\n\n  the hat", "<|im_end|>the"]


@pytest.mark.parametrize("begin", ["", "<s>"])
def test_a_folder_gives_the_tokens_of_transformers(tmp_path: Path, begin: str) -> None:
    from transformers import AutoTokenizer

    ours = tokenizer(str(tiny.folder(tmp_path / "t", begin=begin)))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert [*ours.begin, *ids.tolist()] == theirs(text)["input_ids"]
        assert ours.decode(ids.tolist()) == text
    assert ours.end_of_document == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


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


def test_the_identity_tells_tokenizers_apart(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "a")
    tiny.folder(tmp_path / "b")
    tiny.folder(tmp_path / "c", begin="<s>")
    a, b, c = (tokenizer(str(tmp_path / name)) for name in "abc")
    assert a.identity == b.identity == pickle.loads(pickle.dumps(a)).identity
    assert a.identity != c.identity
    assert a.name == str((tmp_path / "a").resolve())


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(DataError, match="none of the usual end-of-sequence tokens"):
        tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "a.tiktoken"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    if name.endswith("tiktoken"):
        pytest.importorskip("tiktoken")
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=name):
        tokenizer(str(tmp_path / name))


def test_ranks_of_tiktoken_need_their_pattern(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([n]): n for n in range(256)} | {b"th": 256, b"the": 257}
    lines = (f"{base64.b64encode(raw).decode()} {rank}\n" for raw, rank in ranks.items())
    (tmp_path / "own.tiktoken").write_text("".join(lines))
    with pytest.raises(DataError, match="Ranks alone do not say how text is split"):
        tokenizer(str(tmp_path / "own.tiktoken"))
    said = {"pattern": r"\w+|\s|.", "special_tokens": {"<|end|>": 258}, "end": "<|end|>"}
    (tmp_path / "own.json").write_text(json.dumps(said))
    ours = tokenizer(str(tmp_path / "own.tiktoken"))
    theirs = tiktoken.Encoding(
        "own",
        pat_str=said["pattern"],
        mergeable_ranks=ranks,
        special_tokens=said["special_tokens"],
    )
    for text, ids in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == theirs.encode(text, disallowed_special=())
        assert ours.decode(ids.tolist()) == text
    assert (ours.vocab_size, ours.end_of_document) == (259, 258)
    assert pickle.loads(pickle.dumps(ours)).encode_batch(["the"])[0].tolist() == [257]
