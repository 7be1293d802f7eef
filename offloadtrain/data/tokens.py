"""Token files: a header of one page, then raw little-endian token numbers and what belongs to them.

    bytes 0-7     magic
    bytes 8-15    format version, length of the JSON; uint32, little-endian
    bytes 16-     JSON: the fields of `TokenHeader`
    bytes 4096-   `count` tokens of `dtype`
    then          `documents` numbers of tokens, uint64: the length of each document
    then          if `masked`, `count` bytes: 1 if the loss counts the prediction of this token

The header has a fixed size, so that the count can be filled in after a file was written in one
pass, and the tokens start on a page. All three parts are in one file, so that they are published,
verified and moved as one.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.config.errors import OffloadTrainError

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Progress = Callable[[int, int], None]

HEADER_BYTES = 4096
MAGIC = b"OTTOKENS"
VERSION = 2
PREFIX = struct.Struct("<8sII")
DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}  # name: bytes per token
_SCAN_TOKENS = 1 << 24
LENGTH = np.dtype("<u8")


class DataError(OffloadTrainError):
    """Text or tokens that cannot be used: the message names the file, the problem and the
    remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """The header of a token file.

    Attributes:
        dtype: uint8, uint16 or uint32.
        count: tokens in the file.
        tokenizer: its name, or the path that it was loaded from.
        content: blake2b of all that follows the header, 128 bits in hexadecimal.
        tokenizer_id: what tells tokenizers apart, see `Tokenizer.identity`; "" if unknown.
        fingerprint: hash of the source and settings; "" if unknown.
        documents: documents in the file; 0 if unknown.
        masked: a loss mask is stored; otherwise every token counts.
    """

    dtype: str
    vocab_size: int
    count: int
    tokenizer: str
    content: str
    tokenizer_id: str = ""
    fingerprint: str = ""
    documents: int = 0
    masked: bool = False

    @property
    def token_bytes(self) -> int:
        return self.count * DTYPES[self.dtype]

    @property
    def length_bytes(self) -> int:
        return self.documents * LENGTH.itemsize

    @property
    def mask_bytes(self) -> int:
        return self.count * self.masked


class TokenFile:
    """A token file, mapped into memory read-only.

    Attributes:
        header: see `TokenHeader`.
        tokens: (count,) of the header's dtype; pages are read from disk as they are touched.
        counted: (count,) uint8, mapped as well, 1 if the loss counts the token; None: all count.
    """

    def __init__(self, path: str | Path, *, scan: bool = False) -> None:
        """Map the file; with `scan`, read it once and check every token and the content's hash.

        Raises:
            DataError: the file is missing, damaged, empty or made by a newer version.
        """
        self.path = Path(path)
        try:
            with open_regular(self.path, follow_link=True) as file:
                page = file.read(HEADER_BYTES)
                num_bytes = os.fstat(file.fileno()).st_size
            header = _parse_header(self.path, page)
            _check_size(self.path, header, num_bytes - HEADER_BYTES)
            self.header = header
            dtype = np.dtype(self.header.dtype).newbyteorder("<")
            self.tokens: Tokens = self._map(dtype, HEADER_BYTES)
            self._lengths_at = HEADER_BYTES + self.header.token_bytes
            self.counted: npt.NDArray[np.uint8] | None = None
            if self.header.masked:
                at = self._lengths_at + self.header.length_bytes
                self.counted = self._map(np.dtype(np.uint8), at)
        except OSError as error:
            raise DataError(f"cannot read tokens from {self.path}: {error.strerror}") from error
        if scan:
            self.scan()

    def _map(self, dtype: np.dtype[Any], offset: int) -> Any:
        return np.memmap(
            self.path, dtype=dtype, mode="r", offset=offset, shape=(self.header.count,)
        )

    def __len__(self) -> int:
        return self.header.count

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Return the index after the last token of each document, (documents,), read from the
        file: 8 bytes of memory each.

        Raises:
            DataError: the file does not say where documents begin.
        """
        ends = np.cumsum(self._lengths(), dtype=np.int64)
        if not len(ends) or ends[-1] != len(self):
            raise DataError(f"{self.path} does not say where its documents begin; prepare it again")
        return ends

    def _lengths(self) -> npt.NDArray[np.uint64]:
        at, count = self._lengths_at, self.header.documents
        return np.fromfile(self.path, dtype=LENGTH, offset=at, count=count)

    def scan(self, progress: Progress | None = None) -> None:
        """Read every token once, and compare all of them with the header.

        Args:
            progress: called in this thread with (bytes read, bytes in all).

        Raises:
            DataError: they differ from the written ones, or one is outside the vocabulary.
        """
        content, outside = new_hash(), ""
        total = self.tokens.nbytes + self.header.mask_bytes
        for start in range(0, len(self), _SCAN_TOKENS):
            piece = self.tokens[start : start + _SCAN_TOKENS]
            content.update(piece.data)
            outside = outside or self._outside(start, piece)
            if progress is not None:
                progress((start + len(piece)) * piece.itemsize, total)
        content.update(self._lengths().data)
        if self.counted is not None:
            content.update(self.counted.data)
            if not outside and int(self.counted.max()) > 1:
                outside = "its loss mask holds bytes other than 0 and 1"
            if progress is not None:
                progress(total, total)
        digest, wrong = content.hexdigest(), []
        if digest != self.header.content:
            wrong.append(
                f"the tokens changed after writing: their hash is {digest}, but the header says "
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


def _parse_header(path: Path, page: bytes) -> TokenHeader:
    if not page.startswith(MAGIC):
        raise DataError(
            f"{path} is not a token file (it begins with {page[:8]!r}); "
            f"make one with `offloadtrain prepare`"
        )
    if len(page) < HEADER_BYTES:
        raise DataError(
            f"{path}: truncated: {len(page)} bytes, less than the header of {HEADER_BYTES}; "
            f"prepare it again"
        )
    _, version, json_bytes = PREFIX.unpack_from(page)
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise DataError(
            f"{path}: token format version {version} is {age} than {VERSION}, which this "
            f"offloadtrain reads; prepare the file again"
        )
    text = page[PREFIX.size :][:json_bytes]
    try:
        header = TokenHeader(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: damaged header; prepare it again") from error
    if len(text) < json_bytes or not _is_plausible(header):
        raise DataError(f"{path}: impossible header {asdict(header)}; prepare it again")
    return header


def _is_plausible(header: TokenHeader) -> bool:
    numbers = (header.vocab_size, header.count, header.documents)
    texts = (
        *(header.dtype, header.tokenizer, header.content),
        *(header.tokenizer_id, header.fingerprint),
    )
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(type(text) is str for text in texts)
        and type(header.masked) is bool
        and header.vocab_size > 0
        and header.dtype in DTYPES
    )


def _check_size(path: Path, header: TokenHeader, num_bytes: int) -> None:
    """Compare the header with the `num_bytes` that follow it."""
    width = DTYPES[header.dtype]
    num_bytes -= header.length_bytes + header.mask_bytes
    if num_bytes % width:
        problem = f"{num_bytes} bytes of tokens are not a multiple of {width} ({header.dtype})"
    elif num_bytes < header.count * width:
        complete = max(0, num_bytes // width)
        problem = f"truncated: {complete} tokens where the header says {header.count}"
    elif num_bytes > header.count * width:
        problem = f"{num_bytes // width} tokens where the header says {header.count}"
    elif header.count == 0:
        problem = "no tokens"
    else:
        return
    raise DataError(f"{path}: {problem}; prepare it again")


def new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)
