"""docs/troubleshooting.md has every error class, and words that messages have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
SOURCES = [*(ROOT / "offloadtrain").rglob("*.py"), *(ROOT / "tui").rglob("*.py")]
TREES = [ast.parse(path.read_text()) for path in SOURCES]


def error_classes() -> set[str]:
    nodes = (node for tree in TREES for node in ast.walk(tree))
    return {n.name for n in nodes if isinstance(n, ast.ClassDef) and n.name.endswith("Error")}


def texts() -> Iterator[str]:
    """Every string literal; what an f-string puts in is an ellipsis."""
    for tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def messages() -> list[str]:
    first = re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    return [words for cell in first for words in re.findall(r"`([^`]+)`", cell.partition(" (")[0])]


def test_every_error_class_has_an_entry() -> None:
    assert error_classes() - {"OffloadTrainError"} <= set(re.findall(r"\w+Error", PAGE))


def test_no_entry_is_of_a_class_that_is_gone() -> None:
    named = set(re.findall(r"\w+Error", PAGE.partition("## It does")[2]))
    assert named <= error_classes()


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(re.sub(r"\s+", " ", text) for text in texts())


def test_every_message_is_one_that_the_code_has(said: str) -> None:
    assert len(messages()) > 30
    unknown = [words for words in messages() if not re.search(pattern(words), said)]
    assert unknown == []


def pattern(words: str) -> str:
    return r"[^\n]*?".join(re.escape(part) for part in words.split("…"))
