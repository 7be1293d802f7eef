"""What each cell of the table must show, and whether it does.

* fp32: losses of the plain loop, to FP32_LIMIT.
* bf16: losses of the plain fp32 loop, to BF16_LIMIT, or to a little more than what torch.autocast
  over fp32 weights makes of them, where it runs.
* host, recompute, offload, offload_saved, speculative: losses, norms, masters and buffers of the
  bf16 run, bit for bit.

A cell may also refuse an architecture, by a ModelError, for the reason that `models.py` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.architectures.models import ARCHITECTURES, Architecture
from benchmarks.architectures.training import (
    GRAD_ACCUM_STEPS,
    Trained,
    train_autocast,
    train_masters,
    train_offloaded,
    train_plain,
)
from offloadtrain.engine import ModelError

FP32_LIMIT = 1e-6
BF16_LIMIT = 5e-3
AUTOCAST_MARGIN = 1.2
SAME = "same bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell as found: what the table shows, and why it failed or was refused."""

    architecture: str
    cell: str
    shown: str
    passed: bool
    why: str = ""
    deviation: float | None = None
    autocast_deviation: float | None = None


class Case:
    """One architecture; what several cells compare with is trained once."""

    def __init__(self, name: str, steps: int, architecture: Architecture | None = None) -> None:
        self.name = name
        self.architecture = architecture or ARCHITECTURES[name]
        self.steps = steps

    @cached_property
    def plain(self) -> list[float]:
        return train_plain(self.architecture, self.steps)

    @cached_property
    def autocast(self) -> list[float] | None:
        """None where a forward raises an error under torch.autocast."""
        try:
            return train_autocast(self.architecture, self.steps)
        except RuntimeError:
            return None

    @cached_property
    def base(self) -> Trained:
        return train_offloaded(self.architecture, self.steps)

    def fill(self, cell: str) -> Cell:
        """Run what `cell` compares; whatever is raised is told in the cell."""
        try:
            return CELLS[cell](self, cell)
        except ModelError as error:
            reason = self.architecture.impossible.get(cell)
            why = f"{reason}: {error}" if reason else str(error)
            return self.found(cell, "refused", reason is not None, why=why)
        except Exception as error:
            return self.found(cell, type(error).__name__, False, why=str(error))

    def found(self, cell: str, shown: str, passed: bool, **more: Any) -> Cell:
        return Cell(architecture=self.name, cell=cell, shown=shown, passed=passed, **more)


def deviation(losses: list[float], reference: list[float]) -> float:
    """The largest, relative to the reference's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def fp32(case: Case, cell: str) -> Cell:
    trained = train_offloaded(case.architecture, case.steps, precision="fp32")
    found = deviation(trained.losses, case.plain)
    why = "" if found <= FP32_LIMIT else f"allowed are {FP32_LIMIT:.1e} off the plain loop"
    return case.found(cell, f"{found:.1e}", not why, why=why, deviation=found)


def bf16(case: Case, cell: str) -> Cell:
    """Beside it what torch.autocast makes of the same steps."""
    found = deviation(case.base.losses, case.plain)
    autocast = None if case.autocast is None else deviation(case.autocast, case.plain)
    allowed = max(BF16_LIMIT, AUTOCAST_MARGIN * (autocast or 0.0))
    why = "" if found <= allowed else _why_bf16(case, allowed)
    return case.found(
        cell,
        f"{found:.1e} ({'-' if autocast is None else f'{autocast:.1e}'})",
        not why,
        why=why,
        deviation=found,
        autocast_deviation=autocast,
    )


def _why_bf16(case: Case, allowed: float) -> str:
    """Beside the bound: is it this run that is off, or training in bf16?"""
    why = f"allowed are {allowed:.1e} off the plain fp32 loop"
    try:
        masters = deviation(train_masters(case.architecture, case.steps), case.plain)
    except RuntimeError as error:
        return f"{why}; a plain loop in bf16 raises {error}"
    return f"{why}; torch's AdamW over fp32 masters of the model in bf16 is {masters:.1e} off"


def same_bits(**options: Any) -> Callable[[Case, str], Cell]:
    """The cell of a placement or update mode that promises the bits of the run without it."""

    def compare(case: Case, cell: str) -> Cell:
        trained = train_offloaded(case.architecture, case.steps, **options)
        why = first_difference(trained, case.base)
        return case.found(cell, "differs" if why else SAME, not why, why=why)

    return compare


def first_difference(trained: Trained, base: Trained) -> str:
    """Empty if there is none."""
    for number, (loss, expected) in enumerate(zip(trained.losses, base.losses, strict=True)):
        if loss != expected:
            step = 1 + number // GRAD_ACCUM_STEPS
            return f"a loss of step {step} is {loss!r} and without it {expected!r}"
    for step, (norm, expected) in enumerate(zip(trained.norms, base.norms, strict=True), start=1):
        if norm != expected:
            return f"the gradient norm of step {step} is {norm!r} and without it {expected!r}"
    for name, master in trained.masters.items():
        if not torch.equal(master, base.masters[name]):
            return f"the master weights of {name} differ after the last step"
    for name, buffer in trained.buffers.items():
        if not torch.equal(buffer, base.buffers[name]):
            return f"the buffer {name} differs after the last step"
    return ""


CELLS: dict[str, Callable[[Case, str], Cell]] = {
    "fp32": fp32,
    "bf16": bf16,
    "host": same_bits(working="host"),
    "recompute": same_bits(activation="recompute"),
    "selective": same_bits(activation="selective"),
    "offload": same_bits(activation="offload"),
    "offload_saved": same_bits(activation="offload_saved", offload_saved_above=0),
    "speculative": same_bits(update="speculative"),
}
