"""`ot.watch(run)`: a picture in a notebook, refreshed in place, with and without IPython."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import offloadtrain as ot
from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, append, plain, write
from tests.tui.test_runs import trainer

pytestmark = pytest.mark.slow


def words(picture: str) -> str:
    return " ".join("".join(ElementTree.fromstring(picture).itertext()).split())


def test_without_ipython_it_is_a_picture(tmp_path: Path) -> None:
    watch = ot.watch(write(tmp_path / "run", plain()))
    assert "step 100/100" in words(watch._repr_html_())
    assert repr(watch).startswith("run: done  step 100/100")
    memory = ot.watch(tmp_path, screen="memory", size=(80, 24))
    assert "Adam m" in words(memory.svg())
    process = memory._process
    assert process is not None
    append(tmp_path / "run", (BEGIN_S + 300, recordings.step(101, random.Random(0))))
    deadline = time.monotonic() + 120
    while "step 101" not in words(memory.svg()):
        assert time.monotonic() < deadline
    assert memory._process is process and process.poll() is None, "one process draws all"
    memory.stop()
    assert process.poll() == 0 and memory._process is None
    assert "Adam m" in words(memory.svg()), "it begins again"
    memory.stop()
    watch.stop()


def test_a_run_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not there: give a run folder"):
        ot.watch(tmp_path / "none")
    with pytest.raises(ValueError, match="choose one of overview, memory"):
        ot.watch(tmp_path, screen="none")
    code = (
        "import offloadtrain, sys; sys.exit(any('tui' in m or 'IPython' in m for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "not imported before"


class Display:
    """IPython's display: the pictures that it was asked to show."""

    def __init__(self) -> None:
        self.pictures: list[str] = []
        self.changed = threading.Condition()

    def display(self, html: str, *, display_id: bool) -> Display:
        assert display_id
        self.update(html)
        return self

    def update(self, html: str) -> None:
        with self.changed:
            self.pictures.append(html)
            self.changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in words(self.pictures[-1]), 120), text


def test_a_watch_is_refreshed_in_place_until_the_run_ends_or_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Display()
    module = types.ModuleType("IPython.display")
    module.HTML, module.display = str, shown.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    # Of long steps: it is not slow while the monitor starts on a busy machine.
    step = recordings.step(20, random.Random(0), scale=600.0)
    folder = write(tmp_path / "run", [(BEGIN_S, recordings.start(steps=20)), (time.time(), step)])
    with trainer(folder):
        stopped, watch = (ot.watch(folder, every_s=0.1) for _ in range(2))
        stopped._ipython_display_()
        stopped.stop()
        count = len(shown.pictures)
        time.sleep(0.5)
        assert len(shown.pictures) == count
        watch._ipython_display_()
        shown.wait_for("running")
        append(folder, (time.time(), schema.RunEnded(status="done", step=20)))
        shown.wait_for("✔ done")
        assert watch._thread is not None
        watch._thread.join(120)
        assert not watch._thread.is_alive(), "nothing more to follow"
        watch.stop()
