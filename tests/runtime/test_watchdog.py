"""Silence, and who is to blame for it; a process that hangs ends itself."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from offloadtrain.runtime import heartbeat
from offloadtrain.runtime.heartbeat import Heartbeat, Silence, judge, stacks
from offloadtrain.runtime.launcher_link import Pulse


class Time:
    """A clock of its own, a main thread that computes on demand, bytes that move on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.cpu_s = 0.0
        self.io_bytes = 0
        monkeypatch.setattr(heartbeat, "moved_bytes", lambda: self.io_bytes)
        monkeypatch.setattr(Silence, "_cpu", lambda _: self.cpu_s)
        self.beats = Heartbeat()
        self.silence = Silence(self.beats, 5.0, clock=lambda: self.now_s)

    def look(self, after_s: float = 1.0) -> float:
        self.now_s += after_s
        return self.silence.look(most_s=1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_silence_grows_until_something_moves(clock: Time) -> None:
    assert [clock.look() for _ in range(3)] == [1.0, 2.0, 3.0]
    clock.beats.beat()
    assert clock.look() == 0.0
    with clock.beats.collective():
        assert clock.look() == 0.0, "entered"
        assert clock.look() == 1.0, "and waits"
    assert clock.look() == 0.0, "left"


def test_what_counts_as_progress(clock: Time) -> None:
    clock.cpu_s += 1.0
    assert clock.look() == 0.0
    clock.beats.cpu_counts = False
    clock.cpu_s += 1.0
    assert clock.look() == 1.0, "a thread that spins for the device"
    clock.io_bytes += heartbeat.IO_MOVES_BYTES
    assert clock.look() == 0.0
    clock.io_bytes += 1000
    assert clock.look() == 1.0, "what samplers read all the time"
    clock.silence.lanes = lambda: "host: 3 in the queue"
    assert clock.look() == 0.0
    assert clock.look() == 1.0
    with clock.beats.outside():
        assert clock.look() == 0.0


def test_small_moves_add_up(clock: Time) -> None:
    """A slow disk, a busy processor."""
    for _ in range(20):
        clock.io_bytes += heartbeat.IO_MOVES_BYTES // 3
        assert clock.look() <= 3.0


def test_a_watcher_that_was_stopped_too_has_missed_nothing(clock: Time) -> None:
    assert clock.look(after_s=1000.0) == 1.0


def test_the_limit_follows_the_longest_healthy_silence_of_the_phase(clock: Time) -> None:
    clock.beats.enter("saving a checkpoint")
    clock.look()
    for _ in range(30):
        clock.look()
    clock.beats.enter("step 7")
    clock.look()
    assert clock.silence.limit_s == 4 * 30.0, "the silence that this step has ended"
    clock.beats.enter("step 8")
    clock.beats.phase = "validation"
    assert clock.silence.limit_s == 5.0


def pulse(silent_s: float, collectives: int = 5, *, waits: bool = False) -> Pulse:
    return Pulse(phase="step", silent_s=silent_s, limit_s=5.0, collectives=collectives, waits=waits)


def test_nobody_hangs_while_somebody_works() -> None:
    """The others wait, for an hour if it takes as long."""
    assert judge({0: pulse(0.0), 1: pulse(3600.0, waits=True)}) == []
    assert judge({}) == []


def test_who_waits_is_not_to_blame() -> None:
    assert judge({0: pulse(6.0, waits=True), 1: pulse(6.0)}) == [1]
    assert judge({0: pulse(4.9, waits=True), 1: pulse(4.9)}) == []
    assert judge({0: pulse(6.0, 7), 1: pulse(6.0, 6), 2: pulse(6.0, 7)})[0] == 1


def test_if_all_wait_the_one_with_the_fewest_collectives_holds_them_up() -> None:
    ranks = {rank: pulse(6.0, count, waits=True) for rank, count in enumerate((9, 8, 9))}
    assert judge(ranks) == [1]
    assert judge(ranks | {1: replace(ranks[1], silent_s=1.0)}) == []


def test_stacks_name_every_thread() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="somebody", daemon=True)
    thread.start()
    try:
        result = stacks()
    finally:
        over.set()
    assert "thread somebody:" in result and "test_stacks_name_every_thread" in result


_HANGS = """
import sys, threading
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.heartbeat import Watchdog
watchdog = Watchdog(HEARTBEAT, least_limit_s=float(sys.argv[1]), hung_code=70)
with watchdog:
    watchdog.log = lambda report: print("logged:", report.splitlines()[0])
    HEARTBEAT.enter("update of step 3")
    threading.Event().wait(float(sys.argv[2]) or None)
print("ended by itself")
"""


def test_one_process_alone_ends_with_its_own_code_and_says_where() -> None:
    command = [sys.executable, "-c", _HANGS, "1", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 70
    assert re.fullmatch(r"logged: no progress for [1-9]\d* s; phase: update of .*\n", done.stdout)
    first = done.stderr.splitlines()[0]
    assert "s; phase: update of step 3; lanes: " in first and "in wait" in done.stderr


@pytest.mark.slow
def test_zero_is_never() -> None:
    command = [sys.executable, "-c", _HANGS, "0", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ended by itself\n")
