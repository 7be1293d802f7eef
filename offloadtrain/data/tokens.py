"""Token files: a header of one page, then raw little-endian token numbers.

    bytes 0-7     magic
    bytes 8-15    format version, length of the JSON; uint32, little-endian
    bytes 16-     JSON: the fields of `TokenHeader`
    bytes 4096-   `count` tokens of `dtype`

The header has a fixed size, so that the count can be filled in after a file was written in one
pass, and the tokens start on a page.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from offloadtrain.config.errors import OffloadTrainError

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Progress = Callable[[int, int], None]

HEADER_BYTES = 4096
_MAGIC = b"OTTOKENS"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}  # name: bytes per token
_SCAN_TOKENS = 1 << 24


class DataError(OffloadTrainError):
    """Text or tokens that cannot be used: the message names the file, the problem and the
    remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """The header of a token file.

    Attributes:
        dtype: uint8, uint16 or uint32.
        count: tokens in the file.
        content: blake2b of the tokens as stored, 128 bits in hexadecimal.
        fingerprint: hash of the source and settings; "" if unknown.
        documents: documents in the file; 0 if unknown.
    """

    dtype: str
    vocab_size: int
    count: int
    tokenizer: str
    content: str
    fingerprint: str = ""
    documents: int = 0


class TokenFile:
    """A token file, mapped into memory read-only.

    Attributes:
        header: see `TokenHeader`.
        tokens: (count,) of the header's dtype; pages are read from disk as they are touched.
    """

    def __init__(self, path: str | Path, *, scan: bool = False) -> None:
        """Map the file; with `scan`, read it once and check every token and the content's hash.

        Raises:
            DataError: the file is missing, damaged, empty or made by a newer version.
        """
        self.path = Path(path)
        try:
            self.header = _read_header(self.path)
            dtype = np.dtype(self.header.dtype).newbyteorder("<")
            shape = (self.header.count,)
            self.tokens: Tokens = np.memmap(
                self.path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=shape
            )
        except OSError as error:
            raise DataError(f"cannot read tokens from {self.path}: {error.strerror}") from error
        if scan:
            self.scan()

    def __len__(self) -> int:
        return self.header.count

    def scan(self, progress: Progress | None = None) -> None:
        """Read every token once, and compare all of them with the header.

        Args:
            progress: called in this thread with (bytes read, bytes in all).

        Raises:
            DataError: they differ from the written ones, or one is outside the vocabulary.
        """
        content, outside = _new_hash(), ""
        for start in range(0, len(self), _SCAN_TOKENS):
            piece = self.tokens[start : start + _SCAN_TOKENS]
            content.update(piece.data)
            outside = outside or self._outside(start, piece)
            if progress is not None:
                done = start + len(piece)
                progress(done * piece.itemsize, self.tokens.nbytes)
        found, wrong = content.hexdigest(), []
        if found != self.header.content:
            wrong.append(
                f"the tokens changed after writing: their hash is {found}, but the header says "
                f"{self.header.content}"
            )
        if problem := "; ".join([*wrong, *filter(None, [outside])]):
            raise DataError(f"{self.path}: {problem}. Delete it and prepare it again")

    def _outside(self, start: int, piece: Tokens) -> str:
        """Return the problem of the first token outside the vocabulary, or ""."""
        limit = self.header.vocab_size
        if int(piece.max()) < limit:
            return ""
        first = int(np.flatnonzero(piece >= limit)[0])
        return f"token {piece[first]} at index {start + first} is not below vocab_size = {limit}"


def _read_header(path: Path) -> TokenHeader:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DataError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        page = file.read(HEADER_BYTES)
        num_bytes = os.fstat(file.fileno()).st_size
    header = _parse_header(path, page)
    _check_size(path, header, num_bytes - HEADER_BYTES)
    return header


def _parse_header(path: Path, page: bytes) -> TokenHeader:
    if not page.startswith(_MAGIC):
        raise DataError(
            f"{path} is not a token file (it begins with {page[:8]!r}); "
            f"make one with `offloadtrain prepare`"
        )
    if len(page) < HEADER_BYTES:
        raise DataError(
            f"{path}: truncated: {len(page)} bytes, less than the header of {HEADER_BYTES}; "
            f"prepare it again"
        )
    _, version, json_bytes = _PREFIX.unpack_from(page)
    if version > _VERSION:
        raise DataError(
            f"{path}: token format version {version} is newer than {_VERSION}, the newest this "
            f"offloadtrain reads; upgrade it, or prepare the file again"
        )
    text = page[_PREFIX.size :][:json_bytes]
    try:
        header = TokenHeader(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: damaged header; prepare it again") from error
    if len(text) < json_bytes or not _is_plausible(header):
        raise DataError(f"{path}: impossible header {asdict(header)}; prepare it again")
    return header


def _is_plausible(header: TokenHeader) -> bool:
    numbers = (header.vocab_size, header.count, header.documents)
    texts = (header.dtype, header.tokenizer, header.content, header.fingerprint)
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(type(text) is str for text in texts)
        and header.vocab_size > 0
        and header.dtype in _DTYPES
    )


def _check_size(path: Path, header: TokenHeader, num_bytes: int) -> None:
    """Compare the header with the `num_bytes` that follow it."""
    width = _DTYPES[header.dtype]
    if num_bytes % width:
        problem = f"{num_bytes} bytes of tokens are not a multiple of {width} ({header.dtype})"
    elif num_bytes < header.count * width:
        problem = f"truncated: {num_bytes // width} tokens where the header says {header.count}"
    elif num_bytes > header.count * width:
        problem = f"{num_bytes // width} tokens where the header says {header.count}"
    elif header.count == 0:
        problem = "no tokens"
    else:
        return
    raise DataError(f"{path}: {problem}; prepare it again")


class TokenWriter:
    """Writes a token file piece by piece; `commit` publishes it, complete and durable.

    Until then the bytes are in `<path>.tmp`, which leaving the context without `commit` removes.
    One writer per path at a time. The smallest dtype that holds the vocabulary is chosen.
    """

    def __init__(
        self, path: str | Path, *, vocab_size: int, tokenizer: str, fingerprint: str = ""
    ) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.count = 0
        self.documents = 0
        self._labels = {"tokenizer": tokenizer, "fingerprint": fingerprint}
        self._content = _new_hash()
        self._dtype = _smallest_dtype(vocab_size)
        self._temporary = self.path.with_name(self.path.name + ".tmp")

    def __enter__(self) -> Self:
        self._file = open(self._temporary, "wb")
        self._file.write(bytes(HEADER_BYTES))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens of any integer dtype.

        Raises:
            DataError: a token is below 0 or not below the vocabulary size; nothing is appended.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise DataError(
                f"cannot write {self.path}: tokens from {tokens.min()} to {tokens.max()} are not "
                f"in [0, vocab_size = {self.vocab_size})"
            )
        raw = np.ascontiguousarray(tokens, dtype=np.dtype(self._dtype).newbyteorder("<")).data
        self._content.update(raw)
        self._file.write(raw)
        self.count += tokens.size

    def commit(self) -> None:
        """Write the header, make everything durable and rename the file."""
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        _sync_folder(self.path.parent)

    def _header(self) -> bytes:
        header = TokenHeader(
            dtype=self._dtype,
            vocab_size=self.vocab_size,
            count=self.count,
            content=self._content.hexdigest(),
            documents=self.documents,
            **self._labels,
        )
        text = json.dumps(asdict(header)).encode()
        page = _PREFIX.pack(_MAGIC, _VERSION, len(text)) + text
        if len(page) > HEADER_BYTES:
            raise DataError(f"{self.path}: the header's texts are longer than {HEADER_BYTES} bytes")
        return page.ljust(HEADER_BYTES)


def write_tokens(
    path: str | Path,
    pieces: Iterable[npt.NDArray[Any]],
    *,
    vocab_size: int,
    tokenizer: str,
    fingerprint: str = "",
) -> None:
    """Write a whole token file, atomically. Raises as `TokenWriter` does."""
    with TokenWriter(
        path, vocab_size=vocab_size, tokenizer=tokenizer, fingerprint=fingerprint
    ) as writer:
        for piece in pieces:
            writer.write(piece)
        writer.commit()


def _smallest_dtype(vocab_size: int) -> str:
    for name, width in _DTYPES.items():
        if 0 < vocab_size <= 1 << 8 * width:
            return name
    raise DataError(f"vocab_size = {vocab_size} must be from 1 to {1 << 32}")


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
