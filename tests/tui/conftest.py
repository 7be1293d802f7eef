"""Every screen of the runs that several tests look at, drawn once."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from offloadtrain_tui.app import PANELS, with_keys

from benchmarks.generated_runs import generate
from tests.tui.recordings import Timed, plain, ranks, unlucky, write

GPUS = {"gpu": 1, "gpus": 4}
"""Recordings that are generated runs of the 13B job, and their ranks."""

GENERATED_STEPS = 2000
Screens = dict[str, str]
"""What each screen shows, by its name."""

THEMES = ("textual-dark", "textual-light")


@pytest.fixture(scope="session")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Screens]:
    """Return a function of a recording, a size and a theme; times are in UTC, paths are cut short.

    Of a generated run all that is drawn also stands out from what is behind it.
    """
    from tests.tui.test_app import text, watching
    from tests.tui.test_colors import unreadable

    @cache
    def generated(recording: str) -> Path:
        base = tmp_path_factory.mktemp("generated")
        return generate(base / "run", ranks=GPUS[recording], steps=GENERATED_STEPS)

    @cache
    def both(recording: str, size: str) -> dict[str, Screens]:
        logs: dict[str, list[list[Timed]]] = {
            "plain": [plain()],
            "unlucky": [unlucky()],
            "ranks": ranks(),
            "nothing": [[]],
        }
        base = tmp_path_factory.mktemp("screens")
        folder = base / "runs/20261121-080000-demo"
        if recording in GPUS:
            shutil.copytree(generated(recording), folder)
        else:
            write(folder, *logs[recording])

        async def one_by_one() -> dict[str, Screens]:
            found: dict[str, Screens] = {}
            async with watching(folder, size=size) as (app, press):
                for theme in THEMES if recording in GPUS else THEMES[:1]:
                    app.theme = theme
                    await press()  # its colors are computed
                    shown = found[theme] = {}
                    for key, name in with_keys(PANELS):
                        await press(key) if key else app.action_panel(name)
                        shown[name] = text(app).replace(str(base), "…")
                        assert recording not in GPUS or not list(unreadable(app)), (theme, name)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "UTC")
            time.tzset()
            patch.chdir(base)
            found = asyncio.run(one_by_one())
        time.tzset()
        return found

    def look(recording: str, size: str, theme: str = THEMES[0]) -> Screens:
        return both(recording, size)[theme]

    return look
