"""The first signal is noted, and what was there before comes back afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from offloadtrain.train.signals import StopRequests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_only_noted(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopRequests() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == signal.Signals(number).name
    assert signal.getsignal(number) is before
    assert "stopping after this step" in capfd.readouterr().err


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopRequests() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
