"""Frameworks on two gloo ranks: one process at the same global batch, and resume, in 4 decimals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.frameworks import data, ranks

pytestmark = pytest.mark.slow


CASES = [("Trainer", 2), ("Trainer", 3), ("Lightning", 2), ("Lightning", 3)]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, on its use of torch
@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_two_ranks_log_what_one_process_does(tmp_path: Path, kind: str, stage: int) -> None:
    logged = ranks.launch(kind, {"zero_stage": stage}, tmp_path, 2)
    assert logged == ranks.run(kind, None, tmp_path, 1)
    assert len(logged) >= 3


@pytest.mark.parametrize(("launcher", "stage"), [("torchrun", 2), ("accelerate launch", 3)])
def test_accelerates_ranks_are_not_wrapped_and_split_the_texts_once(
    tmp_path: Path, launcher: str, stage: int
) -> None:
    """Each rank asserts that its model is no DDP, and writes down what it trains on."""
    logged = ranks.launch("Accelerate", {"zero_stage": stage}, tmp_path, 2, launcher)
    first, second = (json.loads(ranks.texts_of(tmp_path, rank).read_text()) for rank in (0, 1))
    assert logged == ranks.run("Accelerate", None, tmp_path, 1) and len(logged) == 3
    every = [text["input_ids"].tolist() for text in data.Texts()]
    # Batches of two are dealt out in turn.
    assert first == [text for i, text in enumerate(every) if i // 2 % 2 == 0]
    assert second == [text for i, text in enumerate(every) if i // 2 % 2 == 1]
