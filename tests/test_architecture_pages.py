"""The notes that pages name are in the code, and every wait says why it is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("offloadtrain", "tui", "native", "tests", "benchmarks", "tools", "examples", "docs")
NOTE = re.compile(r"\[Note:\s+([^\]]+)\]")


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


def test_notes_that_pages_name_are_there() -> None:
    for page in PAGES:
        text = flat(page.read_text())
        assert [note for note in NOTE.findall(text) if note not in notes()] == [], page.name
        for note, file in re.findall(r"\[Note: ([^\]]+)\] in `([\w/.]+)`", text):
            assert any(path.endswith(file) for path in notes()[note]), (note, file)


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
