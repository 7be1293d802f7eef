"""Run a command of the Makefile, and never be silent: python tools/watch.py WHAT COMMAND...

What it prints goes through. After 8 seconds without a word there is a line that says what is under
way and for how long; of a compiler, how many files are done, and the next one. On a terminal the
command gets one too, so that pip draws its bars.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SILENCE_S = 8.0
_CHUNK_BYTES = 1 << 16

Read = Callable[[float], "bytes | None"]
"""read(seconds): what the command printed; b"" at its end; None: nothing in so many seconds."""


def compiled(build: Path, since_s: float) -> str:
    """Return, for example, ", 7 of 21 files compiled, next kernels_avx512/kernels.cpp"; "" if
    nothing is compiled there.

    Args:
        build: folder with build folders of CMake and ninja.
        since_s: Unix time; what is older is of an earlier build.
    """
    for ninja in build.glob("*/build.ninja"):
        if ninja.stat().st_mtime < since_s:
            continue
        names = re.findall(r"^build (\S+\.o):", ninja.read_text(errors="replace"), re.MULTILINE)
        left = [name for name in names if not _is_newer(ninja.parent / name, since_s)]
        if left:
            file = left[0].removeprefix("CMakeFiles/").removesuffix(".o").replace(".dir/", "/")
            return f", {len(names) - len(left)} of {len(names)} files compiled, next {file}"
    return ""


def _is_newer(path: Path, since_s: float) -> bool:
    return path.exists() and path.stat().st_mtime >= since_s


def relay(
    what: str,
    read: Read,
    write: Callable[[bytes], object],
    clock: Callable[[], float],
    progress: Callable[[], str] = str,
) -> None:
    """Pass on what is read; fill silences, with what `progress` says."""
    began, at_line_start = clock(), True
    while (data := read(SILENCE_S)) != b"":
        if data is None:
            start = b"" if at_line_start else b"\n"
            data = start + f"  ... {what}: {clock() - began:.0f} s so far{progress()}\n".encode()
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
        since_s = time.time()
        relay(what, read, write, time.monotonic, lambda: compiled(Path("build"), since_s))
        code = process.wait()
    except KeyboardInterrupt:  # the command was told as well: let it end
        process.wait()
        return 130
    print(f"{what}: {'done' if code == 0 else 'FAILED'} after {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
