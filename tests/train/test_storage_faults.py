"""Faults of storage cost at most the save that they meet: a slice of each set.

`python -m benchmarks.storage_faults SET` runs whole sets; so does `--level full` here. Every effect
of a save is one call of the `os` module, so "any point" is every call, one at a time.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.train.storage.saves import Case

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
ROOT = Path(__file__).resolve().parent.parent.parent
SLICES = {"kills": 30, "power": 120, "errors": 30, "damage": 80, "converts": 8}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Processes are forked: no pool of torch's may begin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases_of(name: str, scratch: Path) -> list[Case]:
    cases: list[Case] = importlib.import_module(f"tests.train.storage.{name}").cases(scratch)
    return cases


def run(cases: list[Case], scratch: Path) -> None:
    for case in cases:
        root = scratch / "case"
        root.mkdir()
        try:
            case.run(root)
        except Exception as error:
            error.add_note(case.name)
            raise
        shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    "complete", [False, pytest.param(True, marks=pytest.mark.long)], ids=["a slice", "all"]
)
@pytest.mark.parametrize("name", SLICES)
def test_no_fault_of_storage_loses_a_checkpoint(name: str, complete: bool, tmp_path: Path) -> None:
    cases = cases_of(name, tmp_path)
    run(cases if complete else random.Random(7).sample(cases, SLICES[name]), tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["exports", "tmpfs"])
def test_sets_that_want_a_process_of_their_own(name: str) -> None:
    """One counts all calls of the process; the other mounts file systems."""
    if name == "tmpfs" and os.geteuid() != 0:
        pytest.skip("mounts, as root")
    command = [sys.executable, "-m", "benchmarks.storage_faults", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
