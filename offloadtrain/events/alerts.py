"""Alert rules, evaluated in the trainer so that they work without a monitor.

Each rule raises its alert once and clears it after a period of normal values, so a value that
oscillates around a limit raises one alert. Standard library only.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
"""Least bytes per step for a judgement about the bus."""
_MAD_TO_SIGMA = 1.4826
SLOW_RANK, NOT_SLOW_RANK, RANK_STEPS = 1.15, 1.08, 20
"""Limits on a rank's time relative to the others (raise, clear), and steps in its median."""
LEAST_SKEW_MS = 15.0
"""Largest difference in ms that load of the host alone causes between ranks with short steps."""


@dataclass(slots=True)
class _Rule:
    """State of one alert; `bad` and `good` count consecutive reports."""

    raised: bool = False
    message: str = ""
    bad: int = 0
    good: int = 0


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
        """Lane ("h2d", "d2h") → measured bandwidth of a large copy with an idle bus."""
        self._emit, self._clock = emit, clock
        self._lock = threading.Lock()
        self._rules: dict[str, _Rule] = {}
        self._changes: list[Alert] = []
        """Alerts to emit after the rules are evaluated."""
        self._history: dict[str, deque[Any]] = {}
        self._skipped = 0
        self._last_step: int | None = None
        self._last_step_s = 0.0
        self._swap_at_start: int | None = None
        self._checkpoint_bytes = 0

    def step(self, step: Step) -> None:
        """Evaluate the rules for an attempted step."""
        with self._evaluating():
            self._last_step, self._last_step_s = step.step, self._clock()
            self._check_step(step)

    def system(self, sample: System, free_disk_bytes: int | None = None) -> None:
        """Evaluate the rules for a sample of the machine, taken every few seconds."""
        with self._evaluating():
            self._check_machine(sample, free_disk_bytes)

    def standing(self, code: str, message: str) -> None:
        """Raise an alert that stays for the complete run."""
        with self._evaluating():
            self._report(code, message)

    def checkpoint(self, num_bytes: int) -> None:
        """Record the size of a saved checkpoint; the next one needs as much space."""
        self._checkpoint_bytes = num_bytes

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Hold the lock while rules are evaluated; emit their alerts after its release."""
        with self._lock:
            yield
            changes, self._changes = self._changes, []
        for alert in changes:
            self._emit(alert)

    def _report(
        self,
        code: str,
        problem: str | bool,
        *,
        level: str = "warning",
        after: int = 1,
        patience: int = 1,
    ) -> None:
        """Raise an alert after `after` consecutive problems; clear it after `patience` good
        reports. `problem`: a sentence; "" or False if there is none."""
        rule = self._rules.setdefault(code, _Rule())
        if not problem:
            rule.bad, rule.good = 0, rule.good + 1
            changes = rule.raised and rule.good >= patience
        else:
            rule.bad += 1
            changes = rule.bad >= after and not rule.raised
            if rule.bad >= after:
                rule.good, rule.message = 0, str(problem)
        if changes:
            rule.raised = not rule.raised
            state = "raised" if rule.raised else "cleared"
            self._changes.append(
                Alert(
                    code=code, state=state, message=rule.message, level=level, step=self._last_step
                )
            )

    def _limit(self, code: str, raises: float, clears: float) -> float:
        """Return the current limit of a value: `raises`, or `clears` while the alert is raised."""
        rule = self._rules.get(code)
        return clears if rule is not None and rule.raised else raises

    def _recent(self, name: str, length: int) -> deque[Any]:
        return self._history.setdefault(name, deque(maxlen=length))

    # ---- steps

    def _check_step(self, step: Step) -> None:
        number = step.step
        self._report("stall", "", level="error")
        self._report(
            "not-finite",
            not math.isfinite(step.loss) and f"the loss of step {number} is {step.loss}",
            level="error",
            patience=10,
        )
        self._skipped = self._skipped + 1 if step.skipped else 0
        self._report(
            "skips",
            self._skipped >= SKIPS_IN_A_ROW
            and f"{self._skipped} steps in a row were skipped: gradients are not finite",
        )
        scale = math.inf if step.loss_scale is None else step.loss_scale
        self._report(
            "loss-scale-floor",
            scale <= 1.0
            and f"the loss scale has fallen to {scale:g}: fp16 is too narrow for this run",
            level="error",
        )
        losses = self._recent("losses", SPIKE_HISTORY)
        self._report("loss-spike", spike(step.loss, number, losses, self._spike_score), patience=20)
        if math.isfinite(step.loss):
            losses.append(step.loss)
        self._check_throughput(step)
        for lane, most in self.calibrated_gbps.items():
            self._check_bus(lane, most, step)
        self._check_skew(step)
        self._recent("step_ms", 50).append(step.step_ms)

    def _check_throughput(self, step: Step) -> None:
        rates = self._recent("rates", 100)
        rates.append(step.tokens_per_s)
        if len(rates) < 60:
            return
        usual = statistics.median(list(rates)[:-10])
        now = statistics.median(list(rates)[-10:])
        self._report(
            "slower",
            now < self._limit("slower", SLOWER_THAN, WELL_AGAIN) * usual
            and f"{now:.0f} tokens/s over ten steps, {usual:.0f} before; look for other load",
            patience=10,
        )

    def _check_bus(self, lane: str, most: float, step: Step) -> None:
        moved = step.h2d_bytes if lane == "h2d" else step.d2h_bytes
        lanes = ("h2d", "load") if lane == "h2d" else (lane,)
        busy_ms = sum(step.busy_ms.get(name, 0.0) for name in lanes)
        if moved < BUS_BYTES or busy_ms <= 0:
            return
        rates = self._recent(lane, BUS_STEPS)
        rates.append(moved / busy_ms / 1e6)
        if len(rates) < BUS_STEPS:
            return
        code, now = f"bus-{lane}", statistics.median(rates)
        self._report(
            code,
            now < self._limit(code, SLOW_BUS, GOOD_BUS) * most
            and f"{lane} copies at {now:.1f} GB/s, but {most:.1f} GB/s were measured at the start: "
            "the bus is shared, or the memory is on another NUMA node",
        )

    def _check_skew(self, step: Step) -> None:
        """Check for a rank that is slower than the others, which wait for it at every step."""
        if len(step.ranks_ms) < 2:
            return
        recent = self._recent("ranks_ms", RANK_STEPS)
        recent.append(step.ranks_ms)
        if len(recent) < RANK_STEPS:
            return
        usual = [statistics.median(of_rank) for of_rank in zip(*recent, strict=True)]
        slowest = max(range(len(usual)), key=usual.__getitem__)
        other_ms = statistics.median(usual[:slowest] + usual[slowest + 1 :])
        limit_ms = self._limit("rank-skew", SLOW_RANK, NOT_SLOW_RANK) * other_ms
        self._report(
            "rank-skew",
            usual[slowest] > max(limit_ms, other_ms + LEAST_SKEW_MS)
            and f"rank {slowest} takes {usual[slowest]:.0f} ms per step and the others "
            f"{other_ms:.0f} ms, so they wait; look at its clocks, its link and its cores",
            patience=10,
        )

    # ---- the machine

    def _check_machine(self, sample: System, free_disk_bytes: int | None) -> None:
        if step_ms := self._history.get("step_ms"):
            usual_s, silent_s = statistics.median(step_ms) / 1e3, self._clock() - self._last_step_s
            self._report(
                "stall",
                silent_s >= max(STALL_S, STALL_FACTOR * usual_s)
                and f"no step for {format_duration(silent_s)}; a step takes "
                f"{format_duration(usual_s)}",
                level="error",
            )
        total, available = sample.host_total_bytes, sample.host_available_bytes
        self._report(
            "host-memory",
            0 < available < self._limit("host-memory", LOW_MEMORY, ENOUGH_MEMORY) * total
            and f"{format_bytes(available)} of {format_bytes(total)} of host memory is available: "
            "the kernel may end the run; free memory, or use a narrower offload.state",
            level="error",
        )
        if self._swap_at_start is None:
            self._swap_at_start = sample.swap_used_bytes
        grown = sample.swap_used_bytes - self._swap_at_start
        self._report(
            "swap",
            grown > SWAPPED_BYTES
            and f"{format_bytes(grown)} has been swapped out since the run began: steps will be "
            "slow",
        )
        needed = CHECKPOINT_ROOM * self._checkpoint_bytes
        free = math.inf if free_disk_bytes is None else free_disk_bytes
        self._report(
            "disk",
            free < needed
            and f"{format_bytes(free)} is free on the disk, but the next checkpoint needs "
            f"{format_bytes(needed)}: free some, or lower train.keep_last",
            level="error",
        )
        for gpu in sample.gpus:
            # An idle GPU also has a narrow link and low clocks, which is normal.
            if (gpu.utilization_percent or 0.0) > 50.0:
                for code, problem in (("link", _narrow(gpu)), ("throttle", gpu.throttle)):
                    text = problem and f"GPU {gpu.index}: {problem}"
                    self._report(f"{code}-gpu{gpu.index}", text, after=3, patience=3)


def spike(loss: float, step: int, losses: Collection[float], limit: float) -> str:
    """Return a description if the loss of a step is a spike, else "".

    Args:
        losses: finite losses of earlier steps; with fewer than SPIKE_AFTER there is no spike.
        limit: least distance of a spike above their median, in standard deviations, which are
            estimated from the median absolute deviation.
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
