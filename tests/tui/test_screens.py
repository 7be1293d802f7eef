"""Every screen as it looks, line by line.

After a change that is meant: `UPDATE_SCREENS=1 pytest tests/tui/test_screens.py`, and look at the
difference.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from offloadtrain_tui.app import PANELS

from tests.tui.recordings import plain, ranks, unlucky, write
from tests.tui.test_app import text, watching

SCREENS = Path(__file__).parent / "screens"
CASES = [
    *((name, "medium", "plain") for name in PANELS),
    ("overview", "wide", "plain"),
    ("overview", "small", "plain"),
    ("memory", "small", "plain"),
    ("transfers", "small", "plain"),
    ("overview", "medium", "unlucky"),
    ("events", "medium", "unlucky"),
    ("ranks", "medium", "ranks"),
]


@pytest.mark.parametrize(("screen", "size", "recording"), CASES, ids="-".join)
def test_a_screen_looks_as_it_did(
    screen: str, size: str, recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.chdir(tmp_path)
    logs = {"plain": [plain()], "unlucky": [unlucky()], "ranks": ranks()}[recording]
    folder = write(Path("runs/20261121-080000-demo").absolute(), *logs)

    async def look() -> str:
        async with watching(folder, size=size) as (app, press):
            await press(str(list(PANELS).index(screen) + 1))
            await press()
            return text(app).replace(str(tmp_path), "…")

    shown = "\n".join(line.rstrip() for line in asyncio.run(look()).splitlines()) + "\n"
    known = SCREENS / f"{screen}-{size}-{recording}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        known.write_text(shown)
    assert shown == known.read_text()
