"""Writes files where others may have put links, without writing through a link.

A run folder may be foreign, and its `trace.json` may be a link to one of the user's files.
"""

from __future__ import annotations

import os
from pathlib import Path

from offloadtrain.boundary.safe_open import UnsafeFileError


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically, readable only by its owner; a reader sees the old or the new one.

    An existing file or link with this name is replaced; a link is not followed.

    Raises:
        OSError: the folder cannot be written, or contains a folder with this name.
    """
    data = content.encode() if isinstance(content, str) else content
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(fresh, flags, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def own_folder(path: Path) -> Path:
    """Create a folder inside a run folder, only for its owner, unless it exists.

    Raises:
        UnsafeFileError: a link, or something other than a folder, has this name.
        OSError: it cannot be created.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UnsafeFileError(path, "it is not a folder that belongs to the run")
    path.mkdir(mode=0o700, exist_ok=True)
    return path
