"""New lines of a file that another process appends to."""

from __future__ import annotations

import os
from pathlib import Path

from offloadtrain.boundary.safe_open import UnsafeFileError, open_descriptor
from offloadtrain.events.log_lines import LONGEST_LINE

_CHUNK = 1 << 20
_NO_LOG = 1 << 26
"""A file with a line of so many bytes is no log: it is read no further."""


class Tail:
    """Reads lines appended since the last call; an incomplete last line waits for its end.

    A file that was replaced (another inode) or truncated is read again from its beginning. The file
    is untrusted: of a line longer than 4 MiB only the end is returned.

    Attributes:
        restarts: number of times the file was replaced or truncated.
        read_bytes: bytes read so far, those of replaced files too.
        refused: why the file is not read (any further), if it is no log.
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
        """Return complete lines, at most about `most` bytes; [] if there is nothing new."""
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
                self._torn = b""  # its rest will be a line that is no record, and be counted
            if self._endless > _NO_LOG:
                self.refused = f"{self.path}: it has a line of more than {_NO_LOG:,} bytes"
                break
        return lines

    @property
    def left_bytes(self) -> int:
        """Bytes not read yet."""
        return max(os.fstat(self._fd).st_size - self._offset, 0) if self._fd >= 0 else 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ready(self) -> bool:
        """Open the file, or reopen it if it was replaced."""
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
        except OSError as error:  # others than these may pass
            self.refused = str(error) if isinstance(error, UnsafeFileError) else ""
            if isinstance(error, PermissionError):
                self.refused = f"{self.path}: no permission"
            return False
        self.refused = ""
        self._inode, self._offset, self._torn, self._endless = inode, 0, b"", 0
        return True
