"""Loss scaling without a flush between steps (PipeDream-2BW): scales, skips and bits of
`update="delayed"` of one process, whose scale is as late."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.events import schema
from offloadtrain.optim import LossScaleError, LossScaler
from offloadtrain.train.trained_model import open_saved
from tests.distributed.conftest import Run
from tests.distributed.divisions import TWO_VERSIONS
from tests.distributed.rank_jobs import (
    CONSTANT,
    assert_same_run,
    assert_same_state,
    evaluations,
    events_of_rank,
    figures,
    train,
)
from tests.distributed.test_pipeline import Told, one_process
from tests.distributed.test_pipeline_2bw import batches, made, unflushed
from tests.distributed.test_unflushed_jobs import DELAYED, EVAL, with_losses_not_finite

SCALE = 2.0**24


def fast(run: Callable[..., Any], *args: Any, scale: float = SCALE, **options: Any) -> Any:
    """A run whose loss scale begins where gradients overflow, and grows every two steps."""

    def scaler(hysteresis: int) -> LossScaler:
        return LossScaler(scale=scale, growth_interval=2, hysteresis=hysteresis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offloadtrain.engine.step_report.LossScaler", scaler)
        patch.setattr("tests.distributed.test_pipeline.STEPS", 14)
        return run(*args, **options)


def assert_late(scales: list[float], skipped: list[bool]) -> None:
    """The first overflow halves the scale of the step behind the next one; it grows again."""
    first = skipped.index(True)
    assert scales[first : first + 3] == [scales[first]] * 2 + [scales[first] / 2]
    assert any(after > now for now, after in pairwise(scales)), scales


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "replicas", "options"),
    [
        (2, 1, {"clip_norm": 0.3, "lanes": "proof"}),
        (4, 1, {"lanes": "threads", "synchronized": 5, "skipped": 3, "working": "host"}),
        (4, 2, {"paused": 4, "loss_scale_hysteresis": 2, "activation": "recompute"}),
        pytest.param(4, 1, {"paused": 1, "clip_norm": 0.3}, marks=pytest.mark.long),
        pytest.param(2, 1, {"synchronized": 1, "state_on": "device"}, marks=pytest.mark.long),
    ],
)
def test_scales_are_those_of_one_process(
    ranks: Run, size: int, replicas: int, options: dict[str, Any]
) -> None:
    plain = {key: value for key, value in options.items() if key not in ("lanes", "paused")}
    plain |= {"precision": "fp16"}
    whole = ranks(replicas, fast, one_process, update="delayed", **plain)
    staged: list[Told] = ranks(size, fast, unflushed, size // replicas, precision="fp16", **options)
    together: dict[str, Any] = {}
    for rank, found in enumerate(staged):
        # As text, in which a norm that is no number equals itself.
        assert str(found["steps"]) == str(whole[rank % replicas]["steps"]), f"rank {rank}"
        assert not found["faults"]
        together |= found["masters"]
    for name, value in whole[0]["masters"].items():
        assert (together[name] == value).all(), name
    scales, skipped = ([step[at] for step in whole[0]["steps"]] for at in (2, 3))
    assert True in skipped and False in skipped and len(set(scales)) > 2, scales
    if not options.keys() & {"loss_scale_hysteresis", "skipped"}:
        assert_late(scales, skipped)


@pytest.mark.slow
@pytest.mark.parametrize("options", [EVAL, {"train.checkpoint_every": 2}])
def test_a_job_of_fp16(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    options: dict[str, Any],
) -> None:
    chosen = DELAYED | {"offload.precision": '"fp16"', "offload.clip_norm": 0.5} | options
    ranks(1, fast, train, tmp_path / "whole", data, **chosen)
    ranks(2, fast, train, tmp_path / "staged", data, **chosen | TWO_VERSIONS)
    assert_same_run(tmp_path / "whole", tmp_path / "staged", 2)
    assert_same_state(tmp_path / "whole", tmp_path / "staged")
    assert evaluations(tmp_path / "staged") == evaluations(tmp_path / "whole")
    scales = {event.loss_scale for event in events_of_rank(tmp_path / "staged", schema.Step)}
    assert len(scales) > 2, scales


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize("stop", [4, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TWO_VERSIONS, {}),
        ({}, TWO_VERSIONS),
        pytest.param(TWO_VERSIONS, {"ranks.pipeline": 2}, marks=pytest.mark.long),
        pytest.param(TWO_VERSIONS, TWO_VERSIONS | {"ranks.pipeline": 4}, marks=pytest.mark.long),
    ],
)
def test_a_job_of_fp16_goes_on_in_other_stages(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    stop: int,
) -> None:
    """With the scales of the run that never stopped: a checkpoint holds what they do not follow
    yet."""
    chosen = DELAYED | CONSTANT | {"model.num_layers": 8, "train.checkpoint_every": 5}
    chosen |= {"offload.precision": '"fp16"'}
    ranks(1, fast, train, tmp_path / "whole", data, **chosen)
    for stages, steps in ((before, stop), (after, 12)):
        more = stages | {"train.steps": steps}
        size = stages.get("ranks.pipeline", 1)
        ranks(size, fast, train, tmp_path / "run", data, resume=steps > stop, **chosen | more)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "whole", tmp_path / "run")


def overflowing(stages: int) -> tuple[int, str]:
    """The run that tells of overflows at the smallest scale."""
    pipeline = made(stages, precision="fp16")
    (tokens, targets), *_ = batches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offloadtrain.optim.loss_scaler.SMALLEST", SCALE)
        for number in range(1, 9):
            try:
                pipeline.run(tokens, target=targets)
            except LossScaleError as error:
                pipeline.drain()
                pipeline.close()
                return number, str(error)
            pipeline.step()
    raise AssertionError("no overflow was told")


@pytest.mark.slow
def test_overflows_at_the_smallest_scale_are_told_on_all_stages(ranks: Run) -> None:
    """Before anything is sent that other stages would wait for."""
    told = ranks(2, fast, overflowing, 2)
    assert {number for number, _ in told} == {3}
    assert all("gradients overflow fp16" in text for _, text in told)


def ended_by_overflow(folder: Path, data: Path, bad: set[int], **changes: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offloadtrain.optim.loss_scaler.SMALLEST", 2.0**16)
        with pytest.raises(LossScaleError) as told:
            with_losses_not_finite(lambda: train(folder, data, **changes), bad)
    return str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad", [{6, 7}, pytest.param({6}, marks=pytest.mark.long)], ids=["two", "one"]
)
def test_a_job_that_overflows_at_the_smallest_scale_ends_with_a_checkpoint(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    bad: set[int],
) -> None:
    chosen = DELAYED | {"offload.precision": '"fp16"'}
    (alone,) = ranks(1, ended_by_overflow, tmp_path / "whole", data, bad, **chosen)
    told = ranks(2, ended_by_overflow, tmp_path / "staged", data, bad, **chosen | TWO_VERSIONS)
    assert "smallest loss scale" in alone and "Not finite: the gradients of '" in alone
    assert told == [alone] * 2
    whole, staged = (open_saved(tmp_path / name).found for name in ("whole", "staged"))
    # One step more is under way in stages, which is ended; here it counts, or is skipped as well.
    assert staged.step - whole.step == len({6, 7} - bad) and whole.step == 6
    if len(bad) == 2:
        assert_same_state(tmp_path / "whole", tmp_path / "staged")
