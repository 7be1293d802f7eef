"""Records of tables: lines of JSONL, rows of CSV, Parquet and Arrow, as dictionaries.

Everything here runs in worker threads or processes, and is pure: the result depends on the file and
the piece only.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from offloadtrain.boundary.safe_open import bounded_lines, open_regular
from offloadtrain.data.cut import Piece, arrow_batches, cut, readable
from offloadtrain.data.source import SourceFile, optional
from offloadtrain.data.tokens import DataError

Record: TypeAlias = dict[str, Any]
_EXCERPT_CHARS = 80
LONGEST_LINE = 64 << 20
"""Bytes of a record of JSONL: each worker holds one in memory."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read or used, and why."""

    problem: str


def records(piece: Piece, columns: Sequence[str]) -> Iterator[Record | Bad | None]:
    """Yield the records of a piece in order; None for a blank line.

    Args:
        columns: the columns of Parquet and Arrow that are read, if they are there.

    Raises:
        DataError, OSError: the file cannot be read.
    """
    kind = piece.file.kind
    if kind == "jsonl":
        yield from _jsonl(piece)
    elif kind == "csv":
        yield from _csv(piece)
    else:
        read = _parquet if kind == "parquet" else _arrow
        for batch in read(piece, columns):
            yield from batch.to_pylist()


def first_record(file: SourceFile) -> Record | None:
    """Return the first record that can be read, with all its columns."""
    for piece in cut(file):
        for record in records(piece, ()):
            if isinstance(record, dict):
                return record
    return None


def _jsonl(piece: Piece) -> Iterator[Record | Bad | None]:
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
        _, length = next(bounded_lines(file, 1 << 20))  # the line that began earlier
        position += length - 1
    lines = bounded_lines(file, LONGEST_LINE)
    while position < piece.stop and (next_line := next(lines, None)):
        line, length = next_line
        yield line.removeprefix(b"\xef\xbb\xbf") if position == 0 else line, length
        position += length


def _parse_line(line: bytes, length: int) -> Record | None:
    """Return the object, None for a blank line.

    Args:
        length: in the file, where `line` may be its beginning.

    Raises:
        ValueError: the line is not an object; the text gives the reason.
    """
    if length > LONGEST_LINE:
        raise ValueError(f"a line of {length:,} bytes, and at most {LONGEST_LINE:,} are read")
    try:
        decoded = line.decode("utf-8").strip()
        record = json.loads(decoded) if decoded else None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).split(':')[0]})") from None
    if decoded and not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _csv(piece: Piece) -> Iterator[Record | Bad | None]:
    """Yield the rows of a range that begins and ends with a row, named by the first of the file."""
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
        yield None  # the line of names
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


def _parquet(piece: Piece, columns: Sequence[str]) -> Iterator[Any]:
    parquet = optional("pyarrow.parquet", f"{piece.file.path} (Parquet)")
    with readable(piece.file), parquet.ParquetFile(piece.file.path) as opened:
        chosen = [name for name in opened.schema_arrow.names if name in columns] or None
        row = 0
        for batch in opened.iter_batches(row_groups=[piece.group], columns=chosen):
            begin, end = max(piece.start - row, 0), min(piece.stop - row, batch.num_rows)
            if begin < end:
                yield batch.slice(begin, end - begin)
            row += batch.num_rows


def _arrow(piece: Piece, columns: Sequence[str]) -> Iterator[Any]:
    for number, batch in enumerate(arrow_batches(piece.file)):
        if piece.start <= number < piece.stop:
            chosen = [name for name in batch.schema.names if name in columns]
            yield batch.select(chosen) if chosen else batch


def excerpt(line: bytes) -> str:
    """Return the start of a line without terminal escapes."""
    return ascii(line[:_EXCERPT_CHARS].decode("utf-8", "backslashreplace").strip())[:_EXCERPT_CHARS]
