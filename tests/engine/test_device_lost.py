"""A device that fails at any operation of a step: the state on the host is that of a whole step,
from which training goes on with the bits of a run that never failed, or the reason is said."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.engine.interpreter import SalvageError
from offloadtrain.hardware.direct_io import DirectFile
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.step.program import updates
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import Save
from tests.harsh_lanes import PausingLanes
from tests.losing_lanes import LosingLanes
from tests.numerics.models import Chain, batches, loss_of
from tests.seeded_lanes import SeededLanes

STEPS, FAILS_IN = 4, 2
"""Steps of a run, and the one (0-based) from whose first operation on the device may fail."""

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "speculative, right": {"update": "speculative", "clip_norm": 1e9},
    "speculative, wrong": {"update": "speculative"},
    "delayed": {"update": "delayed", "warmup_steps": 1},
    "streamed": {"working": "host", "activation": "recompute"},
    "early": {"clip_norm": None, "skip_nonfinite": False},
    "skipped": {},
}
STATES = ("fp32", "split16", "int8")
BACKENDS = {
    "sequential": SequentialLanes,
    "seeded": lambda: SeededLanes(3),
    "late": lambda: SeededLanes(4, late=True),
    "threads": lambda: PausingLanes(0.2),
}


@dataclass(frozen=True)
class Case:
    mode: str
    state: str
    accum: int
    backend: str

    @property
    def options(self) -> dict[str, Any]:
        case_options = {"clip_norm": 0.5, "state": self.state, "grad_accum_steps": self.accum}
        # Where a step is skipped the loss scale counts it; split16 keeps no fp16 weights.
        scaled = self.mode == "skipped" and self.state != "split16"
        return case_options | MODES[self.mode] | {"precision": "fp16" if scaled else "bf16"}


@contextmanager
def offloaded(case: Case, lanes: Lanes) -> Iterator[tuple[ot.OffloadOptimizer, Chain]]:
    torch.manual_seed(0)
    model = Chain(2)
    with pytest.MonkeyPatch.context() as patch, on_lanes(lanes):
        patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **case.options)
        optimizer.warns_of_skips = False
        try:
            yield optimizer, model
        finally:
            optimizer.close()


def train(case: Case, optimizer: ot.OffloadOptimizer, model: Chain, steps: range) -> None:
    stream = batches(STEPS * case.accum)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for tokens in stream[step * case.accum : (step + 1) * case.accum]:
            loss = loss_of(model, tokens)
            # A step that overflows, and one that follows it, are skipped or not as ever.
            optimizer.backward(loss * (float("inf") if case.mode == "skipped" and step == 2 else 1))
        optimizer.step()


def bits(optimizer: ot.OffloadOptimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.clone()
        for name, tensors in optimizer.named_state()
        for key, value in tensors.items()
    }


Bits = dict[str, torch.Tensor]


class Reference:
    """Runs that never fail: of every number of tries, the state behind them, and the end of a run
    that goes on from a checkpoint of it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self._folder = case, folder
        self._references: dict[int, tuple[Bits, Bits]] = {}
        with offloaded(case, SequentialLanes()) as (optimizer, model):
            train(case, optimizer, model, range(STEPS))
            self.end_state = bits(optimizer)

    def after(self, tries: int) -> tuple[Bits, Bits]:
        if tries not in self._references:
            with offloaded(self.case, SequentialLanes()) as (optimizer, model):
                train(self.case, optimizer, model, range(tries))
                there = bits(optimizer)
                folder = self._folder / f"reference-{tries}"
                save(folder, optimizer, model)
            self._references[tries] = there, resumed(self.case, folder, tries)
            # An emergency checkpoint ends the delay of mode "delayed", and so does this one.
            if self.case.mode != "delayed":
                assert same(self._references[tries][1], self.end_state)
        return self._references[tries]


def begin(folder: Path, optimizer: ot.OffloadOptimizer, model: Chain) -> Save:
    """Begin a checkpoint, which the next steps run beside."""
    state = {"scaler": optimizer.scaler_state()}
    step = int(next(iter(optimizer.state.values()))["step"])
    return Save(folder, step, model, optimizer, state)


def save(folder: Path, optimizer: ot.OffloadOptimizer, model: Chain) -> None:
    begin(folder, optimizer, model).commit()


def resumed(case: Case, folder: Path, tries: int) -> Bits:
    """Load the newest checkpoint of the folder into a new model, and train to the end."""
    path, *_ = checkpoint.find(folder)
    result = checkpoint.verify(path)
    with offloaded(case, SequentialLanes()) as (optimizer, model):
        restore(result, model, optimizer)
        optimizer.finish_load(step=result.step, scaler=result.state["scaler"])
        train(case, optimizer, model, range(tries, STEPS))
        return bits(optimizer)


def same(actual: Bits, expected: Bits) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[key].view(torch.uint8), expected[key].view(torch.uint8))
        for key in expected
    )


def points_of(case: Case, folder: Path | None = None) -> int:
    """Operations from the beginning of the step that may fail to the end of the run.

    Args:
        folder: a save begins there behind the step before, and its operations count.
    """
    lanes = LosingLanes(SequentialLanes())
    with offloaded(case, lanes) as (optimizer, model):
        train(case, optimizer, model, range(FAILS_IN))
        lanes.seen = 0
        saving = begin(folder, optimizer, model) if folder else None
        train(case, optimizer, model, range(FAILS_IN, STEPS))
        if saving:
            saving.give_up()
        return lanes.seen


def fails_at(
    case: Case, point: int, reference: Reference, folder: Path, *, saving: bool = False
) -> str:
    """Return "before" or "behind" the decision of a step that was salvaged, or why none was.

    Args:
        saving: there is an older checkpoint in `folder`, and another one is being written.
    """
    lanes = LosingLanes(BACKENDS[case.backend]())
    in_flight: Save | None = None
    with offloaded(case, lanes) as (optimizer, model):
        train(case, optimizer, model, range(FAILS_IN - 1))
        if saving:
            save(folder, optimizer, model)
        train(case, optimizer, model, range(FAILS_IN - 1, FAILS_IN))
        lanes.left = point
        ended = FAILS_IN
        with pytest.raises((ot.OffloadTrainError, torch.AcceleratorError)) as raised:
            in_flight = begin(folder, optimizer, model) if saving else None
            for step in range(FAILS_IN, STEPS):
                train(case, optimizer, model, range(step, step + 1))
                ended = step + 1
            # What failed on a thread in the last step shows here.
            optimizer.synchronize()
        used = lanes.seen
        try:
            optimizer.salvage(raised.value)
        except SalvageError as error:
            assert case.mode == "early", error
            return str(error)
        there = bits(optimizer)
        if in_flight:
            in_flight.give_up()
        save(folder, optimizer, model)
        assert lanes.seen == used, "no operation was given to the device"
        tries = optimizer.tries
    assert ended <= tries <= ended + 1
    state, end = reference.after(tries)
    assert same(there, state)
    assert same(resumed(case, folder, tries), end)
    return "behind" if tries > ended else "before"


def check(cases: Sequence[Case], tmp_path: Path, *, share: float, seed: int) -> dict[str, int]:
    """Fail at a share of the points of each case; returns outcome → how many."""
    draw = random.Random(seed)
    outcomes: dict[str, int] = {}
    for number, case in enumerate(cases):
        reference = Reference(case, tmp_path / f"{number}")
        count = points_of(case)
        for point in sorted(draw.sample(range(count), max(1, round(share * count)))):
            outcome = fails_at(case, point, reference, tmp_path / f"{number}" / f"{point}")
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print(f"{sum(outcomes.values())} points: {outcomes}")
    return outcomes


ALL = [Case(*axes) for axes in itertools.product(MODES, STATES, (1, 2), BACKENDS)]


@pytest.mark.slow
def test_a_device_that_fails_anywhere_costs_no_step(tmp_path: Path, request: Any) -> None:
    seed = request.config.option.seed
    cases = random.Random(seed).sample(ALL, 12)
    outcomes = check(cases, tmp_path, share=0.025, seed=seed)
    assert outcomes["before"] and outcomes["behind"]


@pytest.mark.parametrize(
    "mode",
    ["exact", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("streamed", "early"))],
)
def test_no_gradient_of_a_decided_step_is_still_on_the_device(tmp_path: Path, mode: str) -> None:
    """Copies run as late as the program allows: what a decided step does not wait for is lost."""
    case = Case(mode, "fp32", 1, "late")
    reference, count = Reference(case, tmp_path), points_of(case)
    for point in range(count // 4, count // 2, 6):
        fails_at(case, point, reference, tmp_path / f"{point}")


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_fails_at_every_operation(tmp_path: Path, mode: str) -> None:
    """At every one of a plain run; in the other formats, with sums of microbatches and on the other
    backends, at a twentieth of them."""
    plain = Case(mode, "fp32", 1, "sequential")
    other_cases = [case for case in ALL if case.mode == mode and case != plain]
    check([plain], tmp_path / "plain", share=1.0, seed=0)
    check(other_cases, tmp_path / "others", share=0.05, seed=0)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save takes longer than a step."""
    write = DirectFile.write

    def later(file: DirectFile, data: memoryview, offset: int) -> None:
        time.sleep(0.002)
        write(file, data, offset)

    monkeypatch.setattr(DirectFile, "write", later)


def fails_while_saving(case: Case, tmp_path: Path, share: float) -> int:
    """Fail at a share of the points behind the beginning of a save; return how many."""
    reference = Reference(case, tmp_path)
    count = points_of(case, tmp_path / "counted")
    points = random.Random(0).sample(range(count), max(1, round(share * count)))
    for point in points:
        folder = tmp_path / f"{point}"
        fails_at(case, point, reference, folder, saving=True)
        newest, older = checkpoint.find(folder)
        assert {path.name for path in folder.iterdir()} == {newest.name, older.name}
        assert checkpoint.verify(older).step == FAILS_IN - 1
    return len(points)


WHILE_SAVING = [Case(mode, "fp32", 1, b) for mode in MODES if mode != "early" for b in BACKENDS]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "delayed"])
def test_a_device_that_fails_while_a_checkpoint_is_written(
    tmp_path: Path, slow_disk: None, mode: str
) -> None:
    fails_while_saving(Case(mode, "fp32", 1, "threads"), tmp_path, share=0.01)


@pytest.mark.long
def test_a_device_that_fails_at_every_operation_while_a_checkpoint_is_written(
    tmp_path: Path, slow_disk: None
) -> None:
    """At every one of a plain run, at a twentieth in the other modes and on the other backends."""
    plain = Case("exact", "fp32", 1, "threads")
    result = fails_while_saving(plain, tmp_path / "plain", share=1.0)
    for number, case in enumerate(WHILE_SAVING):
        result += fails_while_saving(case, tmp_path / f"{number}", share=0.05)
    print(f"{result} points: the older checkpoint and the emergency checkpoint load at all of them")
