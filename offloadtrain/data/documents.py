"""Text sources: files, divided into pieces that any worker can read in any order.

A *document* is a text file, or one line of a JSONL file. A *piece* is a byte range of one file
and is read by one worker; documents do not span JSONL pieces, but a long text file does.
Everything here runs in worker threads or processes, and is pure: the result depends on the file and
the piece only.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from offloadtrain.data.tokens import DataError

PYTHON_STDLIB = "python-stdlib"
PIECE_BYTES = 4 << 20
END_OF_DOCUMENT = b"\0"
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_EXCERPT_CHARS = 80


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source; `name` is its path relative to the source, with slashes."""

    name: str
    path: str
    num_bytes: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return self.name.lower().endswith(_JSONL_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a file.

    Of a JSONL file: the lines that start in the range, each of which goes to training or
    validation by its own hash (`split_hash` is None). Of a text file: part of a document, whose
    side `split_hash` decides, and which ends here if `ends_document`.
    """

    file: SourceFile
    start: int
    stop: int
    split_hash: int | None
    ends_document: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading options.

    Attributes:
        threshold: documents whose 64-bit hash is below it are held out for validation.
        field: field of a JSONL object with the text.
        keep_going: count bad lines instead of stopping at the first.
    """

    threshold: int
    field: str
    keep_going: bool


@dataclass(slots=True)
class Text:
    """The text of one or more pieces.

    Attributes:
        train, val: documents, each followed by a 0 byte.
        lowest, highest: hash of any document; lowest > highest if there was none.
        lines: JSONL lines read, including bad and blank ones.
        bad: (line number in the piece from 0, what is wrong with it).
    """

    train: list[bytes] = field(default_factory=list)
    val: list[bytes] = field(default_factory=list)
    train_documents: int = 0
    val_documents: int = 0
    lowest: int = 1 << 64
    highest: int = -1
    lines: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)

    def add(self, raw: bytes, split_hash: int, ends_document: bool, threshold: int) -> None:
        held_out = split_hash < threshold
        side = self.val if held_out else self.train
        side.append(raw)
        if ends_document:
            side.append(END_OF_DOCUMENT)
            self.val_documents += held_out
            self.train_documents += not held_out
        self.lowest = min(self.lowest, split_hash)
        self.highest = max(self.highest, split_hash)


def find_files(source: str | Path, excluded: Path) -> list[SourceFile]:
    """Return the regular files of a source, sorted by name.

    Args:
        source: a file, a folder (recursively, without names that begin with a dot),
            or "python-stdlib": the .py files of the running interpreter's standard library,
            including its tests if installed, about 30 MB.
        excluded: a folder to skip: the output folder may be inside the source.

    Raises:
        DataError: the source is missing or holds no text.
    """
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, excluded, suffix=".py")
    elif (root := Path(source)).is_dir():
        files = _walk(root, excluded)
    else:
        files = _as_source_file(root, root.name)
    if not root.exists():
        raise DataError(f"{root}: no such file or folder, and not {PYTHON_STDLIB!r}")
    found = sorted((file for file in files if file.num_bytes), key=lambda f: os.fsencode(f.name))
    if not found:
        raise DataError(f"{root} contains no text: it has no regular file that is not empty")
    return found


def _walk(root: Path, excluded: Path, suffix: str = "") -> Iterator[SourceFile]:
    skipped = {"__pycache__", "site-packages", "dist-packages"} if suffix == ".py" else set()
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in skipped
            and Path(folder, name).resolve() != excluded
        ]
        for name in names:
            if not name.startswith(".") and name.endswith(suffix):
                path = Path(folder, name)
                yield from _as_source_file(path, path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error


def _as_source_file(path: Path, name: str) -> Iterator[SourceFile]:
    """Yield one, or nothing if it is neither a file nor a link to one."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode):
        yield SourceFile(name, str(path), status.st_size, status.st_mtime_ns)


def cut(file: SourceFile, tail_bytes: int = 0) -> Iterator[Piece]:
    """Split a file into pieces of at most `PIECE_BYTES`, in order.

    With `tail_bytes`, a text file is treated as two documents, of which the last, of that many
    bytes, has the hash 0 and the first the highest hash.
    """
    if file.is_jsonl:
        yield from _ranges(file, 0, file.num_bytes, None)
    elif tail_bytes:
        middle = file.num_bytes - tail_bytes
        yield from _ranges(file, 0, middle, (1 << 64) - 1)
        yield from _ranges(file, middle, file.num_bytes, 0)
    else:
        yield from _ranges(file, 0, file.num_bytes, hash64(os.fsencode(file.name)))


def _ranges(file: SourceFile, start: int, stop: int, split_hash: int | None) -> Iterator[Piece]:
    for begin in range(start, stop, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, stop)
        yield Piece(file, begin, end, split_hash, ends_document=end == stop)


def hash64(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def read_pieces(pieces: tuple[Piece, ...], reading: Reading) -> Text:
    """Read pieces in order.

    Raises:
        OSError: a file cannot be read.
        DataError: a file became shorter after it was found.
    """
    text = Text()
    for piece in pieces:
        if piece.split_hash is None:
            _read_jsonl(piece, reading, text)
        else:
            raw = _read_range(piece)
            text.add(raw, piece.split_hash, piece.ends_document, reading.threshold)
    return text


def _read_range(piece: Piece) -> bytes:
    with open(piece.file.path, "rb") as file:
        file.seek(piece.start)
        raw = file.read(piece.stop - piece.start)
    if len(raw) < piece.stop - piece.start:
        raise DataError(f"{piece.file.path} became shorter while it was read")
    return raw


def _read_jsonl(piece: Piece, reading: Reading, text: Text) -> None:
    with open(piece.file.path, "rb") as file:
        for line in _lines_starting_in(file, piece):
            number, text.lines = text.lines, text.lines + 1
            try:
                raw = _parse_line(line, reading.field)
            except ValueError as error:
                text.bad.append((number, f"{error}: {_excerpt(line)}"))
                if not reading.keep_going:
                    return
                continue
            if raw:
                text.add(raw, hash64(raw), ends_document=True, threshold=reading.threshold)


def _lines_starting_in(file: BinaryIO, piece: Piece) -> Iterator[bytes]:
    position = piece.start
    if position:
        file.seek(position - 1)
        position += len(file.readline()) - 1  # to the end of the line that began earlier
    while position < piece.stop and (line := file.readline()):
        yield line.removeprefix(b"\xef\xbb\xbf") if position == 0 else line
        position += len(line)


def _parse_line(line: bytes, field: str) -> bytes:
    """Return the text as UTF-8, b"" for a blank line.

    Raises:
        ValueError: the line is not an object with a string in the field; the text gives the reason.
    """
    try:
        decoded = line.decode("utf-8").strip()
        record = json.loads(decoded) if decoded else {field: ""}
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({str(error).split(':')[0]})") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if field not in record:
        raise ValueError(f'no field "{field}"{_fields_of(record)}')
    if not isinstance(record[field], str):
        raise ValueError(f'field "{field}" is not a string')
    return str(record[field]).encode("utf-8", "surrogatepass")


def _fields_of(record: dict[str, object]) -> str:
    """Name the fields that could be meant."""
    texts = [ascii(key) for key, value in record.items() if isinstance(value, str)]
    if texts:
        return f" (text is in {', '.join(texts[:4])}: choose one with --field)"
    return " (no other field is a string: write each conversation as one string)" if record else ""


def _excerpt(line: bytes) -> str:
    """Return the start of a line without terminal escapes."""
    return ascii(line[:_EXCERPT_CHARS].decode("utf-8", "backslashreplace").strip())[:_EXCERPT_CHARS]
