"""Checks Hugging Face folders before transformers opens them.

transformers follows links, reads files of any size, and joins names from an index to the folder
without checking them. `check_folder` refuses files that would lead it out of the folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from offloadtrain.boundary.safe_open import UnsafeFileError, open_regular, read_json

_OPENED = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken")
"""Suffixes of the files that transformers opens."""
_MOST_TEXT_BYTES = 256 << 20
_MOST_HEADER_BYTES = 32 << 20
"""Limit on a safetensors header. With 50,000 tensors it has 5 MB; safetensors reads 100 MB."""


def inside(path: Path) -> Path:
    """Return the file that a path in a model's folder refers to.

    Raises:
        UnsafeFileError: a link leads out of the folder. In the Hub's cache, links may lead from
            `snapshots/REVISION` to `blobs`.
    """
    folder, target = path.parent.resolve(), Path(os.path.realpath(path))
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise UnsafeFileError(
            path, f"it is a link that leads out of the folder, to {target}: copy the file"
        )
    return target


def check_folder(folder: str | Path) -> None:
    """Check every file that transformers may open in a folder.

    Raises:
        UnsafeFileError: a file is outside of the folder, is not a regular file, or is too large; an
            index names a file of another folder; or a safetensors header is too long.
        OSError: a file cannot be opened.
    """
    for path in sorted(Path(folder).glob("*")) + sorted(Path(folder).glob("*/*.jinja")):
        if not path.name.endswith(_OPENED) or path.is_dir():
            continue
        if not (target := inside(path)).exists() and not target.is_symlink():
            continue  # belongs to an unfinished download
        weights = path.suffix == ".safetensors"
        with open_regular(target, max_bytes=None if weights else _MOST_TEXT_BYTES) as file:
            if weights:
                _check_header(path, file)
        if path.name.endswith(".index.json"):
            _check_index(path, target)


def _check_header(path: Path, file: IO[bytes]) -> None:
    length = int.from_bytes(file.read(8), "little")
    if _MOST_HEADER_BYTES < length <= os.fstat(file.fileno()).st_size:
        raise UnsafeFileError(
            path, f"its header has {length:,} bytes, and at most {_MOST_HEADER_BYTES:,} are read"
        )


def _check_index(path: Path, target: Path) -> None:
    content = read_json(target, max_bytes=_MOST_TEXT_BYTES)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not isinstance(content.get("metadata"), dict):
        raise UnsafeFileError(path, "it has no objects metadata and weight_map")
    for name in files.values():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise UnsafeFileError(path, f"it names {name!r}, which is no file of this folder")
