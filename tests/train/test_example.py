"""The example in the README's words: it runs as a script, and it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_lines.py"


@pytest.mark.slow
def test_three_lines_learn() -> None:
    command = [sys.executable, EXAMPLE]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # threads of small products wait for each other
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert losses[0] > 4.0 and losses[-1] < 2.0
    assert "master weights" in done.stdout
    changed = [line for line in EXAMPLE.read_text().splitlines() if "# ←" in line]
    assert len(changed) == 3
