"""Frameworks on two gloo ranks: one process at the same global batch, and resume, in 4 decimals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frameworks import ranks

pytestmark = pytest.mark.slow


CASES = [("Trainer", 2), ("Trainer", 3), ("Accelerate", 2), ("Lightning", 2), ("Lightning", 3)]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, on its use of torch
@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_two_ranks_log_what_one_process_does(tmp_path: Path, kind: str, stage: int) -> None:
    found = ranks.launch(kind, {"zero_stage": stage}, tmp_path, 2)
    assert found == ranks.run(kind, None, tmp_path, 1)
    assert len(found) >= 3
