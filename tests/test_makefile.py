"""What the targets install, by what make would do."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAMPS = (".created", ".torch", ".runtime", ".installed")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the Makefile looks at, older than every stamp that a test makes."""
    folder = tmp_path / "a clone"
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
        os.utime(folder / name, (1e9, 1e9))
    shutil.copytree(ROOT / "native", folder / "native", ignore=shutil.ignore_patterns("sanitize"))
    for path in (folder / "native").iterdir():
        os.utime(path, (1e9, 1e9))
    (folder / ".venv" / "bin").mkdir(parents=True)
    return folder


def would(clone: Path, target: str, stamps: Sequence[str], *variables: str) -> str:
    """What make would run where these phases of the installation are done."""
    for number, stamp in enumerate(stamps):
        (clone / ".venv" / stamp).touch()
        os.utime(clone / ".venv" / stamp, (1.1e9 + number, 1.1e9 + number))
    command = ["make", "--no-print-directory", "-n", target, *variables]
    return subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True).stdout


def test_the_demo_installs_what_it_needs_and_no_tools(clone: Path) -> None:
    planned = would(clone, "demo", ())
    assert "install  -c constraints.txt torch" in planned and "-e ." in planned
    installs = "\n".join(line for line in planned.splitlines() if " install " in line)
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for tool in ("dev", *(name.split(">=")[0] for name in tools["dev"])):
        assert tool not in installs.replace("dev/null", ""), tool


def test_a_second_demo_installs_nothing(clone: Path) -> None:
    planned = would(clone, "demo", STAMPS[:3])
    assert planned.splitlines() == [
        "trap : INT; .venv/bin/offloadtrain train demo || [ $? -eq 75 ]"
    ]


@pytest.mark.parametrize("target", ["test", "test-rest", "test-all", "test-long", "lint"])
def test_tools_are_installed_for_those_who_use_them(clone: Path, target: str) -> None:
    planned = would(clone, target, STAMPS[:3])
    assert "-r .venv/dev.txt" in planned and "-e ." not in planned, "the package is not built again"
    assert "pip" not in would(clone, target, STAMPS)


@pytest.mark.parametrize(
    ("target", "levels"),
    [
        ("test", ["quick"]),
        ("test-rest", ["rest"]),
        ("test-all", ["quick", "rest"]),
        ("test-long", ["full"]),
    ],
)
def test_levels_of_the_tests(clone: Path, target: str, levels: list[str]) -> None:
    """In two processes; pytest's further arguments reach each of them."""
    planned = would(clone, target, STAMPS, "TEST_ARGS=--seed 5")
    assert planned.splitlines() == [
        "PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n 2 --dist worksteal "
        f"--level {level} --seed 5"
        for level in levels
    ]


def test_every_phase_says_what_it_does_and_is_watched(clone: Path) -> None:
    """And how much is downloaded where it is much."""
    planned = would(clone, "test", ()).splitlines()
    said = [line for line in planned if line.startswith('echo "')]
    assert [line[6:8] for line in said if line[6] != " "] == ["1.", "2.", "3.", "4."]
    installs = [line for line in planned if " install " in line or " venv " in line]
    assert len(installs) == 4 and all("tools/watch.py" in line for line in installs)
    assert "192 MB" in "".join(planned) and "--quiet" not in "".join(planned)


@pytest.mark.parametrize(("code", "of_make"), [(0, 0), (75, 0), (1, 2), (4, 2)])
def test_a_demo_that_was_stopped_is_no_error(clone: Path, code: int, of_make: int) -> None:
    would(clone, "demo", STAMPS[:3])
    program = clone / ".venv" / "bin" / "offloadtrain"
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    done = subprocess.run(["make", "demo"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == of_make
    assert ("Error" in done.stderr) is (of_make != 0)
