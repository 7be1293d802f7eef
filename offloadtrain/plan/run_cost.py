"""Time, written bytes and price of a run, with the error of earlier plans."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.units import format_bytes, format_count, format_duration
from offloadtrain.events.time_left import Pause, seconds_left
from offloadtrain.plan.plan import Plan

JOB_ERRORS = Path(__file__).parent / "baselines/job_errors.json"
"""Errors of plans of jobs, in the columns of docs/validation.md that the file names."""

_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of a system's predictor over known throughputs.

    Attributes:
        median: median of absolute errors.
        worst: largest error by size, signed.
        band: bound on the size of nine tenths of the errors.
    """

    cells: int
    median: float
    worst: float
    band: float

    @classmethod
    def of(cls, errors: list[float]) -> Accuracy:
        sizes = sorted(map(abs, errors))
        band = sizes[ceil(0.9 * len(sizes)) - 1]
        return cls(len(sizes), statistics.median(sizes), max(errors, key=abs), band)


@cache
def accuracy_of_plans(gpu: str | None = None) -> tuple[Accuracy, str]:
    """Return the errors of earlier plans of jobs, and what they were compared with.

    Args:
        gpu: torch's name of a GPU; if no step was measured on it, published runs are used. None:
            all measured runs.
    """
    known = json.loads(JOB_ERRORS.read_text(encoding="utf-8"))
    kind = "measured" if gpu in (None, *known["gpus"]) else "published"
    what = "measured steps" if kind == "measured" else "published runs"
    return Accuracy.of([error / 100 for error in known[kind]]), what


@dataclass(frozen=True, slots=True)
class Price:
    """Price of one host per hour; `currency` is its prefix, such as "$"."""

    per_hour: float
    currency: str = ""


def parse_price(text: str) -> Price:
    """Parse "0.35/h", "$0.35/h" or "EUR 0.35".

    Raises:
        ConfigError: the text is not a price.
    """
    match = re.fullmatch(r"([^\d\s.,/-]{0,4}\s?)(\d{0,9}\.?\d{1,9})\s*(/h)?", text.strip())
    if match is None:
        raise ConfigError(f"--price {text[:40]}: give an hour's price, such as 0.35/h or $0.35/h")
    currency = match[1].strip()
    return Price(float(match[2]), f"{currency} " if currency.isalpha() else currency)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Cost of the remainder of a run.

    Attributes:
        steps, tokens: remaining steps, and their tokens.
        seconds: time of steps and of waits for checkpoints; without evaluations.
        checkpoints: number of checkpoints, including the final one.
        written_bytes: bytes of checkpoints, and of state on the disk.
        money: price in `currency`; None if no price is known.
        per_hour: price of one host per hour.
        band: relative error of time and money that nine tenths of earlier plans stayed below;
            None if no such plan was measured.
        basis: the measurements behind `band`.
    """

    steps: int
    tokens: int
    seconds: float
    checkpoints: int
    written_bytes: int
    money: float | None
    per_hour: float
    currency: str
    band: float | None
    basis: str

    @property
    def text(self) -> str:
        """The cost in one line."""
        money = "" if self.money is None else f" and {self.currency}{self.money:.2f}"
        if money and not self.currency:
            money = f", cost {self.money:.2f} ({self.per_hour:g} per hour)"
        error = "" if self.band is None else f" ± {100 * self.band:.0f} %"
        count = f"{self.checkpoints} checkpoint{'s' if self.checkpoints > 1 else ''}"
        return (
            f"The run: {self.steps} steps, {format_count(self.tokens)} tokens, "
            f"{format_duration(self.seconds)}{money}{error} ({self.basis}); {count}, "
            f"{format_bytes(self.written_bytes)} written"
        )


def steps_for(job: Config, tokens: int) -> int:
    """Return the number of steps for this many tokens; 0: the job's steps."""
    return -(-tokens // job.batch_tokens) if tokens else job.train.steps


def run_cost(plan: Plan, *, tokens: int = 0, price: Price | None = None, done: int = 0) -> RunCost:
    """Return the cost of the remainder of a planned run.

    Args:
        tokens: tokens of the complete run; 0: those of the job's steps.
        done: completed steps.
    """
    job, step, save = plan.job, plan.prediction, plan.save
    steps, every = steps_for(job, tokens), job.train.checkpoint_every
    pause = Pause(every, 0.0 if save is None else save.stall_s)
    seconds = seconds_left(done, steps, step.seconds, [pause])
    checkpoints = max(pause.times(done, steps), 1)
    to_disk = plan.wear.per_step * plan.hosts if plan.disk else 0
    if plan.machine.on_cpu:
        band, basis = None, "on a CPU, where the error of plans is unknown"
    else:
        accuracy, what = accuracy_of_plans(plan.machine.gpu)
        band = accuracy.band
        basis = f"nine of ten of {accuracy.cells} {what}"
    return RunCost(
        steps=max(steps - done, 0),
        tokens=max(steps - done, 0) * job.batch_tokens,
        seconds=seconds,
        checkpoints=checkpoints,
        written_bytes=checkpoints * plan.checkpoint_bytes + max(steps - done, 0) * to_disk,
        money=None if price is None else seconds / _HOUR_S * plan.hosts * price.per_hour,
        per_hour=0.0 if price is None else price.per_hour,
        currency="" if price is None else price.currency,
        band=band,
        basis=basis,
    )
