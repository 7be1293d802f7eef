"""Jobs without a flush between steps (PipeDream-2BW): skipped steps, loss scales, requests, and the
log are those of `update="delayed"` in one process.

Bits, plans, checkpoints and restarts are in `test_divisions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.optim import LossScaler
from tests.distributed.conftest import Run
from tests.distributed.divisions import DEEP, TWO_VERSIONS
from tests.distributed.rank_jobs import (
    CONSTANT,
    FP16,
    Options,
    assert_same_state,
    figures,
    train,
)

pytestmark = pytest.mark.slow

DELAYED: Options = DEEP | {"offload.update": '"delayed"'}


# Loss scaling, whose scale is as late as the updates.


def fast(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `run` with a loss scale that begins where gradients overflow, and grows every two
    steps."""

    def scaler(hysteresis: int) -> LossScaler:
        return LossScaler(scale=2.0**24, growth_interval=2, hysteresis=hysteresis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offloadtrain.engine.step_report.LossScaler", scaler)
        return run(*args, **options)


@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [
        (TWO_VERSIONS, {}, 4),
        ({}, TWO_VERSIONS, 7),
        pytest.param(TWO_VERSIONS, {"ranks.pipeline": 2}, 7, marks=pytest.mark.long),
        pytest.param(
            *(TWO_VERSIONS, TWO_VERSIONS | {"ranks.pipeline": 4}, 4), marks=pytest.mark.long
        ),
    ],
)
def test_a_job_of_fp16_continues_in_other_stages(
    ranks: Run, tmp_path: Path, data: Path, before: Options, after: Options, stop: int
) -> None:
    """With the scales of the run that never stopped: a checkpoint holds what they do not follow
    yet."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    chosen = DELAYED | CONSTANT | FP16 | {"model.num_layers": 8, "train.checkpoint_every": 5}
    ranks(1, fast, train, expected, data, **chosen)
    for stages, steps in ((before, stop), (after, 12)):
        more = chosen | stages | {"train.steps": steps}
        size = stages.get("ranks.pipeline", 1)
        ranks(size, fast, train, run, data, resume=steps > stop, **more)
    assert figures(run) == figures(expected)
    assert_same_state(expected, run)
