"""Writing token files; `tokens.py` has the format and reads them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from offloadtrain.data.tokens import (
    DTYPES,
    HEADER_BYTES,
    LENGTH,
    MAGIC,
    PREFIX,
    VERSION,
    DataError,
    TokenHeader,
    new_hash,
)
from offloadtrain.hardware.atomic_io import sync_folder

_COPIED_BYTES = 1 << 24


class TokenWriter:
    """Writes a token file piece by piece; `commit` publishes it, complete and durable.

    Until then the bytes are in `<path>.tmp` (and in files without a name), which leaving the
    context without `commit` removes. One writer per path at a time. The smallest dtype that holds
    the vocabulary is chosen.
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
        self._dtype = _smallest_dtype(vocab_size)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._document_begins = 0

    def __enter__(self) -> Self:
        self._file = open(self._temporary, "wb")
        self._file.write(bytes(HEADER_BYTES))
        # They follow the tokens in the file, whose number is known at the end only.
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
            ends: of the documents that end in `tokens`, the index after their last token.
            counted: the loss mask of `tokens`; required if the file is masked.

        Raises:
            DataError: a token is below 0 or not below the vocabulary size; nothing is appended.
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
    for name, width in DTYPES.items():
        if 0 < vocab_size <= 1 << 8 * width:
            return name
    raise DataError(f"vocab_size = {vocab_size} must be from 1 to {1 << 32}")
