"""What `make` prints while it installs: everything, and never nothing for long."""

from __future__ import annotations

import itertools
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tools.watch import SILENCE_S, relay

WATCH = Path(__file__).parent.parent / "tools" / "watch.py"


def relayed(script: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Return what is written and when, of a command that prints each text after its seconds."""
    now = 0.0
    coming: Iterator[tuple[float, bytes]] = iter(script)
    due, data = next(coming)
    written: list[tuple[float, bytes]] = []

    def read(seconds: float) -> bytes | None:
        nonlocal now, due, data
        if due - now > seconds:
            now += seconds
            return None
        now, text = due, data
        pause_s, data = next(coming, (0.0, b""))
        due += pause_s
        return text

    relay("torch", read, lambda text: written.append((now, text)), lambda: now)
    return written


def test_a_silent_command_is_reported_every_few_seconds_and_between_lines() -> None:
    written = relayed([(100.0, b"at last\n")])
    times = [0.0, *(time for time, _ in written)]
    assert SILENCE_S < 10
    assert all(later - earlier < 10 for earlier, later in itertools.pairwise(times))
    assert written[0][1] == b"  ... torch: 8 s so far\n" and written[-1][1] == b"at last\n"
    busy = [(7.0, b"Collecting torch\n")] * 5
    assert [text for _, text in relayed(busy)] == [text for _, text in busy]
    written = relayed([(1.0, b"Building wheel ... "), (20.0, b"done\n")])
    assert b"".join(text for _, text in written) == (
        b"Building wheel ... \n  ... torch: 9 s so far\n  ... torch: 17 s so far\ndone\n"
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_real_command_keeps_its_output_exit_code_and_terminal(code: int) -> None:
    script = (
        f"import sys; print(sys.stdout.isatty()); print('e', file=sys.stderr); sys.exit({code})"
    )
    command = [sys.executable, str(WATCH), "a thing", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    assert set(done.stdout.splitlines()[:2]) == {"False", "e"}
    assert f"a thing: {'FAILED' if code else 'done'} after" in done.stdout
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdout=slave)
    os.close(slave)
    assert os.read(master, 4) == b"True"
    assert process.wait() == code
    os.close(master)
