"""What a signal means before the first step and after it, and what was there comes back."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from offloadtrain.train import signals
from offloadtrain.train.signals import REPEAT_S, StoppedEarlyError, StopRequests

STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """SIGHUP is heard, whatever has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_only_noted(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank leaves the second one to its launcher."""
    for number in STOPS:
        before = signal.getsignal(number)
        with StopRequests() as stop:
            stop.defer()
            assert stop.requested is None
            signal.raise_signal(number)
            assert stop.requested == signal.Signals(number).name
        assert signal.getsignal(number) is before
        assert "repeat: end at once" in capfd.readouterr().err
    with StopRequests(aborts=False, quiet=True) as stop:
        stop.defer()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""


class Clock:
    """The clock of the thread that hears stops; moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self._heard = threading.Semaphore(0)
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=self._read))

    def _read(self) -> float:
        now_s = self.now_s
        self._heard.release()
        return now_s

    def wait_for_a_signal(self) -> None:
        """Wait until that thread has read the clock for one more signal."""
        assert self._heard.acquire(timeout=120)


def test_a_terminal_that_is_gone_does_not_spoil_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP says so, and writing to it fails."""

    def gone(fd: int, text: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", gone)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    clock = Clock(monkeypatch)
    with StopRequests() as stop:
        stop.defer()
        signal.raise_signal(signal.SIGHUP)
        assert stop.requested == "SIGHUP"
        clock.wait_for_a_signal()
        clock.now_s = 0.9 * REPEAT_S
        signal.raise_signal(signal.SIGTERM)  # passed on by who has started this, perhaps
        clock.wait_for_a_signal()
        clock.now_s = REPEAT_S
        signal.raise_signal(signal.SIGTERM)
    assert ended == [1], "once: the second of the three is the first again"


def test_both_stops_are_heard_while_the_main_thread_waits_in_c() -> None:
    """No handler runs there."""
    code = """
import ctypes
from offloadtrain.train.signals import StopRequests
lock = ctypes.CDLL(None).pthread_mutex_lock
mutex = ctypes.create_string_buffer(64)
with StopRequests() as stop:
    stop.defer()
    lock(mutex)
    print("waits", flush=True)
    lock(mutex)  # by itself, for ever
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    try:
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "stopping after this step" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(REPEAT_S)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1 and "ended at once" in err


def test_a_signal_before_the_first_step_ends_building() -> None:
    for number in STOPS:
        with StopRequests() as stop, pytest.raises(StoppedEarlyError, match="SIG"):
            signal.raise_signal(number)
        assert stop.requested == signal.Signals(number).name


def test_a_stop_that_a_finalizer_has_swallowed_is_not_lost() -> None:
    with StopRequests() as stop:
        with suppress(StoppedEarlyError):  # as Python does around __del__
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedEarlyError, match="SIGTERM"):
            stop.defer()


def test_a_stop_in_the_midst_of_an_import_ends_building_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a module would be left, which whoever imports it next would find."""
    code = (
        "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.2); whole = 1"
    )
    (tmp_path / "stopped_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoppedEarlyError, match="SIGTERM"), StopRequests():
        importlib.import_module("stopped_module")
        time.sleep(60)  # is woken
    assert sys.modules.pop("stopped_module").whole == 1


def test_nohup_is_respected_and_a_forked_child_is_another_process() -> None:
    """A data loader ends its workers by SIGTERM."""
    code = """
import os, signal
from offloadtrain.train.signals import StopRequests
with StopRequests() as stop:
    signal.raise_signal(signal.SIGHUP)
    stop.defer()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(stop.requested)
"""
    command = ["nohup", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "None\n"
