"""Every screen, line by line; and screens after keys were pressed.

After an intended change: `UPDATE_SCREENS=1 pytest --level full tests/tui/test_screens.py`, and
look at the difference.
"""

from __future__ import annotations

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


KEYS: list[tuple[str, dict[str, tuple[str, ...]]]] = [
    (
        "plain",
        {"steps-back": ("left_square_bracket",) * 3, "step-forward": ("right_square_bracket",)},
    ),
    (
        "plain",
        {"checkpoint-before": ("left_curly_bracket",) * 2, "timeline-of-the-past": ("4",)},
    ),
    ("plain", {"live-again": ("2", "left_square_bracket", "end")}),
    ("plain", {"go-to-a-step": ("g", "3", "0", "enter")}),
    ("plain", {"stopped-at-the-newest": ("space",)}),
    ("plain", {"charts-zoomed": ("5", "plus", "plus", "minus")}),
    ("plain", {"charts-logarithmic-without-mean": ("5", "m", "m", "m", "y")}),
    ("plain", {"timeline-zoomed": ("4", "up", "up", "up", "right")}),
    ("plain", {"timeline-zoomed-out": ("4", "up", "up", "down", "down", "down")}),
    (
        "unlucky",
        {
            "events-filtered": ("7", "slash", *"skipped"),
            "event-opened": ("enter", "enter"),
            "event-gone-to": ("escape", "j"),
        },
    ),
    ("divided", {"owners-of-rank-1": ("2", "v")}),
    ("plain", {"help": ("question_mark",), "help-closed": ("question_mark",)}),
]
"""Recordings, and the keys that lead from each golden screen to the next."""


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
    for theme in themes(recording, size):
        compare(f"{screen}-{size}-{recording}", screens(recording, size, theme)[screen])


@pytest.mark.parametrize(("recording", "screens_by_keys"), KEYS, ids=["-".join(k) for _, k in KEYS])
async def test_keys_lead_to_their_golden_screen(
    recording: str,
    screens_by_keys: dict[str, tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write(tmp_path / "runs/20261121-080000-demo", *RECORDINGS[recording]())
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    shown: dict[str, str] = {}

    async with watching(folder) as (app, press):
        for name, keys in screens_by_keys.items():
            for key in keys:
                await press(key)
            shown[name] = text(app).replace(str(tmp_path), "…")
    monkeypatch.undo()
    time.tzset()
    for name, screen in shown.items():
        compare(f"keys-{name}", screen)


@pytest.mark.slow
def test_an_alert_is_on_every_screen(screens: Callable[..., Screens]) -> None:
    for shown in screens("unlucky", "medium").values():
        assert "skips: 2 steps in a row" in shown
