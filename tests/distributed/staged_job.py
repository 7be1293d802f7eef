"""What jobs in the stages of a pipeline are held to, whatever else divides their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.conftest import Run
from tests.distributed.test_jobs import CONSTANT, trained
from tests.distributed.test_pipeline_jobs import assert_same_run, figures
from tests.distributed.test_tensor_expert_jobs import assert_as_planned
from tests.distributed.test_tensor_jobs import assert_same_state, carried

Changes = dict[str, Any]

UNFLUSHED: Changes = {"ranks.schedule": '"2bw"', "offload.update": '"delayed"'}
INTERLEAVED: Changes = {
    "ranks.schedule": '"interleaved"',
    "ranks.stages_per_rank": 2,
    "model.num_layers": 8,
}
ALONE: Changes = {"ranks.pipeline": 1, "ranks.schedule": '"1f1b"', "ranks.stages_per_rank": 1}


def assert_same_as_alone(
    ranks: Run,
    folder: Path,
    data: Path,
    chosen: Changes,
    train: Callable[..., dict[str, Any]] = trained,
) -> None:
    """On 4 ranks in 2 stages: the bits of 2 ranks without, and each rank holds what was planned of
    its stages, to the byte of each owner."""
    plain = ranks(2, train, folder / "whole", data, **chosen | ALONE)
    staged = ranks(4, train, folder / "staged", data, **chosen)
    assert_same_run(folder / "whole", folder / "staged", 4)
    assert_same_state(folder / "whole", folder / "staged")
    assert {found["val"] for found in staged} == {plain[0]["val"]}
    for found in staged:
        assert_as_planned(found)


def assert_same_in_both(
    ranks: Run,
    folder: Path,
    data: Path,
    chosen: Changes,
    first: tuple[int, Changes],
    then: tuple[int, Changes],
) -> None:
    """A checkpoint of `first`, (ranks, division), carried into `then` and back: masters and moments
    are the same to the bit, each saved once."""
    chosen = chosen | {"train.steps": 3, "train.eval_every": 0}
    before, after = (chosen | changes for _, changes in (first, then))
    ranks(first[0], trained, folder / "run", data, **before)
    ranks(then[0], carried, folder / "run", folder / "carried", data, **after)
    assert_same_state(folder / "run", folder / "carried")
    ranks(first[0], carried, folder / "carried", folder / "back", data, **before)
    assert_same_state(folder / "run", folder / "back")


def assert_goes_on_alone(
    ranks: Run, folder: Path, data: Path, chosen: Changes, stages: Changes
) -> None:
    """Stopped after 6 steps on 4 ranks in stages, resumed on 2 without: the run that never stopped,
    bit for bit."""
    chosen = chosen | CONSTANT
    ranks(2, trained, folder / "whole", data, **chosen)
    for size, changes, steps in ((4, stages, 6), (2, {}, 12)):
        some = chosen | changes | {"train.steps": steps}
        ranks(size, trained, folder / "run", data, resume=steps > 6, **some)
    assert figures(folder / "run") == figures(folder / "whole")
    assert_same_state(folder / "run", folder / "whole")
