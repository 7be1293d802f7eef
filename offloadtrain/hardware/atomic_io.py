"""File operations that leave either the old or the new state after a crash, never a mixture.

Every operation here is one `os` call per effect, so that a test can kill the process, or make the
disk fail, at each of them in turn.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 16 << 20

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A manifest's entry for a file."""

    num_bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[Bytes]) -> FileRecord:
    """Write a new file durably, and hash it in the same pass.

    Raises:
        FileExistsError: `path` exists; a crash-safe writer never overwrites.
        OSError: the disk is full or failing; a part of the file may remain.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    digest, num_bytes = hashlib.sha256(), 0
    with _opened(path, flags) as fd:
        for piece in _pieces(parts):
            digest.update(piece)
            _write_all(fd, piece)
            num_bytes += len(piece)
        os.fsync(fd)
        _drop_from_page_cache(fd)
    return FileRecord(num_bytes, digest.hexdigest())


def hash_file(path: Path) -> FileRecord:
    """Read a whole file, a piece at a time, and return its size and hash."""
    digest, num_bytes = hashlib.sha256(), 0
    with _opened(path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        while piece := os.read(fd, PIECE_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return FileRecord(num_bytes, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder (creations, renames, removals) durable."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder atomically and durably within its parent.

    Raises:
        OSError: `target` exists and is not empty, or the disk fails.
    """
    os.rename(source, target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder that contains only files; do nothing if it is missing."""
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            os.unlink(folder / name)
        os.rmdir(folder)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _pieces(parts: Iterable[Bytes]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _write_all(fd: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(fd, piece) :]


def _drop_from_page_cache(fd: int) -> None:
    """Free the cached pages: in a container they count against the memory that training needs."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
