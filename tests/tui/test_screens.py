"""Every screen, line by line; and screens after keys were pressed.

After an intended change: `UPDATE_SCREENS=1 pytest --level full tests/tui/test_screens.py`, and
look at the difference.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from offloadtrain_tui.keys import PANELS

from tests.tui.conftest import RECORDINGS, Screens, themes
from tests.tui.recordings import write
from tests.tui.test_app import text, watching

SCREENS = Path(__file__).parent / "screens"
CASES = [
    *((name, "medium", "plain") for name in PANELS),
    ("ranks", "medium", "ranks"),
    ("ranks", "medium", "divided"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("overview", "wide", "plain"),
            ("overview", "small", "plain"),
            ("memory", "small", "plain"),
            ("transfers", "small", "plain"),
            ("overview", "small", "nothing"),
            ("overview", "medium", "unlucky"),
            ("events", "medium", "unlucky"),
            *(
                (screen, size, recording)
                for screen in PANELS
                for size in ("80x24", "120x40", "200x60")
                for recording in ("gpu", "gpus")
            ),
        )
    ),
]


KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "steps-back": ("plain", ("left_square_bracket",) * 3),
    "step-forward": ("plain", (*("left_square_bracket",) * 3, "right_square_bracket")),
    "checkpoint-before": ("plain", ("left_curly_bracket", "left_curly_bracket")),
    "timeline-of-the-past": ("plain", ("left_curly_bracket", "left_curly_bracket", "4")),
    "live-again": ("plain", ("2", "left_square_bracket", "end")),
    "go-to-a-step": ("plain", ("g", "3", "0", "enter")),
    "stopped-at-the-newest": ("plain", ("space",)),
    "charts-zoomed": ("plain", ("5", "plus", "plus", "minus")),
    "charts-logarithmic-without-mean": ("plain", ("5", "m", "m", "m", "y")),
    "timeline-zoomed": ("plain", ("4", "up", "up", "up", "right")),
    "timeline-zoomed-out": ("plain", ("4", "up", "up", "down", "down", "down")),
    "events-filtered": ("unlucky", ("7", "slash", *"skipped")),
    "event-opened": ("unlucky", ("7", "slash", *"skipped", "enter", "enter")),
    "event-gone-to": ("unlucky", ("7", "slash", *"skipped", "enter", "enter", "escape", "j")),
    "owners-of-rank-1": ("divided", ("2", "v")),
    "help": ("plain", ("question_mark",)),
    "help-closed": ("plain", ("question_mark", "question_mark")),
}
"""Recordings, and keys that are pressed."""


def compare(name: str, screen: str) -> None:
    golden = SCREENS / f"{name}.txt"
    shown = "\n".join(line.rstrip() for line in screen.splitlines()) + "\n"
    if os.environ.get("UPDATE_SCREENS"):
        golden.write_text(shown)
    assert shown == golden.read_text()


@pytest.mark.parametrize(("screen", "size", "recording"), CASES)
def test_a_screen_equals_its_golden_file(
    screens: Callable[..., Screens], screen: str, size: str, recording: str
) -> None:
    """In every theme of the recording."""
    for theme in themes(recording):
        compare(f"{screen}-{size}-{recording}", screens(recording, size, theme)[screen])


@pytest.mark.parametrize("name", KEYS)
def test_keys_lead_to_their_golden_screen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, keys = KEYS[name]
    folder = write(tmp_path / "runs/20261121-080000-demo", *RECORDINGS[recording]())
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    async def test() -> str:
        async with watching(folder) as (app, press):
            for key in keys:
                await press(key)
            return text(app).replace(str(tmp_path), "…")

    screen = asyncio.run(test())
    monkeypatch.undo()
    time.tzset()
    compare(f"keys-{name}", screen)


@pytest.mark.slow
def test_an_alert_is_on_every_screen(screens: Callable[..., Screens]) -> None:
    for shown in screens("unlucky", "medium").values():
        assert "skips: 2 steps in a row" in shown
