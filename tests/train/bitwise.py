"""Runs that save, stop and go on, compared with one that never saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.optim import LossScaler
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.step.program import updates
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import Save
from tests.numerics.models import MODELS, batches, loss_of

STEPS, SAVED = 7, (3, 5)
"""Behind the steps of `SAVED` runs are saved, and stopped."""
OVERFLOWS = 4
"""With loss scaling, the step whose loss is infinite."""

Bits = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        options: of `offload`.
        placement: further ones, which change no bit.
        accum: microbatches of a step.
        lanes: makes the lanes.
    """

    options: Mapping[str, Any]
    placement: Mapping[str, Any] = field(default_factory=dict)
    model: str = "chain"
    accum: int = 1
    lanes: Any = field(default=SequentialLanes)


class Run:
    """A model and its optimizer, and the bits that its steps have shown."""

    def __init__(self, case: Case, seed: int) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.model: nn.Module = MODELS[case.model]()
        options = {"clip_norm": 0.5, **case.options, **case.placement}
        if options.get("state_on") == "device":
            options.pop("checkpoint_spill", None)  # it is of state on the host
        self.optimizer = ot.offload(
            self.model,
            ot.AdamW(lr=1e-2),
            device="cpu",
            grad_accum_steps=case.accum,
            **options,
        )
        self.optimizer.warns_of_skips = False
        self.losses: list[float] = []
        self._save: Save | None = None

    def train(self, steps: Sequence[int]) -> None:
        """Train these steps, 1-based."""
        ranks, accum = self.optimizer.ranks, self.case.accum
        stream = batches(STEPS * accum * ranks.size)[ranks.rank :: ranks.size]
        scaled = self.case.options.get("precision") == "fp16"
        for step in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / step
            for tokens in stream[(step - 1) * accum : step * accum]:
                loss = loss_of(self.model, tokens)
                self.losses.append(loss.item())
                infinite = scaled and step == OVERFLOWS
                self.optimizer.backward(loss * (float("inf") if infinite else 1))
            self.optimizer.step()

    def save(self, folder: Path, step: int) -> None:
        """Begin a checkpoint, which the next steps run beside."""
        self.commit()
        state = {"scaler": self.optimizer.scaler_state(), "step": self.done}
        ranks = self.optimizer.ranks
        self._save = Save(folder, step, self.model, self.optimizer, state, ranks)

    def commit(self) -> None:
        if self._save is not None:
            self._save.commit()
        self._save = None

    @property
    def done(self) -> int:
        return int(next(iter(self.optimizer.state.values()))["step"])

    def load(self, folder: Path) -> None:
        newest = checkpoint.newest_good(folder, _never, self.optimizer.ranks)
        assert newest is not None
        delayed = restore(newest, self.model, self.optimizer, self.optimizer.ranks)
        state = newest.state
        self.optimizer.finish_load(step=state["step"], scaler=state["scaler"], delayed=delayed)

    def bits(self) -> Bits:
        """Return state and weights, and the losses so far; ends a delay."""
        state: Bits = {
            f"{name}/{kind}": value.clone().view(torch.uint8)
            for name, tensors in self.optimizer.named_state()
            for kind, value in tensors.items()
        }
        weights = self.optimizer.full_weights()
        return state | {name: weight.contiguous() for name, weight in weights}


def _never(path: Path, damage: Exception) -> None:
    raise damage


@contextmanager
def running(case: Case, seed: int = 0) -> Iterator[Run]:
    lanes: Lanes = case.lanes()
    with pytest.MonkeyPatch.context() as patch, on_lanes(lanes):
        patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        patch.setattr("offloadtrain.engine.step_report.LossScaler", _fast_scaler)
        run = Run(case, seed)
        try:
            yield run
        finally:
            run.optimizer.close()


def _fast_scaler(hysteresis: int) -> LossScaler:
    """Grows within a test."""
    return LossScaler(scale=64.0, growth_interval=2, hysteresis=hysteresis)


def whole(case: Case) -> tuple[list[float], Bits]:
    """Train without a stop, and without a save."""
    with running(case) as run:
        run.train(range(1, STEPS + 1))
        return run.losses, run.bits()


def saving(case: Case, folder: Path) -> tuple[list[float], Bits]:
    """Train without a stop; saves run beside the steps behind them."""
    with running(case) as run:
        for first, last in _parts():
            run.train(range(first, last + 1))
            if last in SAVED:
                run.save(folder, last)
        run.commit()
        return run.losses, run.bits()


def parted(cases: Sequence[Case], folder: Path) -> tuple[list[float], Bits]:
    """Train with a stop behind each of `SAVED`; the i-th start is of the i-th case."""
    losses: list[float] = []
    for number, (case, (first, last)) in enumerate(zip(cases, _parts(), strict=True)):
        with running(case, seed=number) as run:
            if number:
                run.load(folder)
            run.train(range(first, last + 1))
            losses += run.losses
            if last in SAVED:
                run.save(folder, last)
                run.commit()
            last_bits = run.bits() if last == STEPS else {}
    return losses, last_bits


def _parts() -> list[tuple[int, int]]:
    """Return the first and last step of each start."""
    ends = (0, *SAVED, STEPS)
    return [(first + 1, last) for first, last in pairwise(ends)]


def differ(result: tuple[list[float], Bits], expected: tuple[list[float], Bits]) -> list[str]:
    """Name what is not the same, bit for bit."""
    names = [] if repr(result[0]) == repr(expected[0]) else ["losses"]
    bits, wanted = result[1], expected[1]
    names += sorted(bits.keys() ^ wanted.keys())
    return names + [n for n in bits.keys() & wanted.keys() if not _same(bits[n], wanted[n])]


def _same(bits: Tensor, other: Tensor) -> bool:
    return torch.equal(bits.view(torch.uint8), other.view(torch.uint8))
