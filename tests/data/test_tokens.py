"""Token files: what is written is read, every damage is one clear error, and a file is read through
before it is trained on: once, and again when it changes."""

from __future__ import annotations

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
from offloadtrain.data import tokens as token_files
from offloadtrain.data.tokens import HEADER_BYTES, DataError, TokenFile, TokenWriter, verify
from tests import levels
from tests.data import tiny
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


def flip(path: Path, at: int) -> None:
    """Flip a bit of this byte of the content."""
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + at] ^= 1
    with path.open("r+b") as file:
        file.write(raw)


def test_the_smallest_dtype_is_chosen_and_read_only(tmp_path: Path) -> None:
    for vocab_size, dtype in (
        *((1, "uint8"), (256, "uint8"), (257, "uint16")),
        *((65536, "uint16"), (65537, "uint32")),
    ):
        path = write(tmp_path / "a.bin", [0, vocab_size - 1], vocab_size)
        file = tiny.scanned(path)
        assert file.header.dtype == dtype
        assert file.tokens.tolist() == [0, vocab_size - 1]
        assert path.stat().st_size == HEADER_BYTES + 2 * file.tokens.itemsize
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 2


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
    file = tiny.scanned(path)
    assert file.tokens.tolist() == joined
    assert len(file) == file.header.count == len(joined)
    assert (file.header.tokenizer, file.header.fingerprint) == ("t", "f")


def test_documents_and_mask_follow_the_tokens_in_the_file(tmp_path: Path) -> None:
    """A scan notices a changed bit in each part."""
    path = tmp_path / "a.bin"
    with TokenWriter(path, vocab_size=1000, tokenizer="none", masked=True) as writer:
        writer.write(np.array([1, 2, 3]), [2], np.array([0, 1, 0], np.uint8))
        writer.write(np.array([4, 5, 6]), [2, 3], np.array([1, 1, 0], np.uint8))
        writer.commit()
    file = tiny.scanned(path)
    assert file.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert file.counted is not None and file.counted.tolist() == [0, 1, 0, 1, 1, 0]
    assert file.document_ends().tolist() == [2, 5, 6]
    raw = path.read_bytes()[HEADER_BYTES:]
    assert raw == struct.pack("<6H3Q6B", 1, 2, 3, 4, 5, 6, 2, 3, 1, 0, 1, 0, 1, 1, 0)
    assert list(tmp_path.iterdir()) == [path]
    for at in (2, 12, 36):  # tokens, lengths, mask
        flip(path, at)
        with pytest.raises(DataError, match="changed after writing"):
            tiny.scanned(path)
        flip(path, at)


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
    "a mask that is absent": (
        lambda raw: edit_header(raw, masked=True),
        "truncated: 2 tokens where .* says 4",
    ),
    "lengths that are absent": (
        lambda raw: edit_header(raw, documents=2),
        "truncated: 0 tokens where .* says 4",
    ),
    "tokenizer a number": (lambda raw: edit_header(raw, tokenizer=3), "impossible header"),
}


def test_every_damage_is_one_error_that_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3, 4])
    good = path.read_bytes()
    for name, (damage, message) in DAMAGES.items():
        path.write_bytes(damage(good))
        with pytest.raises(DataError, match=message) as caught:
            pytest.fail(f"{name} is read: {TokenFile(path)}")
        assert str(path) in str(caught.value) and isinstance(caught.value, OffloadTrainError)
    path.unlink()
    for make in (lambda: None, path.mkdir, lambda: (path.rmdir(), os.mkfifo(path))):
        make()
        with pytest.raises(DataError, match=r"a\.bin"):
            TokenFile(path)


def test_a_scan_finds_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    """In a file of another program, whose hash is right."""
    path = write(tmp_path / "a.bin", [1, 2, 999, 4])
    path.write_bytes(edit_header(path.read_bytes(), vocab_size=999))
    message = r"a\.bin: token 999 at index 2 is not below vocab_size = 999"
    with pytest.raises(DataError, match=message):
        tiny.scanned(path)
    with pytest.raises(DataError, match=message):
        verify(TokenFile(path))


def test_a_writer_refuses_what_does_not_fit_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, 2, 3])
    for token in (-1, 10, 1 << 40):
        with pytest.raises(DataError, match=r"not in \[0, vocab_size = 10\)"):
            write(path, [0, token, 9], vocab_size=10)
    for vocab_size in (0, -1, (1 << 32) + 1):
        with pytest.raises(DataError, match="vocab_size"):
            TokenWriter(path, vocab_size=vocab_size, tokenizer="none")
    with pytest.raises(DataError, match="longer than 4096"):
        write_tokens(path, [], vocab_size=2, tokenizer="x" * 5000)
    with (
        pytest.raises(KeyboardInterrupt),
        TokenWriter(path, vocab_size=1000, tokenizer="none") as writer,
    ):
        writer.write(np.array([7]))
        raise KeyboardInterrupt
    assert tiny.scanned(path).tokens.tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


# ---- verified once


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.bin", [token % 1000 for token in range(5000)])


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read through."""
    done: list[Path] = []
    real = TokenFile.scan
    monkeypatch.setattr(
        TokenFile, "scan", lambda self, *rest: (done.append(self.path), real(self, *rest))[1]
    )
    return done


def _replaced(path: Path) -> None:
    other = path.with_name("b.bin")
    other.write_bytes(path.read_bytes())
    facts = path.stat()
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.replace(path)


def test_a_file_is_read_once_and_again_after_a_change(
    path: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may have a relative path; a damaged memory is none."""
    monkeypatch.setenv("OFFLOADTRAIN_CACHE", "relative")
    monkeypatch.chdir(path.parent)
    for count, change in enumerate((lambda path: None, os.utime, _replaced), start=1):
        change(path)
        for _ in range(3):
            verify(TokenFile(path))
        assert scans == [path] * count
    folder = path.parent / "relative" / "tokens"
    assert folder.stat().st_mode & 0o777 == 0o700
    for memory in folder.iterdir():
        memory.write_text("[" * 100_000)
    verify(TokenFile(path))
    assert len(scans) == 4


def test_a_flipped_byte_is_noticed_though_the_times_are_set_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_SCAN_TOKENS", 2048)
    progress: list[tuple[int, int]] = []
    verify(TokenFile(path), lambda done, total: progress.append((done, total)))
    assert progress == [(4096, 10000), (8192, 10000), (10000, 10000)]
    facts = path.stat()
    flip(path, 14)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    file = TokenFile(path)
    actual = token_files.new_hash()
    actual.update(file.tokens.tobytes())
    for _ in range(2):  # a damaged file is not remembered as read
        with pytest.raises(DataError) as caught:
            verify(file)
        for part in (str(path), actual.hexdigest(), file.header.content, "prepare it again"):
            assert part in str(caught.value)


def test_a_file_is_its_owners_only_whatever_lay_there(tmp_path: Path) -> None:
    """Chats are in it, as in the run's folder."""
    before, path = os.umask(0), tmp_path / "a.bin"
    try:
        path.with_name("a.bin.tmp").touch(mode=0o666)
        with TokenWriter(path, vocab_size=1000, tokenizer="none") as writer:
            writer.write(np.arange(3))
            writer.commit()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("key", "folder"), [("OFFLOADTRAIN_CACHE", "/dev/null/cache"), ("XDG_CACHE_HOME", "relative")]
)
def test_without_a_place_to_remember_it_is_read_every_time(
    path: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch, key: str, folder: str
) -> None:
    monkeypatch.delenv("OFFLOADTRAIN_CACHE")
    monkeypatch.setenv(key, folder)
    monkeypatch.chdir(path.parent)
    for _ in range(2):
        verify(TokenFile(path))
    assert len(scans) == 2
    assert list(path.parent.iterdir()) == [path]
