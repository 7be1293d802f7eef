"""Jobs without a flush between steps (PipeDream-2BW): skipped steps, loss scales, requests, and the
log are those of `update="delayed"` in one process.

Bits, plans, checkpoints and restarts are in `test_divisions.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from offloadtrain.engine.engine import Engine
from offloadtrain.events import schema
from offloadtrain.optim import LossScaler
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trainer import Trainer
from tests.distributed.conftest import Run
from tests.distributed.divisions import DEEP, TWO_VERSIONS
from tests.distributed.rank_jobs import (
    CONSTANT,
    FP16,
    FP32,
    Options,
    RankRun,
    assert_same_run,
    assert_same_state,
    evaluations,
    events_of_rank,
    figures,
    train,
)

pytestmark = pytest.mark.slow

DELAYED: Options = DEEP | {"offload.update": '"delayed"'}
EVAL: Options = {"train.eval_every": 4}
NOTHING_DUE: Options = {"train.checkpoint_every": 0, "train.eval_every": 0}
MICROBATCHES = 4


def with_losses_not_finite(run: Callable[..., Any], steps: set[int]) -> Any:
    """Call `run` with losses of these steps, counted from 0, that are not finite."""
    scaled, calls = Engine.scaled, 0

    def with_nan(engine: Engine, loss: torch.Tensor, **more: Any) -> torch.Tensor:
        nonlocal calls
        if isinstance(loss, FakeTensor):  # the trace of a plan
            return scaled(engine, loss, **more)
        step = calls // MICROBATCHES if torch.is_grad_enabled() else -1  # no evaluation
        calls += torch.is_grad_enabled()
        return scaled(engine, loss, **more) * (math.nan if step in steps else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "scaled", with_nan)
        return run()


def train_skipping(folder: Path, data: Path, steps: set[int], **options: Any) -> RankRun:
    run: RankRun = with_losses_not_finite(lambda: train(folder, data, **options), steps)
    return run


@pytest.mark.parametrize("steps", [{3, 4}, pytest.param({7, 11}, marks=pytest.mark.long)])
def test_a_skipped_step_repeats_its_rate(
    ranks: Run, tmp_path: Path, data: Path, steps: set[int]
) -> None:
    """Also if a checkpoint, an evaluation or the end is due after it."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    options = DELAYED | EVAL | FP32 | {"train.checkpoint_every": 4}
    ranks(1, train_skipping, expected, data, steps, **options)
    ranks(2, train_skipping, run, data, steps, **options | TWO_VERSIONS)
    assert sum(figure[-1] for figure in figures(run)) == len(steps)
    assert_same_run(expected, run, 2)
    assert evaluations(run) == evaluations(expected)
    for folder in (expected, run):
        warnings = [warning.code for warning in events_of_rank(folder, schema.Warning_)]
        assert sum("skipped" in code for code in warnings) == len(steps)


def train_with_request(
    folder: Path, data: Path, rank: int, request: str, **options: Any
) -> RankRun:
    """Train; one rank gets a request after its fifth step."""
    ranks, run_trainer = Ranks.of(None, torch.device("cpu")), Trainer.train
    here = ranks.rank == rank
    ranks.close()

    def with_request(trainer: Trainer, requests: Any, stop: StopRequests) -> str:
        log, log_step = trainer._log, trainer._log.step

        def then_request(number: int, *args: Any, **more: Any) -> None:
            log_step(number, *args, **more)
            if number == 5 and here:
                if request == "stop":
                    stop.requested = "SIGTERM"
                elif request == "save":
                    stop.wants_checkpoint = True
                else:
                    record = {"action": "checkpoint", "message": ""}
                    (folder / "control/a.json").write_text(json.dumps(record))

        log.step = then_request  # type: ignore[method-assign]
        return run_trainer(trainer, requests, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", with_request)
        return train(folder, data, **options)


@pytest.mark.parametrize(("rank", "request_"), [(1, "stop"), (1, "save"), (0, "file")])
def test_a_request_is_answered_after_a_step(
    ranks: Run, tmp_path: Path, data: Path, rank: int, request_: str
) -> None:
    """The ranks exchange it with the next step; all end that step, and continue to the bit."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    options = DELAYED | NOTHING_DUE
    ranks(1, train, expected, data, **options)
    staged = options | TWO_VERSIONS
    runs = ranks(2, train_with_request, run, data, rank, request_, **staged)
    saved = [path.name for path in sorted((run / "checkpoints").iterdir())]
    assert saved[0] == "step-00000007"
    assert {of_rank.status for of_rank in runs} == {"stopped" if request_ == "stop" else "done"}
    if request_ == "stop":
        assert len(saved) == 1
        ranks(2, train, run, data, resume=True, **staged)
    assert_same_run(expected, run, 2)


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
