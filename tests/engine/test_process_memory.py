"""What the process has of anonymous memory is what the Ledger says, in every placement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.process_memory import (
    CHANGED,
    FAULTS,
    INPUT_BYTES,
    LAYERS,
    PLACEMENTS,
    SAVED,
    STEPS,
)

ROOT = Path(__file__).parents[2]
CONSTANT = 2 * INPUT_BYTES
"""Of six layers: a second copy of their inputs, or of their weights, is larger."""
WEIGHTS = LAYERS * INPUT_BYTES
IN_FLIGHT = 8 * INPUT_BYTES
"""The saved tensors that the device keeps until the next forward saves its first."""
SETTING = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """What a process of its own prints."""
    command = [sys.executable, "-m", "tests.engine.process_memory"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | SETTING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def faults(run: dict[str, Any]) -> list[str]:
    allowed = CONSTANT
    if PLACEMENTS[run["placement"]].items() >= SAVED.items():
        allowed += IN_FLIGHT
    beyond = max(a - b for a, b in zip(run["anonymous"], run["in_ledger"], strict=True))
    result = [f"{beyond} bytes are not in the Ledger"] if beyond > allowed else []
    if run["closing"] > CONSTANT:
        result.append(f"close() takes {run['closing']} bytes more")
    if run["left"] > WEIGHTS + allowed:
        result.append(f"after close() {run['left']} bytes are left")
    return result + (["the Ledger grows"] if len(set(run["in_ledger"])) > 1 else [])


@pytest.mark.slow
def test_the_process_has_what_the_ledger_says(lines: list[dict[str, Any]]) -> None:
    runs = [run for run in lines if run["part"] == "placements"]
    assert [run["placement"] for run in runs] == list(PLACEMENTS)
    assert all(len(run["anonymous"]) == STEPS for run in runs)
    assert {run["placement"]: faults(run) for run in runs} == {name: [] for name in PLACEMENTS}


@pytest.mark.slow
def test_memory_follows_what_is_trained(lines: list[dict[str, Any]]) -> None:
    """However often that changes: nothing of an earlier layout is left, and no state is there twice
    meanwhile. Of half of the layers the state of frozen ones waits; on the device and the disk it
    is another tier's."""
    runs = {run["placement"]: run for run in lines if run["part"] == "changes"}
    assert list(runs) == list(CHANGED)
    for name, run in runs.items():
        beyond = [a - b for a, b in zip(run["anonymous"], run["in_ledger"], strict=True)]
        # Of layers that stay on the device frozen weights are memory of their own.
        assert max(beyond) < CONSTANT + WEIGHTS / 2, name
        assert max(beyond[-2:]) - max(beyond[:2]) < INPUT_BYTES, name
        assert len(set(run["in_ledger"])) == 2, name
        whole = max(run["in_ledger"])
        assert name == "disk" or max(run["growing"]) < 0.7 * whole, name


@pytest.mark.slow
def test_planted_faults_are_seen(lines: list[dict[str, Any]]) -> None:
    reuse, copies = (faults(run) for run in lines if run["part"] in FAULTS)
    assert any("grows" in line for line in reuse)
    assert any("not in the Ledger" in line for line in copies)
