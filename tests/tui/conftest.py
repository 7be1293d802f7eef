"""Every screen of the runs that several tests look at, drawn once."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from offloadtrain_tui.display import PANELS
from offloadtrain_tui.keys import with_keys

from benchmarks.generated_runs import generate
from tests.tui.recordings import Timed, plain, ranks, unlucky, write

GPUS = {"gpu": 1, "gpus": 4}
"""Recordings that are generated runs of the 13B job, and their ranks."""

GENERATED_STEPS = 2000
Screens = dict[str, str]
"""What each screen shows, by its name."""

THEMES = ("textual-dark", "textual-light")


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function of a recording: the folder of its generated run, made once for all workers
    of this session. Nobody writes into it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # that of all workers

    @cache
    def folder(recording: str) -> Path:
        base = shared / f"generated-{recording}"
        base.mkdir(exist_ok=True)
        run = base / "runs/20261121-080000-demo"
        with open(base / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker makes it: wait until it is whole
            if not run.exists():
                run.parent.mkdir()
                made = generate(
                    base / "making" / run.name, ranks=GPUS[recording], steps=GENERATED_STEPS
                )
                made.rename(run)
        return run

    return folder


@pytest.fixture(scope="session")
def screens(
    tmp_path_factory: pytest.TempPathFactory, generated: Callable[[str], Path]
) -> Callable[..., Screens]:
    """Return a function of a recording, a size and a theme; times are in UTC, paths are cut short.

    Of a generated run all that is drawn also stands out from what is behind it.
    """
    from tests.tui.test_app import text, watching
    from tests.tui.test_colors import unreadable

    @cache
    def both(recording: str, size: str) -> dict[str, Screens]:
        logs: dict[str, list[list[Timed]]] = {
            "plain": [plain()],
            "unlucky": [unlucky()],
            "ranks": ranks(),
            "nothing": [[]],
        }
        if recording in GPUS:
            folder = generated(recording)
        else:
            folder = tmp_path_factory.mktemp("screens") / "runs/20261121-080000-demo"
            write(folder, *logs[recording])
        base = folder.parent.parent

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
