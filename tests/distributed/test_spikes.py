"""Spikes on two ranks: one of them sees it, and both skip, or go back, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offloadtrain.events import log_lines, schema
from tests.distributed.conftest import Run
from tests.distributed.rank_jobs import CONSTANT, train
from tests.train.small_job import tensor_hashes, write_text
from tests.train.test_spikes import STEPS, plant


def spiking(folder: Path, data: Path, policy: str, steps: int, resume: bool = False) -> None:
    """Train with a spike of the loss of rank 1, at step 11."""
    changes: dict[str, Any] = {"train.on_spike": f'"{policy}"', "train.steps": steps}
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, 11, times=80.0 if dist.get_rank() == 1 else 1.0)
        train(folder, data, resume=resume, **CONSTANT | changes | {"train.eval_every": 0})


def tried(run: Path, rank: int) -> list[tuple[int, bool]]:
    log = log_lines.read(run / "events" / f"rank{rank:03d}.jsonl")
    steps = [record.event for record in log if isinstance(record.event, schema.Step)]
    return [(step.step, step.skipped) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "again"), [("skip", [11]), ("rollback", [10, 11])])
def test_all_ranks_decide_alike_and_resume_to_the_bit(
    ranks: Run, tmp_path: Path, policy: str, again: list[int]
) -> None:
    write_text(tmp_path)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    ranks(2, spiking, whole, tmp_path, policy, STEPS)
    assert tried(whole, 0) == tried(whole, 1)
    wanted = [*range(1, 12), *again, *range(12, STEPS + 1)]
    assert [step for step, _ in tried(whole, 0)] == wanted
    assert [step for step, skipped in tried(whole, 0) if skipped] == [11]
    ranks(2, spiking, parted, tmp_path, policy, 12)
    ranks(2, spiking, parted, tmp_path, policy, STEPS, True)
    assert tried(parted, 0) == tried(whole, 0)
    assert tensor_hashes(parted, STEPS) == tensor_hashes(whole, STEPS)
