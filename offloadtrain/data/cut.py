"""Pieces of source files, which any worker can read in any order.

The cuts depend on the files alone, so that the tokens are the same for any number of workers.
Documents do not span the pieces of a table, but a long text file does.

A piece of text ends at a character, where possible at the end of a line or before a space: a
tokenizer sees whole words. (Of bytes as tokens any place is as good.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offloadtrain.boundary.safe_open import open_regular
from offloadtrain.data.source import SourceFile, optional
from offloadtrain.data.tokens import DataError

PIECE_BYTES = 4 << 20
_TABLE_BYTES = 1 << 20
"""Of JSONL: no document spans two pieces, and small ones keep all workers busy to the end."""
_MOST_SLICES = 8
"""Of a row group of Parquet, which each worker decodes as a whole."""
_LOOKED_AT = 4096
"""Bytes after a cut of text in which the end of a line or a space is sought."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file.

    Attributes:
        start, stop: bytes of text, JSONL or CSV; rows of the group of Parquet; record batches of
            Arrow.
        split_hash: decides whether the document of a text file is held out; None for a table, each
            of whose records goes to training or validation by its own hash.
        begins_document, ends_document: of text: the document begins or ends here.
        num_bytes: of the file, for progress.
        group: row group of Parquet.
    """

    file: SourceFile
    start: int
    stop: int
    split_hash: int | None
    begins_document: bool
    ends_document: bool
    num_bytes: int
    group: int = 0


def hash64(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def cut(file: SourceFile, tail_bytes: int = 0, *, at_words: bool = False) -> Iterator[Piece]:
    """Split a file into pieces of about `PIECE_BYTES`, in order.

    Args:
        tail_bytes: if not 0, a text file is treated as two documents, of which the last, of that
            many bytes, has the hash 0 and the first the highest hash.
        at_words: move the cuts of a text file to the ends of words.
    """
    if file.kind == "parquet":
        yield from _row_groups(file)
    elif file.kind == "arrow":
        yield from _record_batches(file)
    elif file.kind == "csv":
        yield from _rows(file)
    elif file.is_table:
        yield from _ranges(file, 0, file.num_bytes, None, piece_bytes=_TABLE_BYTES)
    elif tail_bytes:
        middle = file.num_bytes - tail_bytes
        middle = _word_end(file, middle) if at_words else middle
        yield from _ranges(file, 0, middle, (1 << 64) - 1, at_words)
        yield from _ranges(file, middle, file.num_bytes, 0, at_words)
    else:
        name_hash = hash64(os.fsencode(file.name))
        yield from _ranges(file, 0, file.num_bytes, name_hash, at_words)


def _ranges(
    file: SourceFile,
    start: int,
    stop: int,
    split_hash: int | None,
    at_words: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[Piece]:
    cuts = list(range(start, stop, piece_bytes))[1:]
    if at_words:
        cuts = [_word_end(file, at) for at in cuts]
    bounds = sorted({start, *(at for at in cuts if at < stop), stop})
    for begin, end in pairwise(bounds):
        yield Piece(file, begin, end, split_hash, begin == start, end == stop, end - begin)


def _word_end(file: SourceFile, at: int) -> int:
    """Return the first good place for a cut, from `at` on and in the first half of what is left."""
    with open_regular(file.path, follow_link=True) as opened:
        opened.seek(at)
        text = opened.read(min(_LOOKED_AT, (file.num_bytes - at) // 2))
    if (line := text.find(b"\n")) >= 0:
        return at + line + 1
    if (space := text.find(b" ")) >= 0:
        return at + space
    return at + next((n for n, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)


def _rows(file: SourceFile) -> Iterator[Piece]:
    """Cut CSV after rows. A line ends a row if the quotes before it are even in number: a quote
    inside a quoted field is doubled (RFC 4180)."""
    bounds, quotes, at = [0], 0, 0
    with open_regular(file.path, follow_link=True) as opened:
        for line in opened:
            quotes += line.count(b'"')
            at += len(line)
            if at - bounds[-1] >= PIECE_BYTES and quotes % 2 == 0:
                bounds.append(at)
    if bounds[-1] < at:
        bounds.append(at)
    for begin, end in pairwise(bounds):
        yield Piece(file, begin, end, None, True, True, end - begin)


def _row_groups(file: SourceFile) -> Iterator[Piece]:
    parquet = optional("pyarrow.parquet", f"{file.path} (Parquet)")
    with readable(file), parquet.ParquetFile(file.path) as opened:
        groups = [opened.metadata.row_group(n) for n in range(opened.metadata.num_row_groups)]
    for number, group in enumerate(groups):
        slices = min(_MOST_SLICES, max(1, group.total_byte_size // PIECE_BYTES), group.num_rows)
        bounds = [group.num_rows * n // slices for n in range(slices + 1)] if slices else []
        for begin, end in pairwise(bounds):
            num_bytes = file.num_bytes // len(groups) // slices
            yield Piece(file, begin, end, None, True, True, num_bytes, number)


def _record_batches(file: SourceFile) -> Iterator[Piece]:
    begin, nbytes, number = 0, 0, -1
    for number, batch in enumerate(arrow_batches(file)):
        if nbytes and nbytes + batch.nbytes > PIECE_BYTES:
            yield Piece(file, begin, number, None, True, True, nbytes)
            begin, nbytes = number, 0
        nbytes += batch.nbytes
    if nbytes:
        yield Piece(file, begin, number + 1, None, True, True, nbytes)


@contextmanager
def readable(file: SourceFile) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged or foreign file into a DataError."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
        reason = " ".join(str(error).split())
        raise DataError(f"{file.path} cannot be read as {file.kind}: {reason}") from error


def arrow_batches(file: SourceFile) -> Iterator[Any]:
    """Yield the record batches of an Arrow file or stream, mapped from the disk."""
    arrow = optional("pyarrow", f"{file.path} (Arrow)")
    with readable(file), arrow.memory_map(file.path) as mapped:
        if mapped.read(6) == b"ARROW1":
            reader = arrow.ipc.open_file(mapped)
            yield from (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            mapped.seek(0)
            yield from arrow.ipc.open_stream(mapped)
