"""Reads lines that another process appends to a file."""

from __future__ import annotations

import os
from pathlib import Path

from offloadtrain.boundary.safe_open import UnsafeFileError, open_descriptor
from offloadtrain.events.log_lines import LONGEST_LINE

_CHUNK = 1 << 20
_NO_LOG = 1 << 26
"""Length of a line from which a file is not considered a log, and not read any further."""


class Tail:
    """Reads lines appended since the last call; an incomplete last line is returned when it ends.

    A file that was replaced (another inode) or truncated is read again from its beginning. The file
    is untrusted: only the end of a line longer than 4 MiB is returned.

    Attributes:
        restarts: number of times that the file was replaced or truncated.
        read_bytes: number of bytes read so far, including those of replaced files.
        refused: the reason if the file is not read, or not read any further; "" otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarts = 0
        self.read_bytes = 0
        self.refused = ""
        self._fd = -1
        self._inode: tuple[int, int] | None = None
        self._offset = 0
        self._torn = b""
        self._endless = 0

    def poll(self, most: int = 16 * _CHUNK) -> list[bytes]:
        """Return complete lines, of about `most` bytes at most; [] if there are no new lines."""
        if not self._ready():
            return []
        lines: list[bytes] = []
        num_read = 0
        while num_read < most and (data := os.pread(self._fd, _CHUNK, self._offset)):
            self._offset += len(data)
            num_read += len(data)
            self.read_bytes += len(data)
            *complete, self._torn = (self._torn + data).split(b"\n")
            lines += complete
            self._endless = 0 if complete else self._endless + len(data)
            if len(self._torn) > LONGEST_LINE:
                self._torn = b""  # the rest of this line will be counted as an unreadable record
            if self._endless > _NO_LOG:
                self.refused = f"{self.path}: it has a line of more than {_NO_LOG:,} bytes"
                break
        return lines

    @property
    def left_bytes(self) -> int:
        """Number of bytes that have not been read yet."""
        return max(os.fstat(self._fd).st_size - self._offset, 0) if self._fd >= 0 else 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ready(self) -> bool:
        """Open the file, or reopen it if it was replaced; return True if it can be read."""
        try:
            now = os.lstat(self.path)
        except OSError:
            return self._fd >= 0 and self._inode is not None
        inode = (now.st_dev, now.st_ino)
        if self._fd >= 0 and inode == self._inode and now.st_size >= self._offset:
            return self._endless <= _NO_LOG
        self.restarts += self._inode is not None
        self.close()
        try:
            self._fd = open_descriptor(self.path)
        except OSError as error:  # other errors may be temporary
            self.refused = str(error) if isinstance(error, UnsafeFileError) else ""
            if isinstance(error, PermissionError):
                self.refused = f"{self.path}: no permission"
            return False
        self.refused = ""
        self._inode, self._offset, self._torn, self._endless = inode, 0, b"", 0
        return True
