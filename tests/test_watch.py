"""What `make` prints while it installs: everything, and never nothing for long."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tools.watch import SILENCE_S, relay

ROOT = Path(__file__).parent.parent
WATCH = ROOT / "tools" / "watch.py"


def relayed(script: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """What is written when, if the command prints (after so many seconds, this), then ends."""
    now = 0.0
    coming: Iterator[tuple[float, bytes]] = iter(script)
    after, data = next(coming)
    due = after
    written: list[tuple[float, bytes]] = []

    def read(seconds: float) -> bytes | None:
        nonlocal now, due, data
        if due - now > seconds:
            now += seconds
            return None
        now, found = due, data
        after, data = next(coming, (0.0, b""))
        due += after
        return found

    relay("torch", read, lambda text: written.append((now, text)), lambda: now)
    return written


def test_a_silent_command_is_told_about_every_few_seconds() -> None:
    written = relayed([(100.0, b"at last\n")])
    times = [0.0, *(time for time, _ in written)]
    assert SILENCE_S < 10
    assert all(later - earlier < 10 for earlier, later in itertools.pairwise(times))
    assert written[0][1] == b"  ... torch: 8 s so far\n" and written[-1][1] == b"at last\n"


def test_a_command_that_speaks_is_left_alone() -> None:
    said = [(7.0, b"Collecting torch\n")] * 5
    assert [text for _, text in relayed(said)] == [text for _, text in said]


def test_a_line_that_is_begun_is_not_written_into() -> None:
    written = relayed([(1.0, b"Building wheel ... "), (20.0, b"done\n")])
    assert b"".join(text for _, text in written) == (
        b"Building wheel ... \n  ... torch: 9 s so far\n  ... torch: 17 s so far\ndone\n"
    )


@pytest.mark.parametrize("code", [0, 3])
def test_output_and_exit_code_of_a_real_command(code: int) -> None:
    script = f"import sys; print('out'); print('err', file=sys.stderr); sys.exit({code})"
    command = [sys.executable, str(WATCH), "a thing", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert set(done.stdout.splitlines()[:2]) == {"out", "err"}
    assert f"a thing: {'FAILED' if code else 'done'} after" in done.stdout


def test_on_a_terminal_the_command_gets_one() -> None:
    """Then pip draws its bars."""
    import os
    import pty

    ours, theirs = pty.openpty()
    script = "import sys; print(sys.stdout.isatty(), end='')"
    command = [sys.executable, str(WATCH), "a thing", sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=theirs)
    os.close(theirs)
    assert os.read(ours, 4) == b"True"
    while True:
        try:
            if not os.read(ours, 1000):
                break
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert process.wait() == 0
