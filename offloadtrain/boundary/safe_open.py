"""Opens files without trusting them: regular files only, of a bounded size.

Run folders, checkpoints, logs, jobs and data may be foreign. A FIFO blocks its reader, /dev/zero
never ends, a link leads out of the folder, and a file may grow while it is read. The checks are
made on the open descriptor, so the file cannot be exchanged after them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


_SKIPPED_BYTES = 1 << 20


class UnsafeFileError(OSError):
    """A reader must not open this file; `strerror` is the reason, without the path."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with its two arguments, unlike OSError, which has three."""
        return UnsafeFileError, (self.filename, self.strerror)


def open_descriptor(
    path: str | Path,
    *,
    flags: int = os.O_RDONLY,
    max_bytes: int | None = None,
    follow_link: bool = False,
    trusted_owner: bool = False,
) -> int:
    """Open a regular file without ever blocking; the caller closes the descriptor.

    Args:
        flags: flags of `os.open`; a file that they create is accessible only to its owner.
        max_bytes: largest accepted size; None: any.
        follow_link: accept a symbolic link as the last part of `path`. Only for names that the
            user gives (a job, a token file), never for names found in a folder or a file.
        trusted_owner: require this user or root as the owner.

    Raises:
        UnsafeFileError: it is a link, not a regular file, too large, or owned by another user.
        OSError: it cannot be opened.
    """
    flags |= os.O_CLOEXEC | os.O_NOCTTY
    flags |= os.O_NONBLOCK  # a FIFO without a writer, and some devices, would block forever
    flags |= 0 if follow_link else os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except ValueError as error:  # a NUL in the name
        raise UnsafeFileError(ascii(path), f"no file has such a name: {error}") from None
    except OSError as error:
        raise _explained(path, error, follow_link) from None
    try:
        _check(path, os.fstat(fd), max_bytes, trusted_owner)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_regular(
    path: str | Path,
    *,
    max_bytes: int | None = None,
    follow_link: bool = False,
    trusted_owner: bool = False,
) -> IO[bytes]:
    """Open a regular file as a binary stream; see `open_descriptor`.

    The size is checked once, at opening: a reader of a growing file must bound its reads.
    """
    fd = open_descriptor(
        path,
        max_bytes=max_bytes,
        follow_link=follow_link,
        trusted_owner=trusted_owner,
    )
    return open(path, "rb", opener=lambda name, flags: fd)  # by path, so that errors name it


def read_regular(
    path: str | Path,
    *,
    max_bytes: int,
    follow_link: bool = False,
    trusted_owner: bool = False,
) -> bytes:
    """Read a complete regular file; never more than `max_bytes`, even if it grows.

    Raises:
        UnsafeFileError, OSError: see `open_descriptor`.
    """
    with open_regular(
        path,
        max_bytes=max_bytes,
        follow_link=follow_link,
        trusted_owner=trusted_owner,
    ) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(path, len(content), max_bytes)
    return content


def bounded_lines(file: IO[bytes], max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (line, length) of each remaining line; of a longer line only the first `max_bytes`.

    So gigabytes without a newline are never in memory, and not read to the end.

    Raises:
        UnsafeFileError: a line is longer than four times `max_bytes`, so this is no text.
    """
    while line := file.readline(max_bytes):
        length, piece = len(line), line
        while not piece.endswith(b"\n") and (piece := file.readline(_SKIPPED_BYTES)):
            length += len(piece)
            if length > 4 * max_bytes:
                raise UnsafeFileError(file.name, f"it has a line of more than {length:,} bytes")
        yield line, length


def read_text(
    path: str | Path, *, max_bytes: int, follow_link: bool = False, trusted_owner: bool = False
) -> str:
    """Read a regular file of UTF-8 text; a byte order mark is dropped.

    Raises:
        UnsafeFileError: also if it is not UTF-8.
        OSError: see `open_descriptor`.
    """
    content = read_regular(
        path, max_bytes=max_bytes, follow_link=follow_link, trusted_owner=trusted_owner
    )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnsafeFileError(path, f"it is not UTF-8 text: byte {error.start}") from None


def read_json(
    path: str | Path,
    *,
    max_bytes: int,
    follow_link: bool = False,
    trusted_owner: bool = False,
) -> Any:
    """Parse a regular file of JSON.

    Raises:
        UnsafeFileError: also if it is not JSON, is nested too deeply, or has a number with
            thousands of digits.
        OSError: see `open_descriptor`.
    """
    content = read_regular(
        path,
        max_bytes=max_bytes,
        follow_link=follow_link,
        trusted_owner=trusted_owner,
    )
    try:
        return json.loads(content)
    except RecursionError:
        raise UnsafeFileError(path, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise UnsafeFileError(path, f"it is not JSON: {error}") from None


def _explained(path: str | Path, error: OSError, follow_link: bool) -> OSError:
    if error.errno == errno.ELOOP and not follow_link:
        return UnsafeFileError(path, "it is a symbolic link, which is not followed here")
    if error.errno == errno.ENXIO:
        return UnsafeFileError(path, "it is a socket or a device, not a regular file")
    return error


def _check(
    path: str | Path, facts: os.stat_result, max_bytes: int | None, trusted_owner: bool
) -> None:
    kind = stat.S_IFMT(facts.st_mode)
    if kind != stat.S_IFREG:
        raise UnsafeFileError(path, f"it is {_KINDS.get(kind, 'no file')}, not a regular file")
    if trusted_owner and facts.st_uid not in (os.geteuid(), 0):
        raise UnsafeFileError(path, f"it belongs to user {facts.st_uid}")
    if max_bytes is not None and facts.st_size > max_bytes:
        raise _too_large(path, facts.st_size, max_bytes)


def _too_large(path: str | Path, num_bytes: int, max_bytes: int) -> UnsafeFileError:
    return UnsafeFileError(path, f"it has {num_bytes:,} bytes, and at most {max_bytes:,} are read")
