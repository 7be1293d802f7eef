"""A job of an encoder: every number of ranks hides the same tokens, and makes the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Run
from tests.distributed.rank_jobs import FP32, losses_are_close, train
from tests.train.small_job import write_text

ROWS = 8
ENCODER = FP32 | {
    "model.dropout": 0.0,
    "model.objective": '"mlm"',
    "model.vocab_size": 257,
    "data.packing": '"isolated"',
    "offload.clip_norm": 0.5,
    "train.steps": 4,
    "train.eval_every": 2,
    "train.checkpoint_every": 0,
}


def rows(micro_batch: int) -> dict[str, Any]:
    return ENCODER | {
        "train.micro_batch": micro_batch,
        "train.grad_accum_steps": ROWS // micro_batch,
        "train.eval_batches": 16 // micro_batch,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_microbatches_and_ranks_make_the_step_of_one_large_batch(
    ranks: Run, tmp_path: Path, name: str
) -> None:
    """To fp32 summation error."""
    write_text(tmp_path)
    rule = {"optim.name": f'"{name}"'}
    (large,) = ranks(1, train, tmp_path / "large", tmp_path, **rows(ROWS), **rule)
    others = [
        *ranks(1, train, tmp_path / "rows", tmp_path, **rows(2), **rule),
        *ranks(2, train, tmp_path / "ranks", tmp_path, **rows(2), **rule),
    ]
    for other in others:
        assert losses_are_close(other.losses, large.losses, 1e-5)
        assert other.val_loss == pytest.approx(large.val_loss, rel=1e-5)


@pytest.mark.slow
def test_stages_of_a_pipeline_have_the_losses_of_one_process(ranks: Run, tmp_path: Path) -> None:
    write_text(tmp_path)
    four = rows(2) | {"model.num_layers": 4}
    (alone,) = ranks(1, train, tmp_path / "alone", tmp_path, **four)
    piped = ranks(2, train, tmp_path / "piped", tmp_path, **four, **{"ranks.pipeline": 2})
    assert piped[0].losses == alone.losses
