"""Pieces of source files, and the records of a piece: lines of JSONL, rows of CSV, Parquet, Arrow.

Any worker can read any piece, in any order. The cuts depend only on the files, so that the tokens
are the same for any number of workers. A document is in one piece of a table, but a long text file
spans several pieces. A piece of text ends at a character, if possible at the end of a line or
before a space, so that a tokenizer gets whole words. (With bytes as tokens any position is as
good.)
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, TypeAlias

from offloadtrain.boundary.safe_open import bounded_lines, open_regular
from offloadtrain.data.source import FileKind, SourceFile, optional
from offloadtrain.data.tokens import DataError

PIECE_BYTES = 4 << 20
_TABLE_BYTES = 1 << 20
"""Size of a piece of JSONL. Small pieces give all workers work until the end."""
_MOST_SLICES = 8
"""Largest number of pieces of a row group of Parquet, which each worker decodes completely."""
_LOOKED_AT = 4096
"""Range in bytes after a cut of text in which the end of a line or a space is searched."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file.

    Attributes:
        start, stop: bytes of text, JSONL or CSV; rows of the group of Parquet; record batches of
            Arrow.
        split_hash: decides if the document of a text file is held out; None for a table, whose
            records are assigned to training or validation by their own hashes.
        begins_document, ends_document: for text, the document begins or ends here.
        num_bytes: bytes of the piece in the file, for progress.
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
    """Divide a file into pieces of about `PIECE_BYTES`, in order.

    Args:
        tail_bytes: if not 0, a text file is treated as two documents. The last document has this
            many bytes and the hash 0, the first has the highest hash.
        at_words: move the cuts of a text file to the ends of words.
    """
    if file.is_table:
        yield from _TABLES[file.kind].cut(file)
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
    """Return the first good position of a cut, from `at` on, in the first half of the remaining
    bytes."""
    with open_regular(file.path, follow_link=True) as opened:
        opened.seek(at)
        text = opened.read(min(_LOOKED_AT, (file.num_bytes - at) // 2))
    if (line := text.find(b"\n")) >= 0:
        return at + line + 1
    if (space := text.find(b" ")) >= 0:
        return at + space
    return at + next((n for n, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)


def _rows(file: SourceFile) -> Iterator[Piece]:
    """Cut CSV after rows. A line ends a row if the number of quotes up to its end is even: a quote
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


@contextmanager
def _opened_parquet(file: SourceFile) -> Iterator[Any]:
    parquet = optional("pyarrow.parquet", f"{file.path} (Parquet)")
    with readable(file), parquet.ParquetFile(file.path) as opened:
        yield opened


def _row_groups(file: SourceFile) -> Iterator[Piece]:
    with _opened_parquet(file) as opened:
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
    """Convert pyarrow's errors for a damaged or foreign file into a DataError."""
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


Record: TypeAlias = dict[str, Any]
_EXCERPT_CHARS = 80
LONGEST_LINE = 64 << 20
"""Largest size of a record of JSONL in bytes: each worker has one record in memory."""


@dataclass(frozen=True, slots=True)
class Bad:
    """The reason why a record cannot be read or used."""

    problem: str


def records(piece: Piece, columns: Sequence[str]) -> Iterator[Record | Bad | None]:
    """Yield the records of a piece in order; None for a blank line.

    Args:
        columns: the columns of Parquet and Arrow to read, if they exist.

    Raises:
        DataError, OSError: if the file cannot be read.
    """
    return _TABLES[piece.file.kind].read(piece, columns)


def first_record(file: SourceFile) -> Record | None:
    """Return the first readable record, with all its columns."""
    for piece in cut(file):
        for record in records(piece, ()):
            if isinstance(record, dict):
                return record
    return None


def _jsonl(piece: Piece, columns: Sequence[str]) -> Iterator[Record | Bad | None]:
    with open_regular(piece.file.path, follow_link=True) as file:
        for line, length in _lines_starting_in(file, piece):
            try:
                yield _parse_line(line, length)
            except ValueError as error:
                yield Bad(f"{error}: {excerpt(line)}")


def _lines_starting_in(file: IO[bytes], piece: Piece) -> Iterator[tuple[bytes, int]]:
    position = piece.start
    if position:
        file.seek(position - 1)
        _, length = next(bounded_lines(file, 1 << 20))  # the line that began before the piece
        position += length - 1
    lines = bounded_lines(file, LONGEST_LINE)
    while position < piece.stop and (next_line := next(lines, None)):
        line, length = next_line
        yield line.removeprefix(b"\xef\xbb\xbf") if position == 0 else line, length
        position += length


def _parse_line(line: bytes, length: int) -> Record | None:
    """Return the object, or None for a blank line.

    Args:
        length: length of the line in the file; `line` may be only its start.

    Raises:
        ValueError: if the line is not an object; the text is the reason.
    """
    if length > LONGEST_LINE:
        raise ValueError(f"a line of {length:,} bytes, and at most {LONGEST_LINE:,} are read")
    try:
        decoded = line.decode("utf-8").strip()
        record = json.loads(decoded) if decoded else None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8: convert it with iconv") from None
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).split(':')[0]})") from None
    if decoded and not isinstance(record, dict):
        raise ValueError('not a JSON object, such as {"text": ...} or {"messages": [...]}')
    return record


def _csv(piece: Piece, columns: Sequence[str]) -> Iterator[Record | Bad | None]:
    """Yield the rows of a range that begins and ends with a row; the file's first row has the
    names of the columns."""
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if piece.file.name.lower().endswith(".tsv") else ","
    with open_regular(piece.file.path, follow_link=True) as file:
        file.seek(piece.start)
        raw = file.read(piece.stop - piece.start)
        file.seek(0)
        head = raw if piece.start == 0 else file.read(piece.start)
    names = next(_parsed(head, delimiter, piece))
    rows = _parsed(raw, delimiter, piece)
    if piece.start == 0:
        next(rows)
        yield None  # the row of names
    for row in rows:
        if not row:
            yield None
        elif len(row) != len(names):
            yield Bad(f"{len(row)} fields, and the first row names {len(names)}")
        else:
            yield dict(zip(names, row, strict=True))


def _parsed(raw: bytes, delimiter: str, piece: Piece) -> Iterator[list[str]]:
    text = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig", newline="")
    try:
        yield from csv.reader(text, delimiter=delimiter, strict=True)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{piece.file.path} is not CSV in UTF-8: {error}") from error


def _parquet(piece: Piece, columns: Sequence[str]) -> Iterator[Record]:
    with _opened_parquet(piece.file) as opened:
        chosen = [name for name in opened.schema_arrow.names if name in columns] or None
        row = 0
        for batch in opened.iter_batches(row_groups=[piece.group], columns=chosen):
            begin, end = max(piece.start - row, 0), min(piece.stop - row, batch.num_rows)
            if begin < end:
                yield from batch.slice(begin, end - begin).to_pylist()
            row += batch.num_rows


def _arrow(piece: Piece, columns: Sequence[str]) -> Iterator[Record]:
    for number, batch in enumerate(arrow_batches(piece.file)):
        if piece.start <= number < piece.stop:
            chosen = [name for name in batch.schema.names if name in columns]
            yield from (batch.select(chosen) if chosen else batch).to_pylist()


@dataclass(frozen=True, slots=True)
class _Table:
    """How files of one kind of table are cut into pieces, and how a piece is read."""

    cut: Callable[[SourceFile], Iterator[Piece]]
    read: Callable[[Piece, Sequence[str]], Iterator[Record | Bad | None]]


_TABLES: dict[FileKind, _Table] = {
    "jsonl": _Table(
        lambda file: _ranges(file, 0, file.num_bytes, None, piece_bytes=_TABLE_BYTES), _jsonl
    ),
    "csv": _Table(_rows, _csv),
    "parquet": _Table(_row_groups, _parquet),
    "arrow": _Table(_record_batches, _arrow),
}


def excerpt(line: bytes) -> str:
    """Return the start of a line without terminal escapes."""
    return ascii(line[:_EXCERPT_CHARS].decode("utf-8", "backslashreplace").strip())[:_EXCERPT_CHARS]
