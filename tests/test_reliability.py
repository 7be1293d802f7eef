"""Each row of the tables in docs/reliability.md names a command, and what it names exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
LEVELS = ("quick", "rest", "full")


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of each row of the table with this first line."""
    lines = text[text.index(heading) :].splitlines()
    table = lines[2 : next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def commands(text: str) -> list[str]:
    return re.findall(r"`((?:pytest|python -m) [^`]*)`", text)


def missing(command: str) -> list[str]:
    """Return what a command names and what does not exist."""
    words = shlex.split(command)
    if words[0] == "python":
        module, sets = ROOT.joinpath(*words[2].split(".")).with_suffix(".py"), words[3:4]
        if not module.is_file():
            return [words[2]]
        text = module.read_text()
        return [name for name in sets if not re.search(rf"\b{name}\b", text)]
    paths = [word for word in words if word.startswith("tests/")]
    gone = [path for path in paths if not (ROOT / path).exists()]
    texts = [(ROOT / path).read_text() for path in paths if (ROOT / path).is_file()]
    # Names of tests, and the words that may identify their cases.
    names = "\n".join(re.findall(r"def test_\w+|\"[^\"\n]*\"", "\n".join(texts)))
    selected = words[words.index("-k") + 1] if "-k" in words else ""
    unknown = [
        word
        for word in selected.split()
        if word not in ("and", "or", "not") and word.strip("()") not in names
    ]
    level = words[words.index("--level") + 1] if "--level" in words else LEVELS[0]
    return gone + unknown + ([] if paths else [command]) + ([] if level in LEVELS else [level])


def test_every_promise_names_what_shows_it() -> None:
    promises = rows(PAGE, "| promise | command | result |")
    paths = rows(PAGE, "| path | check | command that proves it |")
    assert len(promises) >= 40 and len(paths) > 12
    for cells in promises:
        assert len(cells) == 3 and commands(cells[1]), cells
    for path, check, proof in paths:
        assert commands(proof) or check.startswith("**none**"), path
    absent = {command: missing(command) for command in commands(PAGE)}
    assert {command: names for command, names in absent.items() if names} == {}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("pytest tests/cli/test_gone.py", ["tests/cli/test_gone.py"]),
        ("pytest tests/cli/test_supervisor.py -k nobody_wrote_it", ["nobody_wrote_it"]),
        ("pytest --level most tests/cli/test_supervisor.py", ["most"]),
        ("python -m benchmarks.gone kills", ["benchmarks.gone"]),
        ("python -m benchmarks.storage_faults floods", ["floods"]),
        ("pytest -q", ["pytest -q"]),
    ],
)
def test_what_does_not_exist_is_found(command: str, names: list[str]) -> None:
    assert missing(command) == names


COLLECT = """
import json, pathlib, sys
import pytest
from _pytest.mark import Expression, KeywordMatcher

def number(items, paths, keyword, level):
    from tests import levels  # after pytest has started
    root = pathlib.Path.cwd()
    within = [root / path for path in paths]
    named = [item for item in items if any(item.path.is_relative_to(path) for path in within)]
    selected = levels.selected(named, level, 1)
    wanted = Expression.compile(keyword or "test")
    return sum(wanted.evaluate(KeywordMatcher.from_item(item)) for item in selected)

class Collector:
    def pytest_collection_finish(self, session):
        self.items = session.items

commands, collector = json.load(sys.stdin), Collector()
paths = sorted({path for command in commands for path in command[0]})
options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", "--level", "full"]
code = pytest.main([*options, *paths], plugins=[collector])
numbers = [number(collector.items, *command) for command in commands]
pathlib.Path(sys.argv[1]).write_text(json.dumps(numbers))
sys.exit(code)
"""


def numbers_of_tests(commands: list[str], out: Path) -> list[int]:
    """Return the number of tests that each command of pytest runs. All are collected once."""
    parsed = []
    for words in map(shlex.split, commands):
        keyword = words[words.index("-k") + 1] if "-k" in words else ""
        level = words[words.index("--level") + 1] if "--level" in words else LEVELS[0]
        parsed.append(([word for word in words if word.startswith("tests/")], keyword, level))
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(out)],
        input=json.dumps(parsed),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    numbers: list[int] = json.loads(out.read_text())
    return numbers


@pytest.mark.slow
def test_every_command_of_the_page_runs_a_test(tmp_path: Path) -> None:
    named = [command for command in commands(PAGE) if command.startswith("pytest")]
    # Existing words, in no test of this level; and a slow test, which quick leaves out.
    empty = [
        'pytest tests/test_reliability.py -k "promise and found"',
        "pytest tests/test_reliability.py -k runs_a_test",
    ]
    numbers = numbers_of_tests(named + empty, tmp_path / "numbers.json")
    assert numbers[-2:] == [0, 0]
    assert [c for c, number in zip(named, numbers, strict=False) if not number] == []
