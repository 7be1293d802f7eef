"""The files, notes and names in docs/ are in the code, and every wait says why it is there."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.step.program.operations import Lane

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WALKS = ("A gradient's way", "A job key's way", "An event's way to a pixel")
FOLDERS = ("offloadtrain", "tui", "native", "tests", "benchmarks", "tools", "examples", "docs")
NOTE = re.compile(r"\[Note:\s+([^\]]+)\]")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|h|cpp|md|toml|tcss))`")
OF_A_RUN = {"wandb/run.json"}
"""Files that a run writes."""


def flat(text: str) -> str:
    """On one line, without the marks of comments."""
    return re.sub(r"\s+(?:#|//)?\s*", " ", text)


@cache
def sources() -> dict[str, str]:
    """Path → text."""
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*.*")]
    kept = [path for path in found if path.suffix in (".py", ".h", ".cpp", ".md", ".toml", ".tcss")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in kept}


@cache
def notes() -> dict[str, set[str]]:
    """The heading of each note → the files in which it is named."""
    found: dict[str, set[str]] = {}
    for path, text in sources().items():
        if not path.startswith("docs/"):
            for name in NOTE.findall(text):
                found.setdefault(flat(name), set()).add(path)
    return found


def walk(title: str) -> list[tuple[str, str]]:
    """(file, what is said of it) of each step of a walk."""
    page = (ROOT / "docs/architecture.md").read_text()
    part = page.split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\d+\. \[.*?\]\(\.\./(.+?)\):(.*?)(?=\n\d+\. |\n\n|\Z)", part, re.M | re.S)


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_names_what_is_in_each_file(title: str) -> None:
    steps = walk(title)
    assert len(steps) >= 6
    for file, told in steps:
        names = re.findall(r"`([A-Za-z_][\w.]*)`", told)
        assert names, file
        missing = [n for n in names for one in n.split(".") if not has_word(file, one)]
        assert missing == [], file


def has_word(file: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", sources()[file]) is not None


def test_the_way_of_a_gradient_is_that_of_a_real_one() -> None:
    """The files of the walk, in the order in which a step first calls a function of each."""
    walk_files = [file for file, _ in walk(WALKS[0])]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = ot.offload(model, device="cpu", clip_norm=1.0)
    first_calls: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            first_calls.setdefault(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    for _ in range(2):  # the first step is special
        loss = model(torch.ones(2, 4)).square().mean()
        sys.setprofile(record)
        threading.setprofile(record)
        first_calls.clear()
        optimizer.backward(loss)
        optimizer.step()
        sys.setprofile(None)
        threading.setprofile(None)
    optimizer.close()
    # `Engine.backward` comes before the hook, which is the first of the walk.
    assert [file for file in first_calls if file in walk_files] == walk_files


def test_files_and_notes_that_pages_name_are_there() -> None:
    for page in PAGES:
        text = flat(page.read_text())
        lost = [one for one in FILE.findall(text) if not _is_there(one) and one not in OF_A_RUN]
        assert lost == [], page.name
        assert [note for note in NOTE.findall(text) if note not in notes()] == [], page.name
        for note, file in re.findall(r"\[Note: ([^\]]+)\] in `([\w/.]+)`", text):
            assert any(path.endswith(file) for path in notes()[note]), (note, file)


def test_names_said_to_be_in_a_file_are_in_it() -> None:
    said = re.compile(r"`([A-Za-z_][\w.]*)`(?: in| of|,) `([\w/]+/\w+\.py)`")
    found = [one for page in PAGES for one in said.findall(flat(page.read_text()))]
    assert len(found) >= 5
    for name, file in found:
        there = [path for path in sources() if f"/{path}".endswith(f"/{file}")]
        parts = name.split(".")
        assert any(all(has_word(path, one) for one in parts) for path in there), (name, file)


def _is_there(file: str) -> bool:

    return any(f"/{path}".endswith(f"/{file}") for path in sources())


def test_the_page_names_every_file_that_lists_lanes() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    section = page.split("## Add a lane\n")[1].split("\n## ")[0]
    code = {p: text for p, text in sources().items() if p.startswith(("offloadtrain/", "tui/"))}
    lists = [
        path
        for path, text in code.items()
        if sum(f'"{lane}"' in text or f"Lane.{lane.name}" in text for lane in Lane) >= 8
    ]
    assert len(lists) >= 8
    assert [path for path in lists if path.endswith(".py") and path not in section] == []


def test_what_is_not_there_is_seen() -> None:

    assert not _is_there("engine/nothing.py") and not _is_there("gine/engine.py")
    assert _is_there("engine/engine.py")
    assert "Nothing of this kind" not in notes()
    assert not has_word("offloadtrain/engine/engine.py", "deliv")


WAITS = {"launch", "wait", "host_wait", "record", "needs", "overwrites", "reuse", "alloc"}
OF_LANES = {"wait", "host_wait", "wait_event", "wait_stream", "record", "synchronize", "put"}
COMMENT_ABOVE = 8
"""Lines above a call among which its comment begins."""


def unexplained(source: str, waits: Set[str] = WAITS) -> Iterator[str]:
    """Waits, records and hand-overs of memory without a comment beside them."""
    lines = source.splitlines()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    simple = [node for node in statements if not hasattr(node, "body")]
    for statement in simple:
        calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        named = {func.attr for func in calls if isinstance(func, ast.Attribute)}
        near = lines[max(statement.lineno - 1 - COMMENT_ABOVE, 0) : statement.end_lineno]
        if named & waits and not any("# " in line for line in near):
            yield f"{statement.lineno}: {lines[statement.lineno - 1].strip()}"


FORWARDS = {"interpreter.py"}
"""Passes the program's own waits on to the lanes."""


@pytest.mark.parametrize(
    ("folder", "waits"), [("step", WAITS), ("engine", WAITS), ("runtime", OF_LANES)]
)
def test_every_wait_and_hand_over_says_why(folder: str, waits: Set[str]) -> None:
    files = (ROOT / "offloadtrain" / folder).rglob("*.py")
    found = {path.name: list(unexplained(path.read_text(), waits)) for path in files}
    assert {name: told for name, told in found.items() if told and name not in FORWARDS} == {}


def test_a_wait_without_a_reason_is_seen() -> None:
    lines = ["def f(order):", *["    pass"] * COMMENT_ABOVE, "    order.wait(lane, event)"]
    assert len(list(unexplained("\n".join(lines)))) == 1
    lines[-2] = "    # Uploads wait for it."
    assert list(unexplained("\n".join(lines))) == []
