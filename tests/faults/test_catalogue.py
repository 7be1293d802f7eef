"""The planted faults still apply, and what plants them says so where they do not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import native_build, run
from tests.faults.catalogue import OPERATORS, ROOT, CatalogueError, Fault, load, problems

FAULTS = load()
LEAST = 150
"""Faults that the tests find. Merging or removing tests must not lower their number."""


def test_every_fault_applies_exactly_once_and_compiles() -> None:
    assert problems(FAULTS) == []


def test_there_are_enough_faults_of_many_kinds() -> None:
    assert len(FAULTS) >= LEAST
    usual = {"drop a wait", "swap a slot", "off by one", "wrong dtype", "missing clip"}
    usual |= {"skipped flush", "wrong owner", "swallowed error"}
    assert usual <= {fault.operator for fault in FAULTS} <= set(OPERATORS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "no such text"}, "occurs 0 times"),
        ({"old": "return", "new": "yield"}, "occurs"),
        ({"new": "def ("}, "invalid syntax"),
        ({"new": None}, "it changes nothing"),
        ({"operator": "gremlin"}, "unknown operator"),
        ({"tests": ("tests/no_such_file.py",)}, "there is no test"),
        ({"tests": ("tests/faults/test_catalogue.py::test_that_was_removed",)}, "there is no test"),
        ({"tests": ()}, "no test is named"),
    ],
)
def test_a_fault_that_is_not_valid_is_reported(change: dict[str, object], problem: str) -> None:
    fault = next(fault for fault in FAULTS if fault.file.endswith(".py"))
    if "new" in change and change["new"] is None:
        change = {"new": fault.old}
    found = problems([replace(fault, **change)])  # type: ignore[arg-type]
    assert len(found) == 1 and problem in found[0]


def test_names_are_unique() -> None:
    assert "the name is used twice" in problems([FAULTS[0], FAULTS[0]])[0]


def test_a_native_fault_is_a_choice_and_leaves_all_else_as_it_is() -> None:
    fault = Fault("f", "off by one", "native/x.h", "i + 1", "i", "…", ("t",))
    statement = replace(fault, name="s", old="stop();", new="go();", switch="statement")
    source = native_build.with_switches("a(i + 1); stop();", [(2, statement), (1, fault)])
    assert source == (
        '#include "planted_fault.h"\n'
        "a((planted_fault(1) ? (i) : (i + 1))); "
        "if (planted_fault(2)) { go(); } else { stop(); }"
    )
    with pytest.raises(CatalogueError, match="overlaps"):
        native_build.with_switches("a(i + 1);", [(1, fault), (2, replace(fault, old="a(i"))])


def test_native_faults_do_not_overlap(tmp_path: Path) -> None:
    native = [(number, fault) for number, fault in enumerate(FAULTS, 1) if fault.is_native]
    for file in {fault.file for _, fault in native}:
        here = [(number, fault) for number, fault in native if fault.file == file]
        text = native_build.with_switches((ROOT / file).read_text(), here)
        assert all(f"planted_fault({number})" in text for number, _ in here)


@pytest.fixture
def small_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one function with a strong and a weak test, and the modules that run them."""
    files = {
        "package.py": "def add(a, b):\n    return a + b\n",
        "tests/__init__.py": "",
        "tests/conftest.py": (
            "def pytest_addoption(parser):\n"
            "    parser.addoption('--level')\n"
            "    parser.addoption('--seed')\n"
        ),
        "tests/test_package.py": (
            "import package\n"
            "def test_strong(): assert package.add(1, 2) == 3\n"
            "def test_weak(): assert package.add(2, 2)\n"
            "def test_crash(): assert package.add(1, 1) == 2\n"
        ),
        "tests/faults/__init__.py": "",
        "tests/faults/worker.py": (ROOT / "tests/faults/worker.py").read_text(),
    }
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "root", check=True)
    monkeypatch.setattr(run, "ROOT", tmp_path / "root")
    return tmp_path


@pytest.mark.slow
def test_a_fault_is_found_survives_or_breaks_the_import(small_repository: Path) -> None:
    test = "tests/test_package.py::test_"
    base = Fault("f", "swap an operand", "package.py", "a + b", "a - b", "…", (test + "strong",))
    worker = run.Worker(small_repository, run.source_files(), None, ["pytest"])
    source = small_repository / "tree" / "package.py"
    before = source.read_text(), source.stat().st_mtime_ns
    try:
        assert worker.control((test + "strong", test + "weak")) == ""
        crash = "__import__('os').abort()"
        cases = [
            (base, run.FOUND, test + "strong"),
            (replace(base, new="a * b", tests=(test + "weak",)), run.SURVIVED, ""),
            (replace(base, new=crash, tests=(test + "crash",)), run.FOUND, ""),
            (replace(base, old="def add", new="def sub", tests=(test + "weak",)), run.FOUND, None),
            (replace(base, old="def add", new="import no_such_module\ndef add"), run.ERROR, None),
            # The same again: nothing of an earlier fault is left in the copy or in a cache.
            (replace(base, new="b + a"), run.SURVIVED, ""),
        ]
        for fault, outcome, by in cases:
            result = worker.plant(fault, 0, None)
            assert result.outcome == outcome, result
            assert by is None or result.by == by
            assert (source.read_text(), source.stat().st_mtime_ns) == before
        assert "test_missing" in worker.control((test + "missing",))
    finally:
        worker.close()


def test_a_test_that_hangs_does_not_count(
    small_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LIMIT_S", 0.0)
    test = "tests/test_package.py::test_strong"
    hang = Fault("f", "off by one", "package.py", "a + b", "add(a, b)", "…", (test,))
    worker = run.Worker(small_repository, run.source_files(), None, ["pytest"])
    try:
        assert worker.plant(hang, 0, None).outcome == run.TIMED_OUT
    finally:
        worker.close()


def test_a_pattern_selects_by_name() -> None:
    names = [fault.name for fault in run.select(FAULTS, ["native-*norm"])]
    assert names and all(name.startswith("native-") and "norm" in name for name in names)
    assert run.select(FAULTS, []) == FAULTS


def test_no_fault_of_that_name_is_an_error() -> None:
    command = [sys.executable, "-m", "tests.faults.run", "no-such-fault"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no fault has a name like no-such-fault" in done.stdout
