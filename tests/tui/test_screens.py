"""Every screen as it looks, line by line.

After a change that is meant: `UPDATE_SCREENS=1 pytest tests/tui/test_screens.py`, and look at the
difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from offloadtrain_tui.app import PANELS

from tests.tui.conftest import Screens

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
                for screen in ("overview", "memory", "timeline")
                for size in ("small", "medium", "wide")
                for recording in ("gpu", "gpus")
            ),
        )
    ),
]


@pytest.mark.parametrize(("screen", "size", "recording"), CASES)
def test_a_screen_looks_as_it_did(
    screens: Callable[[str, str], Screens], screen: str, size: str, recording: str
) -> None:
    lines = screens(recording, size)[screen].splitlines()
    shown = "\n".join(line.rstrip() for line in lines) + "\n"
    known = SCREENS / f"{screen}-{size}-{recording}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        known.write_text(shown)
    assert shown == known.read_text()
