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
from tests.tui.test_app import text, watching


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


def look_until_settled(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for longer than ten looks."""
    monkeypatch.setattr(frame, "_SETTLE_S", 0.001)
    monkeypatch.setattr(frame, "_MOST_S", 0.0095)
    pilot: Any = SimpleNamespace(pause=_pause)
    asyncio.run(frame.settled(app, pilot))
    assert app.drawn == 1


def test_a_log_that_is_being_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow(200, reads=True)
    look_until_settled(app, monkeypatch)
    assert app.looked == 200


def test_what_never_settles_is_drawn_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow(float("inf"), reads=False)
    look_until_settled(app, monkeypatch)
    assert 10 <= app.looked <= 13


def steps_of_ranks(shown: str) -> dict[str, str]:
    """Rank → its newest step, by the rows of the table of ranks."""
    rows = [line.split() for line in shown.partition(" rank  step")[2].splitlines()[1:]]
    return {row[0]: row[1] for row in rows[: GPUS["gpus"]]}


NEWEST = {str(rank): str(GENERATED_STEPS) for rank in range(GPUS["gpus"])}


@pytest.mark.slow
def test_one_frame_of_a_long_log_shows_the_newest_step_of_every_rank(
    generated: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tui", str(generated("gpus")), "--once", "--screen", "ranks"]) == 0
    shown = capsys.readouterr().out
    assert "reading" not in shown and f"step {GENERATED_STEPS}/{GENERATED_STEPS}" in shown
    assert steps_of_ranks(shown) == NEWEST


@pytest.mark.slow
def test_the_app_that_has_caught_up_shows_the_newest_step_of_every_rank(
    generated: Callable[[str], Path],
) -> None:
    """Caught up by its own notion: `Snapshot.is_complete`."""

    async def test() -> None:
        async with watching(generated("gpus"), size="120x40") as (app, press):
            assert app.shown.snapshot.is_complete
            await press("6")
            shown = text(app)
            assert "reading" not in shown and steps_of_ranks(shown) == NEWEST
            steps = app.shown.view.history.steps.values
            assert steps == list(range(1, GENERATED_STEPS + 1))

    asyncio.run(test())
