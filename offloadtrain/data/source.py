"""Sources: the files of text or records that are prepared, in a fixed order.

A *document* is a text file, or one record of a table: a line of JSONL, a row of CSV, Parquet or
Arrow. What a file is, its name's ending says.
"""

from __future__ import annotations

import importlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.data.tokens import DataError

PYTHON_STDLIB = "python-stdlib"
HUB = "hf:"
_MOST_BYTES = 16 << 20
"""Of what `datasets` writes beside its files."""
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
        DataError: it is not installed; `what` needs it.
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
        source: a file, a folder (recursively, without names that begin with a dot), a folder
            written by `datasets.Dataset.save_to_disk`, "hf:NAME" or "hf:NAME:SPLIT" as
            `datasets.load_dataset` takes it (split "train"), or "python-stdlib": the .py files of
            the running interpreter's standard library, including its tests if installed, 30 MB.
        excluded: a folder to skip: the output folder may be inside the source.

    Raises:
        DataError: the source is missing or holds no text.
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


def _of_datasets_folder(root: Path) -> Iterator[SourceFile]:
    """Yield the Arrow files of a folder that `save_to_disk` wrote."""
    for entry in _facts(root / "state.json", "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name != os.path.basename(name):
            raise DataError(
                f"{root / 'state.json'} names {name!r}, which is not a file in that folder"
            )
        yield from _as_source_file(root / name, name)


def _facts(path: Path, key: str) -> list[Any]:
    """Return the list under a key of a file that `datasets` wrote.

    Raises:
        DataError: it cannot be read, or has no such list.
    """
    try:
        content = read_json(path, max_bytes=_MOST_BYTES, follow_link=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise DataError(f"{path} has no list {key!r}: `datasets` did not write it")
    return list(content[key])


def _of_hub(name: str) -> list[SourceFile]:
    """Return the Arrow files in the cache of `datasets`, which downloads what is not there.

    Raises:
        DataError: `datasets` is not installed, or cannot load it.
    """
    datasets = optional("datasets", f"{HUB}{name}")
    path, _, split = name.partition(":")
    if "[" in split:
        raise DataError(f"{HUB}{name}: a part of a split cannot be chosen, only a whole one")
    try:
        loaded = datasets.load_dataset(path, split=split or "train")
    except Exception as error:  # of many kinds: its own, huggingface_hub's, of the network
        reason = " ".join(str(error).split())
        raise DataError(f"{HUB}{name}: datasets cannot load it: {reason}") from error
    paths = [Path(entry["filename"]) for entry in loaded.cache_files]
    return [file for path in paths for file in _as_source_file(path, path.name)]
