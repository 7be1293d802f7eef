"""Every screen as it looks, line by line.

After a change that is meant: `UPDATE_SCREENS=1 pytest --level full tests/tui/test_screens.py`, and
look at the difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from offloadtrain_tui.display import PANELS

from tests.tui.conftest import GENERATED_STEPS, GPUS, THEMES, Screens

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
def test_a_screen_looks_as_it_did(
    screens: Callable[..., Screens], screen: str, size: str, recording: str
) -> None:
    """That of a generated run also on a light terminal."""
    known = SCREENS / f"{screen}-{size}-{recording}.txt"
    for theme in THEMES if recording in GPUS else THEMES[:1]:
        lines = screens(recording, size, theme)[screen].splitlines()
        shown = "\n".join(line.rstrip() for line in lines) + "\n"
        if os.environ.get("UPDATE_SCREENS"):
            SCREENS.mkdir(exist_ok=True)
            known.write_text(shown)
        assert shown == known.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("size", ["80x24", "120x40", "200x60"])
def test_a_long_log_of_four_gpus_opened_whole_shows_the_newest_step_of_each(
    screens: Callable[..., Screens], size: str
) -> None:
    shown = screens("gpus", size)
    for screen in PANELS:
        assert f"{GENERATED_STEPS}/{GENERATED_STEPS}" in shown[screen], screen
    rows = [line.split()[:2] for line in shown["ranks"].splitlines()]
    assert all([str(rank), str(GENERATED_STEPS)] in rows for rank in range(GPUS["gpus"]))
