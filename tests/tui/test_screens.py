"""Every screen, line by line.

After an intended change: `UPDATE_SCREENS=1 pytest --level full tests/tui/test_screens.py`, and
look at the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from offloadtrain_tui.display import PANELS

from tests.tui.conftest import GPUS, THEMES, Screens

SCREENS = Path(__file__).parent / "screens"
CASES = [
    *((name, "medium", "plain") for name in PANELS),
    ("ranks", "medium", "ranks"),
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


@pytest.mark.parametrize(("screen", "size", "recording"), CASES)
def test_a_screen_equals_its_golden_file(
    screens: Callable[..., Screens], screen: str, size: str, recording: str
) -> None:
    """Also on a light terminal, of a generated run."""
    golden = SCREENS / f"{screen}-{size}-{recording}.txt"
    for theme in THEMES if recording in GPUS else THEMES[:1]:
        lines = screens(recording, size, theme)[screen].splitlines()
        shown = "\n".join(line.rstrip() for line in lines) + "\n"
        if os.environ.get("UPDATE_SCREENS"):
            SCREENS.mkdir(exist_ok=True)
            golden.write_text(shown)
        assert shown == golden.read_text()


@pytest.mark.slow
def test_an_alert_is_on_every_screen(screens: Callable[..., Screens]) -> None:
    for shown in screens("unlucky", "medium").values():
        assert "skips: 2 steps in a row" in shown
