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

Screens = dict[str, str]
"""What each screen shows, by its name."""


@pytest.fixture(scope="session")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Screens]:
    """Return a function of a recording and a size; times are in UTC, paths are cut short."""
    from tests.tui.test_app import text, watching

    @cache
    def generated(recording: str) -> Path:
        base = tmp_path_factory.mktemp("generated")
        return generate(base / "run", ranks=GPUS[recording], steps=30)

    @cache
    def look(recording: str, size: str) -> Screens:
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

        async def one_by_one() -> Screens:
            found = {}
            async with watching(folder, size=size) as (app, press):
                for key, name in with_keys(PANELS):
                    await press(key) if key else app.action_panel(name)
                    found[name] = text(app).replace(str(base), "…")
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "UTC")
            time.tzset()
            patch.chdir(base)
            found = asyncio.run(one_by_one())
        time.tzset()
        return found

    return look
