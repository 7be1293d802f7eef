"""Token files: what is written is read, and every damage is one clear error."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import HEADER_BYTES, DataError, TokenFile, TokenWriter
from tests import levels
from tests.data.tiny import write_tokens

Damage = Callable[[bytes], bytes]


def write(path: Path, tokens: list[int], vocab_size: int = 1000) -> Path:
    write_tokens(path, [np.array(tokens)], vocab_size=vocab_size, tokenizer="none")
    return path


def edit_header(raw: bytes, **changes: object) -> bytes:
    """Return the file with other values in its JSON."""
    (json_bytes,) = struct.unpack_from("<I", raw, 12)
    fields = json.loads(raw[16 : 16 + json_bytes]) | changes
    text = json.dumps({key: value for key, value in fields.items() if value != "absent"}).encode()
    page = raw[:12] + struct.pack("<I", len(text)) + text
    return page.ljust(HEADER_BYTES) + raw[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_smallest_dtype_is_chosen(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    file = TokenFile(write(tmp_path / "a.bin", [0, vocab_size - 1], vocab_size), scan=True)
    assert file.header.dtype == dtype
    assert file.tokens.tolist() == [0, vocab_size - 1]
    assert (tmp_path / "a.bin").stat().st_size == HEADER_BYTES + 2 * file.tokens.itemsize


@levels.examples(30)
@given(pieces=st.lists(st.lists(st.integers(0, 69999)), min_size=1))
def test_pieces_are_read_back_joined(
    pieces: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "a.bin"
    arrays = [np.array(piece, dtype=np.int64) for piece in pieces]
    write_tokens(path, arrays, vocab_size=70000, tokenizer="t", fingerprint="f")
    joined = [token for piece in pieces for token in piece]
    if not joined:
        with pytest.raises(DataError, match="no tokens"):
            TokenFile(path)
        return
    file = TokenFile(path, scan=True)
    assert file.tokens.tolist() == joined
    assert len(file) == file.header.count == len(joined)
    assert (file.header.tokenizer, file.header.fingerprint) == ("t", "f")


def test_the_content_hash_tells_files_apart(tmp_path: Path) -> None:
    hashes = [
        TokenFile(write(tmp_path / "a.bin", tokens)).header.content
        for tokens in ([1, 2, 3], [1, 2, 3], [1, 2, 4])
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_tokens_are_read_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        TokenFile(write(tmp_path / "a.bin", [1])).tokens[0] = 2


def masked(path: Path) -> TokenFile:
    """Write three documents of 2, 3 and 1 tokens in two pieces."""
    with TokenWriter(path, vocab_size=1000, tokenizer="none", masked=True) as writer:
        writer.write(np.array([1, 2, 3]), [2], np.array([0, 1, 0], np.uint8))
        writer.write(np.array([4, 5, 6]), [2, 3], np.array([1, 1, 0], np.uint8))
        writer.commit()
    return TokenFile(path, scan=True)


def test_documents_and_mask_follow_the_tokens_in_the_file(tmp_path: Path) -> None:
    file = masked(tmp_path / "a.bin")
    assert file.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert file.counted is not None and file.counted.tolist() == [0, 1, 0, 1, 1, 0]
    assert file.document_ends().tolist() == [2, 5, 6]
    raw = (tmp_path / "a.bin").read_bytes()[HEADER_BYTES:]
    assert raw == struct.pack("<6H3Q6B", 1, 2, 3, 4, 5, 6, 2, 3, 1, 0, 1, 0, 1, 1, 0)
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


@pytest.mark.parametrize("part", ["lengths", "mask"])
def test_a_scan_finds_a_flipped_bit_behind_the_tokens(tmp_path: Path, part: str) -> None:
    masked(tmp_path / "a.bin")
    raw = bytearray((tmp_path / "a.bin").read_bytes())
    raw[HEADER_BYTES + 12 + (24 if part == "mask" else 0)] ^= 1
    (tmp_path / "a.bin").write_bytes(raw)
    with pytest.raises(DataError, match="changed after writing"):
        TokenFile(tmp_path / "a.bin", scan=True)


def test_a_file_without_documents_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not say where its documents begin"):
        TokenFile(write(tmp_path / "a.bin", [1, 2])).document_ends()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty file": (lambda raw: b"", "not a token file"),
    "bad magic": (lambda raw: b"X" + raw[1:], "not a token file"),
    "text": (lambda raw: b"import os\n" * 500, "not a token file"),
    "half a header": (lambda raw: raw[:100], "truncated"),
    "header only": (lambda raw: raw[:HEADER_BYTES], "truncated: 0 tokens where .* says 4"),
    "one token short": (lambda raw: raw[:-2], "truncated: 3 tokens where .* says 4"),
    "odd size": (lambda raw: raw[:-1], "not a multiple of 2"),
    "too long": (lambda raw: raw + b"ab", "5 tokens where .* says 4"),
    "newer version": (lambda raw: raw[:8] + b"\x03" + raw[9:], "version 3 is newer"),
    "older version": (lambda raw: raw[:8] + b"\x01" + raw[9:], "version 1 is older"),
    "no JSON": (lambda raw: raw[:16] + b"?" + raw[17:], "damaged header"),
    "JSON length": (lambda raw: raw[:12] + b"\xff" * 4 + raw[16:], "impossible header"),
    "JSON not UTF-8": (lambda raw: raw[:16] + b"\xff\xfe" + raw[18:], "damaged header"),
    "missing key": (lambda raw: edit_header(raw, vocab_size="absent"), "damaged header"),
    "unknown key": (lambda raw: edit_header(raw, extra=1), "damaged header"),
    "unknown dtype": (lambda raw: edit_header(raw, dtype="float64"), "impossible header"),
    "negative count": (lambda raw: edit_header(raw, count=-4), "impossible header"),
    "boolean count": (lambda raw: edit_header(raw, count=True), "impossible header"),
    "count as text": (lambda raw: edit_header(raw, count="4"), "impossible header"),
    "no vocabulary": (lambda raw: edit_header(raw, vocab_size=0), "impossible header"),
    "mask as text": (lambda raw: edit_header(raw, masked="no"), "impossible header"),
    "a mask that is not there": (
        lambda raw: edit_header(raw, masked=True),
        "truncated: 2 tokens where .* says 4",
    ),
    "lengths that are not there": (
        lambda raw: edit_header(raw, documents=2),
        "truncated: 0 tokens where .* says 4",
    ),
    "tokenizer a number": (lambda raw: edit_header(raw, tokenizer=3), "impossible header"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_one_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    path = write(tmp_path / "a.bin", [1, 2, 3, 4])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, OffloadTrainError)


def test_a_scan_finds_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 999, 4])
    path.write_bytes(edit_header(path.read_bytes(), vocab_size=999))
    TokenFile(path)
    with pytest.raises(DataError, match="token 999 at index 2 is not below vocab_size = 999"):
        TokenFile(path, scan=True)


def test_a_scan_finds_a_flipped_bit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3, 4])
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 2] ^= 4
    path.write_bytes(raw)
    with pytest.raises(DataError, match="changed after writing"):
        TokenFile(path, scan=True)


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(DataError, match=r"a\.bin"):
        TokenFile(path)


@pytest.mark.parametrize("token", [-1, 10, 1 << 40])
def test_a_writer_refuses_tokens_outside_the_vocabulary(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=r"not in \[0, vocab_size = 10\)"):
        write(tmp_path / "a.bin", [0, token, 9], vocab_size=10)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3])
    with (
        pytest.raises(KeyboardInterrupt),
        TokenWriter(path, vocab_size=1000, tokenizer="none") as writer,
    ):
        writer.write(np.array([7]))
        raise KeyboardInterrupt
    assert TokenFile(path, scan=True).tokens.tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("vocab_size", [0, -1, (1 << 32) + 1])
def test_impossible_vocabularies_are_refused(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(DataError, match="vocab_size"):
        TokenWriter(tmp_path / "a.bin", vocab_size=vocab_size, tokenizer="none")


def test_texts_that_do_not_fit_the_header_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longer than 4096"):
        write_tokens(tmp_path / "a.bin", [], vocab_size=2, tokenizer="x" * 5000)


@levels.examples(100)
@given(text=st.text())
def test_bytes_decode_to_what_was_encoded(text: str) -> None:
    encoding = tokenizer("bytes")
    (encoded,) = encoding.encode_batch([text])
    assert encoding.decode(encoded.tolist()) == text


@levels.examples(100)
@given(tokens=st.lists(st.integers(0, 255)))
def test_any_bytes_decode_to_some_text(tokens: list[int]) -> None:
    assert isinstance(tokenizer("bytes").decode(tokens), str)


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="no tokenizer 'words': give bytes, a folder with"):
        tokenizer("words")
