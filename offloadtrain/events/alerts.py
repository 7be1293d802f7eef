"""Alert rules, evaluated in the trainer so that they work without a monitor.

Each rule raises its alert once and clears it after a while of normal values, so a value that
oscillates around a limit is one alert. Standard library only.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from offloadtrain.config.units import format_bytes, format_duration
from offloadtrain.events.schema import Alert, GpuSample, Step, System

SPIKE_SCORE, SPIKE_AFTER, SPIKE_HISTORY = 8.0, 30, 100
SLOWER_THAN, WELL_AGAIN = 0.8, 0.9
STALL_S, STALL_FACTOR = 30.0, 4.0
LOW_MEMORY, ENOUGH_MEMORY = 0.05, 0.08
SWAPPED_BYTES = 64 << 20
SKIPS_IN_A_ROW = 4
CHECKPOINT_ROOM = 1.2
SLOW_BUS, GOOD_BUS, BUS_STEPS = 0.7, 0.8, 20
BUS_BYTES = 64 << 20
"""Fewer bytes per step say nothing about the bus."""
_MAD_TO_SIGMA = 1.4826
SLOW_RANK, NOT_SLOW_RANK, RANK_STEPS = 1.15, 1.08, 20
"""Number of steps in the median of a rank's time over the others'."""


@dataclass(slots=True)
class _Switch:
    """The state of one alert; it clears after `patience` good reports in a row."""

    code: str
    level: str = "warning"
    patience: int = 1
    raised: bool = False
    message: str = ""
    _good: int = 0

    def report(self, problem: str, step: int | None = None) -> Iterable[Alert]:
        """`problem`: "" if there is none."""
        if problem:
            self._good, self.message = 0, problem
            if not self.raised:
                self.raised = True
                yield self._alert("raised", step)
        elif self.raised:
            self._good += 1
            if self._good >= self.patience:
                self.raised = False
                yield self._alert("cleared", step)

    def _alert(self, state: str, step: int | None) -> Alert:
        return Alert(code=self.code, state=state, message=self.message, level=self.level, step=step)


@dataclass(slots=True)
class _Steps:
    """The rules' memory of past steps."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_HISTORY))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    gbps: dict[str, deque[float]] = field(default_factory=dict)
    ranks_ms: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=RANK_STEPS))
    skipped: int = 0
    last: Step | None = None
    last_s: float | None = None


class Alerts:
    """The rules of one run. Steps and samples may come from two threads."""

    def __init__(
        self,
        emit: Callable[[Alert], None],
        clock: Callable[[], float],
        spike_score: float = SPIKE_SCORE,
    ) -> None:
        """`clock`: monotonic seconds. `spike_score`: see `spike`."""
        self._spike_score = spike_score
        self.calibrated_gbps: dict[str, float] = {}
        """Lane ("h2d", "d2h") → measured bandwidth of a large copy alone on the bus."""
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = _Steps()
        self._swap_at_start: int | None = None
        self._switches: dict[str, _Switch] = {}
        self._bad_samples: dict[str, int] = {}
        self._checkpoint_bytes = 0

    def step(self, step: Step) -> None:
        """A step was tried."""
        self._report(self._of_step(step))

    def system(self, sample: System, free_disk_bytes: int | None = None) -> None:
        """A sample of the machine, some seconds after the last one."""
        self._report(self._of_system(sample, free_disk_bytes))

    def standing(self, code: str, message: str) -> None:
        """Raise an alert that lasts for the whole run."""
        self._report(self._switch(code).report(message))

    def _report(self, rules: Iterable[Alert]) -> None:
        """Evaluate rules, which are generators, under the lock; emit their alerts outside of it."""
        with self._lock:
            alerts = list(rules)
        for alert in alerts:
            self._emit(alert)

    def checkpoint(self, num_bytes: int) -> None:
        """Note the size of a saved checkpoint; the next will be as large."""
        self._checkpoint_bytes = num_bytes

    # ---- steps

    def _of_step(self, step: Step) -> Iterable[Alert]:
        steps, number = self._steps, step.step
        steps.skipped = steps.skipped + 1 if step.skipped else 0
        yield from self._switch("stall").report("", number)
        yield from self._switch("not-finite", "error", 10).report(_not_finite(step), number)
        yield from self._switch("skips", patience=1).report(_skips(steps.skipped), number)
        yield from self._switch("loss-scale-floor", "error").report(_floor(step), number)
        yield from self._switch("loss-spike", patience=20).report(self._spike(step), number)
        steps.rates.append(step.tokens_per_s)
        yield from self._throughput(number)
        for lane, most in self.calibrated_gbps.items():
            yield from self._bus(lane, most, step)
        yield from self._skew(step)
        steps.step_ms.append(step.step_ms)
        steps.last, steps.last_s = step, self._clock()

    def _spike(self, step: Step) -> str:
        losses = self._steps.losses
        problem = spike(step.loss, step.step, losses, self._spike_score)
        if math.isfinite(step.loss):
            losses.append(step.loss)
        return problem

    def _throughput(self, number: int) -> Iterable[Alert]:
        rates = list(self._steps.rates)
        if len(rates) < 60:
            return
        usual, now = statistics.median(rates[:-10]), statistics.median(rates[-10:])
        switch = self._switch("slower", patience=10)
        limit = WELL_AGAIN if switch.raised else SLOWER_THAN
        slow = now < limit * usual
        text = f"{now:.0f} tokens/s over ten steps, {usual:.0f} before; look for other load"
        yield from switch.report(text if slow else "", number)

    def _bus(self, lane: str, most: float, step: Step) -> Iterable[Alert]:
        moved = step.h2d_bytes if lane == "h2d" else step.d2h_bytes
        busy_ms = step.busy_ms.get(lane, 0.0)
        if lane == "h2d":
            busy_ms += step.busy_ms.get("load", 0.0)
        if moved < BUS_BYTES or busy_ms <= 0:
            return
        rates = self._steps.gbps.setdefault(lane, deque(maxlen=BUS_STEPS))
        rates.append(moved / busy_ms / 1e6)
        if len(rates) < BUS_STEPS:
            return
        switch, now = self._switch(f"bus-{lane}"), statistics.median(rates)
        slow = now < (GOOD_BUS if switch.raised else SLOW_BUS) * most
        text = (
            f"{lane} copies at {now:.1f} GB/s, but {most:.1f} GB/s were measured at the start: the "
            "bus is shared, or the memory is on another NUMA node"
        )
        yield from switch.report(text if slow else "", step.step)

    def _skew(self, step: Step) -> Iterable[Alert]:
        """Check for a slow rank that all others wait for at every step."""
        recent = self._steps.ranks_ms
        if len(step.ranks_ms) < 2:
            return
        recent.append(step.ranks_ms)
        if len(recent) < RANK_STEPS:
            return
        usual = [statistics.median(of_rank) for of_rank in zip(*recent, strict=True)]
        slowest = max(range(len(usual)), key=usual.__getitem__)
        other_ms = statistics.median(usual[:slowest] + usual[slowest + 1 :])
        switch = self._switch("rank-skew", patience=10)
        limit = NOT_SLOW_RANK if switch.raised else SLOW_RANK
        text = (
            f"rank {slowest} takes {usual[slowest]:.0f} ms per step and the others "
            f"{other_ms:.0f} ms, so they wait; look at its GPU's clocks, its link and its cores"
        )
        yield from switch.report(text if usual[slowest] > limit * other_ms else "", step.step)

    # ---- the machine

    def _of_system(self, sample: System, free_disk_bytes: int | None) -> Iterable[Alert]:
        last = self._steps.last
        number = last.step if last else None
        yield from self._switch("stall", "error").report(self._stall(), number)
        yield from self._memory(sample, number)
        yield from self._swap(sample, number)
        yield from self._switch("disk", "error").report(self._disk(free_disk_bytes), number)
        for gpu in sample.gpus:
            yield from self._gpu(gpu, number)

    def _stall(self) -> str:
        steps = self._steps
        if steps.last_s is None or not steps.step_ms:
            return ""
        usual_s = statistics.median(steps.step_ms) / 1e3
        silent_s = self._clock() - steps.last_s
        if silent_s < max(STALL_S, STALL_FACTOR * usual_s):
            return ""
        return f"no step for {format_duration(silent_s)}; a step takes {format_duration(usual_s)}"

    def _memory(self, sample: System, number: int | None) -> Iterable[Alert]:
        switch = self._switch("host-memory", "error")
        limit = ENOUGH_MEMORY if switch.raised else LOW_MEMORY
        total, available = sample.host_total_bytes, sample.host_available_bytes
        low = 0 < total and 0 < available < limit * total
        text = (
            f"{format_bytes(available)} of {format_bytes(total)} of host memory is available: the "
            "kernel may end the run; free memory, or use a narrower offload.state"
        )
        yield from switch.report(text if low else "", number)

    def _swap(self, sample: System, number: int | None) -> Iterable[Alert]:
        if self._swap_at_start is None:
            self._swap_at_start = sample.swap_used_bytes
        grown = sample.swap_used_bytes - self._swap_at_start
        text = f"{format_bytes(grown)} has been swapped out since the run began: steps will be slow"
        yield from self._switch("swap").report(text if grown > SWAPPED_BYTES else "", number)

    def _disk(self, free_bytes: int | None) -> str:
        needed = CHECKPOINT_ROOM * self._checkpoint_bytes
        if free_bytes is None or free_bytes >= needed:
            return ""
        return (
            f"{format_bytes(free_bytes)} is free on the disk, but the next checkpoint needs "
            f"{format_bytes(needed)}: free some, or lower train.keep_last"
        )

    def _gpu(self, gpu: GpuSample, number: int | None) -> Iterable[Alert]:
        """Check GPUs for lasting problems: an idle GPU also has a narrow link and low clocks."""
        busy = (gpu.utilization_percent or 0.0) > 50.0
        if not busy:
            return
        for code, problem in (("link", _narrow(gpu)), ("throttle", gpu.throttle)):
            switch = self._switch(f"{code}-gpu{gpu.index}", patience=3)
            text = f"GPU {gpu.index}: {problem}" if problem else ""
            count = self._bad_samples.get(switch.code, 0) + 1 if text else 0
            self._bad_samples[switch.code] = count
            if not text or count >= 3:
                yield from switch.report(text, number)

    def _switch(self, code: str, level: str = "warning", patience: int = 1) -> _Switch:
        return self._switches.setdefault(code, _Switch(code, level, patience))


def _not_finite(step: Step) -> str:
    return "" if math.isfinite(step.loss) else f"the loss of step {step.step} is {step.loss}"


def _skips(count: int) -> str:
    if count < SKIPS_IN_A_ROW:
        return ""
    return f"{count} steps in a row were skipped: gradients are not finite"


def _floor(step: Step) -> str:
    if step.loss_scale is None or step.loss_scale > 1.0:
        return ""
    return f"the loss scale has fallen to {step.loss_scale:g}: fp16 is too narrow for this run"


def spike(loss: float, step: int, losses: Collection[float], limit: float) -> str:
    """Tell whether the loss of a step is a spike: the problem, or "".

    Args:
        losses: of earlier steps, finite; with fewer than SPIKE_AFTER nothing is one.
        limit: a spike lies so many standard deviations above their median, estimated from the
            median of distances to it.
    """
    if len(losses) < SPIKE_AFTER or not math.isfinite(loss):
        return ""
    middle = statistics.median(losses)
    spread = statistics.median(abs(value - middle) for value in losses) * _MAD_TO_SIGMA
    spread = max(spread, 1e-3 * abs(middle))
    score = (loss - middle) / spread if spread else 0.0
    if score < limit:
        return ""
    return f"loss {loss:.4g} at step {step}, {middle:.4g} before (score {score:.0f})"


def _narrow(gpu: GpuSample) -> str:
    width, most = gpu.pcie_width, gpu.pcie_width_max
    generation, best = gpu.pcie_generation, gpu.pcie_generation_max
    if width is not None and most is not None and width < most:
        return f"its link has {width} lanes of {most}"
    if generation is not None and best is not None and generation < best:
        return f"its link runs at PCIe {generation} of {best}"
    return ""
