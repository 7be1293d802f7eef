"""One frame without a terminal: of logs that are read to their end, however long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from offloadtrain_tui import frame

from offloadtrain.cli.main import main
from tests.tui.conftest import GENERATED_STEPS, GPUS


class Slow:
    """An app that settles at its `looks`th look, while a byte is read between any two of them."""

    def __init__(self, looks: float, *, reads: bool) -> None:
        self.looks, self.reads, self.looked, self.drawn = looks, reads, 0, 0

    @property
    def is_settled(self) -> bool:
        self.looked += 1
        return self.looked >= self.looks

    @property
    def reader(self) -> Any:
        return SimpleNamespace(read_bytes=self.looked if self.reads else 7)

    def settle(self) -> None:
        self.drawn += 1


async def _pause() -> None:
    pass


@pytest.mark.parametrize("reads", [True, False])
def test_a_log_that_is_being_read_is_waited_for(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app that reads nothing and never settles is drawn after ten looks."""
    monkeypatch.setattr(frame, "_SETTLE_S", 0.001)
    monkeypatch.setattr(frame, "_MOST_S", 0.0095)
    app: Any = Slow(200 if reads else float("inf"), reads=reads)
    pilot: Any = SimpleNamespace(pause=_pause)
    asyncio.run(frame.settled(app, pilot))
    assert app.drawn == 1
    assert app.looked == 200 if reads else 10 <= app.looked <= 13


@pytest.mark.slow
def test_one_frame_of_a_long_log_shows_the_newest_step_of_every_rank(
    generated: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tui", str(generated("gpus")), "--once", "--screen", "ranks"]) == 0
    shown = capsys.readouterr().out
    assert "reading" not in shown and f"step {GENERATED_STEPS}/{GENERATED_STEPS}" in shown
    rows = [line.split()[:2] for line in shown.splitlines()]
    assert all([str(rank), str(GENERATED_STEPS)] in rows for rank in range(GPUS["gpus"]))
