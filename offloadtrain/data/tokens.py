"""Token files: a header of one page, then raw little-endian tokens, document lengths and a loss
mask.

    bytes 0-7     magic
    bytes 8-15    format version, length of the JSON; uint32, little-endian
    bytes 16-     JSON: the fields of `TokenHeader`
    bytes 4096-   `count` tokens of `dtype`
    then          `documents` numbers of tokens, uint64: the length of each document
    then          if `masked`, `count` bytes: 1 if the loss counts the prediction of this token

The header has a fixed size, so that the count can be written after the tokens in one pass, and the
tokens start on a page. All three parts are in one file, so that they are published, verified and
moved together.

[Note: Verified once]
Each file is read in full before the first training on it, because a flipped byte would silently
train a different model, and a token outside the vocabulary would end a run midway. Results are
cached in the user's folder ($OFFLOADTRAIN_CACHE, or ~/.cache/offloadtrain), not next to the data,
which may be read-only. The cache has size, inode and times of the file, and the hash of its tokens.
A file is read again if one of these changes, or at every start if there is no cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from offloadtrain.boundary.safe_open import open_regular, read_json
from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.config.errors import InputError
from offloadtrain.hardware.atomic_io import sync_folder

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Progress = Callable[[int, int], None]

HEADER_BYTES = 4096
MAGIC = b"OTTOKENS"
VERSION = 2
PREFIX = struct.Struct("<8sII")
DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}  # name: bytes per token
_SCAN_TOKENS = 1 << 24
LENGTH = np.dtype("<u8")


class DataError(InputError):
    """Text or tokens that cannot be used; the message names the file, the problem and the
    remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """The header of a token file.

    Attributes:
        dtype: uint8, uint16 or uint32.
        count: number of tokens in the file.
        tokenizer: name of the tokenizer, or the path from which it was loaded.
        content: blake2b of all bytes after the header, 128 bits in hexadecimal.
        tokenizer_id: identity of the tokenizer, see `Tokenizer.identity`; "" if unknown.
        fingerprint: hash of the source and settings; "" if unknown.
        documents: number of documents in the file; 0 if unknown.
        masked: the file has a loss mask; otherwise every token counts.
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
    def length_bytes(self) -> int:
        return self.documents * LENGTH.itemsize

    @property
    def mask_bytes(self) -> int:
        return self.count * self.masked


def is_token_file(path: str | Path) -> bool:
    """Return True if a file begins like a token file."""
    if not os.path.isfile(path):
        return False
    with open_regular(Path(path), follow_link=True) as file:
        return file.read(len(MAGIC)) == MAGIC


class TokenFile:
    """A token file, mapped into memory read-only.

    Attributes:
        header: see `TokenHeader`.
        tokens: (count,) of the header's dtype; pages are read from disk when they are accessed.
        counted: (count,) uint8, also mapped, 1 if the loss counts the token; None: all tokens
            count.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file; `scan` checks its tokens.

        Raises:
            DataError: if the file is missing, damaged, empty or made by a newer version.
        """
        self.path = Path(path)
        try:
            with open_regular(self.path, follow_link=True) as file:
                page = file.read(HEADER_BYTES)
                self._status = os.fstat(file.fileno())
            num_bytes = self._status.st_size
            header = _parse_header(self.path, page)
            _check_size(self.path, header, num_bytes - HEADER_BYTES)
            self.header = header
            dtype = np.dtype(self.header.dtype).newbyteorder("<")
            self.tokens: Tokens = self._map(dtype, HEADER_BYTES)
            self._lengths_at = HEADER_BYTES + self.tokens.nbytes
            self.counted: npt.NDArray[np.uint8] | None = None
            if self.header.masked:
                at = self._lengths_at + self.header.length_bytes
                self.counted = self._map(np.dtype(np.uint8), at)
        except OSError as error:
            raise DataError(f"cannot read tokens from {self.path}: {error.strerror}") from error

    def _map(self, dtype: np.dtype[Any], offset: int) -> Any:
        return np.memmap(
            self.path, dtype=dtype, mode="r", offset=offset, shape=(self.header.count,)
        )

    def __len__(self) -> int:
        return self.header.count

    def require_size(self) -> None:
        """Check that the size of the file has not changed since it was opened. Reading after its
        end would kill the process. A file that has replaced it is harmless.

        Raises:
            DataError: if the size has changed.
        """
        with suppress(OSError):  # removed: the mapping stays valid
            now = os.stat(self.path)
            if os.path.samestat(now, self._status) and now.st_size != self._status.st_size:
                raise DataError(
                    f"{self.path} was written while it was in use: it has {now.st_size} bytes, and "
                    f"had {self._status.st_size}. Prepare data into a new file, or rename it there"
                )

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Return the index after the last token of each document, (documents,), read from the file:
        8 bytes of memory per document.

        Raises:
            DataError: if the file does not have the starts of documents.
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
            progress: called in this thread with (bytes read, total bytes).

        Raises:
            DataError: if they differ from the written tokens, or a token is outside the vocabulary.
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
            f"{path} is not a token file "
            f"({f'it begins with {page[:8]!r}' if page else 'it is empty'}); "
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
    """Check that the `num_bytes` after the header match the header.

    Raises:
        DataError: if they do not, or there are no tokens.
    """
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


_COPIED_BYTES = 1 << 24


class TokenWriter:
    """Writes a token file piece by piece; `commit` publishes the complete and durable file.

    Before that, the bytes are in `<path>.tmp` (and in nameless files). Leaving the context without
    `commit` removes them. Only one writer per path at a time. The smallest dtype for the vocabulary
    is chosen.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        tokenizer: str,
        tokenizer_id: str = "",
        fingerprint: str = "",
        masked: bool = False,
    ) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.count = 0
        self.documents = 0
        self._masked = masked
        self._labels = {
            "tokenizer": tokenizer,
            "tokenizer_id": tokenizer_id,
            "fingerprint": fingerprint,
        }
        self._content = new_hash()
        if not 0 < vocab_size <= 1 << 32:
            raise DataError(f"vocab_size = {vocab_size} must be from 1 to {1 << 32}")
        self._dtype = np.min_scalar_type(vocab_size - 1).name
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._document_begins = 0

    def __enter__(self) -> Self:
        self._temporary.unlink(missing_ok=True)  # a leftover would keep its mode
        self._file = open(self._temporary, "wb", opener=partial(os.open, mode=0o600))
        self._file.write(bytes(HEADER_BYTES))
        # They follow the tokens in the file, whose number is known only at the end.
        self._lengths = tempfile.TemporaryFile(dir=self.path.parent)
        self._mask = tempfile.TemporaryFile(dir=self.path.parent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in (self._file, self._lengths, self._mask):
            file.close()
        self._temporary.unlink(missing_ok=True)

    def write(
        self,
        tokens: npt.NDArray[Any],
        ends: npt.ArrayLike = (),
        counted: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Append tokens of any integer dtype.

        Args:
            ends: index after the last token of each document that ends in `tokens`.
            counted: the loss mask of `tokens`; required if the file is masked.

        Raises:
            DataError: if a token is negative or not below the vocabulary size; nothing is appended.
        """
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise DataError(
                f"cannot write {self.path}: tokens from {tokens.min()} to {tokens.max()} are not "
                f"in [0, vocab_size = {self.vocab_size})"
            )
        if self._masked:
            assert counted is not None and counted.shape == tokens.shape
            self._mask.write(np.ascontiguousarray(counted).data)
        raw = np.ascontiguousarray(tokens, dtype=np.dtype(self._dtype).newbyteorder("<")).data
        self._content.update(raw)
        self._file.write(raw)
        if (ended := self.count + np.asarray(ends, dtype=np.int64)).size:
            self._lengths.write(np.diff(ended, prepend=self._document_begins).astype(LENGTH).data)
            self._document_begins = int(ended[-1])
            self.documents += ended.size
        self.count += tokens.size

    def commit(self) -> None:
        """Write the other parts and the header, make everything durable and rename the file."""
        for part in (self._lengths, self._mask):
            part.seek(0)
            while piece := part.read(_COPIED_BYTES):
                self._content.update(piece)
                self._file.write(piece)
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        sync_folder(self.path.parent)

    def _header(self) -> bytes:
        header = TokenHeader(
            dtype=self._dtype,
            vocab_size=self.vocab_size,
            count=self.count,
            content=self._content.hexdigest(),
            documents=self.documents,
            masked=self._masked,
            **self._labels,
        )
        text = json.dumps(asdict(header)).encode()
        page = PREFIX.pack(MAGIC, VERSION, len(text)) + text
        if len(page) > HEADER_BYTES:
            raise DataError(f"{self.path}: the header's texts are longer than {HEADER_BYTES} bytes")
        return page.ljust(HEADER_BYTES)


_MOST_CACHE_BYTES = 1 << 16


def verify(tokens: TokenFile, progress: Progress | None = None) -> None:
    """Read the file, unless it was verified before.

    Args:
        progress: called in this thread with (bytes read, total bytes).

    Raises:
        DataError: if its tokens differ from the written tokens, or are outside its vocabulary.
    """
    facts, cache = _facts(tokens), _cache_file(tokens)
    if cache is not None:
        with suppress(OSError):
            if read_json(cache, max_bytes=_MOST_CACHE_BYTES, trusted_owner=True) == facts:
                return
    tokens.scan(progress)
    if cache is not None and _facts(tokens) == facts:  # otherwise the file has changed
        with suppress(OSError):  # a full or read-only home: the file is read again next time
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(cache, json.dumps(facts))


def _facts(tokens: TokenFile) -> dict[str, Any]:
    status = os.stat(tokens.path)
    return {
        "path": str(tokens.path.resolve()),
        "bytes": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,  # ctime changes with every change; mtime can be reset
        "content": tokens.header.content,
        "vocab_size": tokens.header.vocab_size,
    }


def _cache_file(tokens: TokenFile) -> Path | None:
    """Return the cache file of a verified token file; None if there is no folder for it."""
    override = os.environ.get("OFFLOADTRAIN_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.abspath(override) if override else os.path.join(caches, "offloadtrain")
    if not os.path.isabs(folder):  # no home folder
        return None
    name = hashlib.blake2b(bytes(tokens.path.resolve()), digest_size=16).hexdigest()
    return Path(folder, "tokens", f"{name}.json")
