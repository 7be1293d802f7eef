"""Sources: the files of text or records that are prepared, in a fixed order.

A *document* is a text file, or one record of a table: a line of JSONL, a row of CSV, Parquet or
Arrow. The suffix of a file determines its kind. A text file whose bytes are not text is refused.
"""

from __future__ import annotations

import importlib
import logging
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offloadtrain.boundary.safe_open import open_regular, read_json
from offloadtrain.data.tokens import DataError

_log = logging.getLogger(__name__)

PYTHON_STDLIB = "python-stdlib"
HUB = "hf:"
_MOST_BYTES = 16 << 20
"""Size limit of the JSON files that `datasets` writes."""
FileKind = Literal["text", "jsonl", "csv", "parquet", "arrow"]
_SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source; `name` is its path relative to the source, with slashes."""

    name: str
    path: str
    num_bytes: int
    mtime_ns: int

    @property
    def kind(self) -> FileKind:
        return _SUFFIXES.get(os.path.splitext(self.name)[1].lower(), "text")

    @property
    def is_table(self) -> bool:
        return self.kind != "text"


def optional(package: str, what: str) -> Any:
    """Import a package that only some sources need.

    Raises:
        DataError: if the package is not installed; the message names `what` as the reason.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{what} needs {error.name}, which is not installed: pip install 'offloadtrain[data]'"
        ) from error


def find_files(source: str | Path, excluded: Path) -> list[SourceFile]:
    """Return the regular files of a source, sorted by name.

    Args:
        source: a file, a folder (recursive, without names that begin with a dot), a folder
            written by `datasets.Dataset.save_to_disk`, "hf:NAME" or "hf:NAME:SPLIT" as in
            `datasets.load_dataset` (split "train"), or "python-stdlib": the .py files of the
            running interpreter's standard library, including its tests if installed, 30 MB.
        excluded: a folder to skip, because the output folder may be inside the source.

    Raises:
        DataError: if the source is missing or has no text.
    """
    if str(source).startswith(HUB):
        return _of_hub(str(source).removeprefix(HUB))
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, excluded, suffix=".py")
    elif (root := Path(source)).suffix.lower() == ".json" and root.is_file():
        raise DataError(
            f"{root} is JSON, and records are read as JSON lines, one per line: write it with the "
            f"ending .jsonl (jq -c '.[]' {root.name} > {root.stem}.jsonl)"
        )
    elif (root / "dataset_dict.json").is_file():
        splits = _facts(root / "dataset_dict.json", "splits")
        raise DataError(
            f"{root} holds several splits: choose one: {', '.join(str(root / s) for s in splits)}"
        )
    elif (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        files = _of_datasets_folder(root)
    elif root.is_dir():
        files = _walk(root, excluded)
    else:
        files = _as_source_file(root, root.name)
    if not root.exists():
        raise DataError(f"{root}: no such file or folder, and not {PYTHON_STDLIB!r}")
    nonempty = sorted((file for file in files if file.num_bytes), key=lambda f: os.fsencode(f.name))
    if not nonempty:
        raise DataError(f"{root} contains no text: it has no regular file that is not empty")
    return nonempty


def _walk(root: Path, excluded: Path, suffix: str = "") -> Iterator[SourceFile]:
    """Yield the files of a folder and its subfolders. Only links to files are followed; a warning
    counts the other links."""
    skipped = {"__pycache__", "site-packages", "dist-packages"} if suffix == ".py" else set()
    not_followed: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in skipped
            and Path(folder, name).resolve() != excluded
        ]
        not_followed += [path for name in subfolders if (path := Path(folder, name)).is_symlink()]
        for name in names:
            if not name.startswith(".") and name.endswith(suffix):
                path = Path(folder, name)
                if path.is_symlink() and not path.exists():
                    not_followed.append(path)
                    continue
                yield from _as_source_file(path, path.relative_to(root).as_posix())
    if not_followed:
        _log.warning(
            "%s: left out %d links to folders or to nothing, such as %r",
            *(root, len(not_followed), str(not_followed[0].relative_to(root))),
        )


def _raise(error: OSError) -> None:
    raise error


def _as_source_file(path: Path, name: str) -> Iterator[SourceFile]:
    """Yield the source file of a file or a link to a file; yield nothing for other paths."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode):
        yield SourceFile(name, str(path), status.st_size, status.st_mtime_ns)


def _of_datasets_folder(root: Path) -> Iterator[SourceFile]:
    """Yield the Arrow files of a folder from `save_to_disk`."""
    for entry in _facts(root / "state.json", "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name != os.path.basename(name):
            raise DataError(
                f"{root / 'state.json'} names {name!r}, which is not a file in that folder"
            )
        yield from _as_source_file(root / name, name)


def _facts(path: Path, key: str) -> list[Any]:
    """Return the list under a key of a JSON file that `datasets` wrote.

    Raises:
        DataError: if the file cannot be read, or has no such list.
    """
    try:
        content = read_json(path, max_bytes=_MOST_BYTES, follow_link=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise DataError(f"{path} has no list {key!r}: `datasets` did not write it")
    return list(content[key])


def _of_hub(name: str) -> list[SourceFile]:
    """Return the Arrow files in the cache of `datasets`, which downloads missing files.

    Raises:
        DataError: if `datasets` is not installed, or cannot load the data.
    """
    datasets = optional("datasets", f"{HUB}{name}")
    path, _, split = name.partition(":")
    if "[" in split:
        raise DataError(f"{HUB}{name}: a part of a split cannot be chosen, only a whole one")
    try:
        loaded = datasets.load_dataset(path, split=split or "train")
    except Exception as error:  # many types: its own, huggingface_hub's, network errors
        reason = " ".join(str(error).split())
        raise DataError(f"{HUB}{name}: datasets cannot load it: {reason}") from error
    paths = [Path(entry["filename"]) for entry in loaded.cache_files]
    return [file for path in paths for file in _as_source_file(path, path.name)]


_HEAD_BYTES = 1 << 16
_JUDGED_BYTES = 1 << 10
"""Shorter files are not checked, because a short text may have any byte."""

_MOST_ZEROS, _MOST_CONTROLS = 0.01, 0.05
"""Largest shares in a text. In bytes that are not text (for example compressed), 11 % are
controls."""

_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b\b")) + b"\x7f"

_TO_TEXT = 'write its texts as JSONL, one {"text": ...} per line'
_UNPACK = "unpack it first"

# (offset, bytes there, file type, remedy)
_KNOWN = [
    (0, b"PAR1", "a Parquet file", "give it the ending .parquet"),
    (0, b"ARROW1", "an Arrow file", "give it the ending .arrow"),
    (0, b"SQLite format 3\0", "an SQLite database", _TO_TEXT),
    (0, b"\x89HDF\r\n", "an HDF5 file", _TO_TEXT),
    (0, b"\x93NUMPY", "a NumPy array", _TO_TEXT),
    (0, b"%PDF-", "a PDF document", "extract its text"),
    (0, b"\x1f\x8b", "compressed by gzip", _UNPACK),
    (0, b"BZh", "compressed by bzip2", _UNPACK),
    (0, b"\xfd7zXZ\0", "compressed by xz", _UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (0, b"PK\x03\x04", "a zip archive (such as .docx and .epub)", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"\x89PNG\r\n", "a PNG image", "leave it out"),
    (0, b"\xff\xd8\xff", "a JPEG image", "leave it out"),
    (0, b"GGUF", "a file of weights (GGUF)", "leave it out"),
    (0, b"\x7fELF", "a program", "leave it out"),
    (0, b"OTTOKENS", "a token file", "set data.train to it"),
]


def refuse_binary(files: Sequence[SourceFile]) -> None:
    """Raise DataError for files that are not text. Tables other than CSV are checked when they are
    read."""
    texts = [file for file in files if file.kind in ("text", "csv")]
    binaries = [(file, why) for file in texts if (why := _binary(file))]
    if binaries:
        file, (what, advice) = binaries[0]
        more = (
            f" (and {len(binaries) - 1} more files that are not text)" if len(binaries) > 1 else ""
        )
        raise DataError(f"{file.path} is {what}, not text: {advice}{more}")


def _binary(file: SourceFile) -> tuple[str, str] | None:
    """Return (file type, remedy), or None for text."""
    with open_regular(file.path, follow_link=True) as opened:
        head = opened.read(_HEAD_BYTES)
    for at, begins, what, advice in _KNOWN:
        if head[at:].startswith(begins):
            return what, advice
    zeros, controls = head.count(0), len(head) - len(head.translate(None, _CONTROLS))
    if len(head) < _JUDGED_BYTES or not zeros:
        return None
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"
    if zeros > _MOST_ZEROS * len(head) or controls > _MOST_CONTROLS * len(head):
        return "binary (it has zero and control bytes)", "leave it out, or extract its text"
    return None
