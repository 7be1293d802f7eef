"""Files of the user's own, written where others may have put links: nothing is written through one.

A run folder may come from somebody else, and its `trace.json` may be a link to a file of the user.
"""

from __future__ import annotations

import os
from pathlib import Path

from offloadtrain.boundary.safe_open import UnsafeFileError


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole, readable by its owner only; a reader finds the old or the new one.

    An existing file or link of that name is replaced; a link is not followed.

    Raises:
        OSError: the folder cannot be written, or has a folder of that name.
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
    """Make a folder inside a run folder, for its owner only, unless it is there.

    Raises:
        UnsafeFileError: something else, or a link, has its name.
        OSError: it cannot be made.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UnsafeFileError(path, "it is not a folder that belongs to the run")
    path.mkdir(mode=0o700, exist_ok=True)
    return path
