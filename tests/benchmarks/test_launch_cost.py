"""The benchmark of the training thread runs on today's lanes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_case_is_timed() -> None:
    """In a process of its own: it replaces parts of `torch.cuda`."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.launch_cost", "--time", "--layers", "1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    cases = [line.split("  ")[0] for line in done.stdout.splitlines()[1:]]
    assert cases == ["plain", "torch's checkpoint", "device", "streamed", "streamed, recompute"]
