"""Every screen of the recorded runs, drawn once."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.keys import PANELS, with_keys
from rich.color import Color
from rich.segment import Segment

from benchmarks.generated_runs import generate
from tests.tui.recordings import Timed, divided, plain, ranks, unlucky, write

RECORDINGS: dict[str, Callable[[], list[list[Timed]]]] = {
    "plain": lambda: [plain()],
    "unlucky": lambda: [unlucky()],
    "ranks": ranks,
    "divided": divided,
    "nothing": lambda: [[]],
}
GPUS = {"gpu": 1, "gpus": 4}
"""Recordings that are generated runs of the 13B job, and their ranks."""

GENERATED_STEPS = 2000
Screens = dict[str, str]
"""What each screen shows, by its name."""

THEMES = ("textual-dark", "textual-light", "color-blind-safe")

LEAST = 2.5
"""Contrast as WCAG 2 defines it, 1 (of the same color) to 21; of dim text too."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def luminance(color: Color) -> float:
    parts = (part / 255 for part in color.get_truecolor())
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(color: Color, other: Color) -> float:
    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def unreadable(app: Monitor) -> Iterator[Segment]:
    """Yield what is drawn in nearly the color behind it, or in colors that are not known."""
    for strip in app.screen._compositor.render_strips():
        for segment in strip:
            style = segment.style
            if segment.control or not any(map(str.isalnum, segment.text)):
                continue  # spaces, and the borders of fields
            if style is None or style.color is None or style.bgcolor is None:
                yield segment
            elif contrast(style.color, style.bgcolor) < LEAST:
                yield segment


def themes(recording: str, size: str) -> tuple[str, ...]:
    """Themes in which a recording is drawn. Colors do not depend on the size: one has all."""
    in_all = recording == "unlucky" or (recording in GPUS and size == "200x60")
    return THEMES if in_all else THEMES[:1]


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

    All text stands out from its background.
    """
    from tests.tui.test_app import text, watching

    @cache
    def both(recording: str, size: str) -> dict[str, Screens]:
        if recording in GPUS:
            folder = generated(recording)
        else:
            folder = tmp_path_factory.mktemp("screens") / "runs/20261121-080000-demo"
            write(folder, *RECORDINGS[recording]())
        base = folder.parent.parent

        async def one_by_one() -> dict[str, Screens]:
            by_theme: dict[str, Screens] = {}
            async with watching(folder, size=size) as (app, press):
                for theme in themes(recording, size):
                    app.theme = theme
                    await press()  # its colors are computed
                    shown = by_theme[theme] = {}
                    for key, name in with_keys(PANELS):
                        await press(key) if key else app.action_panel(name)
                        shown[name] = text(app).replace(str(base), "…")
                        assert not list(unreadable(app)), (theme, name)
            return by_theme

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "UTC")
            time.tzset()
            patch.chdir(base)
            drawn = asyncio.run(one_by_one())
        time.tzset()
        return drawn

    def look(recording: str, size: str, theme: str = THEMES[0]) -> Screens:
        return both(recording, size)[theme]

    return look
