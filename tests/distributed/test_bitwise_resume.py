"""Ranks that save and stop twice have the bits of ranks that never do; other numbers of ranks go on
from the same state and the same weights."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Run
from tests.distributed.reference import whole_state
from tests.distributed.test_checkpoints import FIELDS, fixed_loss
from tests.engine.test_proof import CASES, MODES, options_of
from tests.train.bitwise import Case, differ, parted, running, saving, whole

STAGES: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 3, host": {"zero_stage": 3, "working": "host"},
    "stage 3, partly": {"zero_stage": 3, "working": "host", "resident_blocks": 1},
}


def compared(folder: Path, mode: str, placement: str, kept: tuple[str, str], accum: int) -> Any:
    """Return what differs on this rank, of a run that saves, and of one of three starts."""
    state, precision = kept
    options = {**options_of(mode, precision), "state": state, "precision": precision}
    case = Case(options, STAGES[placement], accum=accum)
    expected = whole(case)
    found = saving(case, folder / "saving"), parted([case] * 3, folder / "parted")
    return [differ(one, expected) for one in found]


ALL = list(product(MODES, STAGES, CASES))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["stage 1", "stage 3, partly"])
def test_a_delay_goes_on_among_ranks(ranks: Run, tmp_path: Path, placement: str) -> None:
    found = ranks(2, compared, tmp_path, "delayed", placement, ("fp32", "bf16"), 1)
    assert found == [[[], []]] * 2


@pytest.mark.long
def test_every_mode_stage_and_format(ranks: Run, tmp_path: Path) -> None:
    draw = random.Random(0)
    for number, (mode, placement, kept) in enumerate(ALL):
        size = draw.choice((2, 2, 3))
        folder = tmp_path / f"{number}"
        found = ranks(size, compared, folder, mode, placement, kept, 1 + number % 2)
        assert found == [[[], []]] * size, (mode, placement, kept, size)
    print(f"{2 * len(ALL)} resumes of {len(ALL)} runs among ranks: 0 bits differ")


def shown(run: Any, state: str) -> Any:
    """The loss of the weights in use, the whole state, and the loss of the newest weights."""
    in_use = fixed_loss(run.model)
    run.optimizer.synchronize()
    values = whole_state(run.optimizer, *FIELDS[state])
    told = {key: {n: x.reshape(-1).tolist() for n, x in of.items()} for key, of in values.items()}
    return in_use, told, fixed_loss(run.model)


def saved(folder: Path, state: str, options: dict[str, Any]) -> Any:
    with running(Case({"update": "delayed", "state": state}, options, model="frozen")) as run:
        run.train(range(1, 4))
        run.save(folder, 3)
        run.commit()
        return shown(run, state)


def loaded(folder: Path, state: str, options: dict[str, Any]) -> Any:
    case = Case({"update": "delayed", "state": state}, options, model="frozen")
    with running(case, seed=1) as run:
        run.load(folder)
        return shown(run, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrote", "reads", "state"), [(2, 1, "split16"), (1, 2, "fp32"), (2, 3, "int8")]
)
def test_any_number_of_ranks_goes_on_from_a_delay(
    ranks: Run, tmp_path: Path, wrote: int, reads: int, state: str
) -> None:
    (before, *_) = ranks(wrote, saved, tmp_path, state, {"zero_stage": 2})
    assert before[0] != before[2], "the weights in use are not the newest"
    placed = {"zero_stage": 3, "working": "host"}
    assert ranks(reads, loaded, tmp_path, state, placed) == [before] * reads
