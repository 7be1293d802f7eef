"""Run a command of the Makefile, and never be silent: python tools/watch.py WHAT COMMAND...

What it prints goes through. After 8 seconds without a word there is a line that says what is under
way and for how long. On a terminal the command gets one too, so that pip draws its bars.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

SILENCE_S = 8.0
_CHUNK_BYTES = 1 << 16

Read = Callable[[float], "bytes | None"]
"""read(seconds): what the command printed; b"" at its end; None: nothing in so many seconds."""


def relay(
    what: str, read: Read, write: Callable[[bytes], object], clock: Callable[[], float]
) -> None:
    """Pass on what is read; fill silences."""
    began, at_line_start = clock(), True
    while (data := read(SILENCE_S)) != b"":
        if data is None:
            start = b"" if at_line_start else b"\n"
            data = start + f"  ... {what}: {clock() - began:.0f} s so far\n".encode()
        write(data)
        at_line_start = data.endswith(b"\n")


def run(what: str, command: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    terminal = sys.stdout.isatty()
    ours, theirs = pty.openpty() if terminal else os.pipe()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)

    def read(seconds: float) -> bytes | None:
        if not select.select([ours], [], [], seconds)[0]:
            return None
        try:
            return os.read(ours, _CHUNK_BYTES)
        except OSError:  # how a terminal ends whose other side is closed
            return b""

    def write(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    try:
        relay(what, read, write, time.monotonic)
        code = process.wait()
    except KeyboardInterrupt:  # the command was told as well: let it end
        process.wait()
        return 130
    print(f"{what}: {'done' if code == 0 else 'FAILED'} after {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
