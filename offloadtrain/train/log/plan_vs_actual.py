"""Comparison of planned and measured figures at the end of a run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from offloadtrain.config.units import format_bytes
from offloadtrain.engine import StepReport
from offloadtrain.events.schema import MemoryRow, PlanRow
from offloadtrain.plan.plan import Plan
from offloadtrain.step.layout.tiers import Tier

APART = 0.10
"""Relative difference above which a warning is raised."""

_WARM_STEPS, _STEPS = 3, 200
_LEAST_S = 1e-3
"""Least time of a compared lane; less is its launches, which a plan does not count."""


class Hindsight:
    """Records a run's steps and compares them with its plan."""

    def __init__(self, plan: Plan, *, measured_rates: bool) -> None:
        """`measured_rates`: the plan's machine was measured, so times are compared too."""
        self._plan = plan
        self._measured_rates = measured_rates
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._busy: deque[Mapping[str, float]] = deque(maxlen=_STEPS)
        self._cold = _WARM_STEPS

    def step(self, report: StepReport, step_ms: float) -> None:
        """Record a step; the first few are warm-up."""
        if self._cold:
            self._cold -= 1
            return
        self._steps.append(step_ms / 1e3)
        self._busy.append(report.busy_ms)

    def rows(self, held: Sequence[MemoryRow]) -> tuple[PlanRow, ...]:
        """Return rows of bytes by tier and, if there were steps, of times."""
        return (*self._bytes(held), *self._times())

    def told(self, rows: Sequence[PlanRow]) -> tuple[str, list[str]]:
        """Return a line for all rows, and the rows to warn of."""
        shown = ", ".join(f"{row.what} {_ratio(row):.2f}" for row in rows)
        apart = [
            f"{row.what}: planned {_value(row, row.planned)}, found {_value(row, row.measured)}"
            for row in rows
            if abs(_ratio(row) - 1) > APART and (row.unit == "bytes" or self._measured_rates)
        ]
        return f"found / planned ({self._plan.name}): {shown}", apart

    def _bytes(self, rows: Sequence[MemoryRow]) -> Iterator[PlanRow]:
        on_cpu = self._plan.machine.on_cpu
        host = {k: v for k, v in self._plan.host.items() if k != "Python, torch"}
        device = self._plan.engine_device if on_cpu else self._plan.device
        for tier, planned in ((Tier.HOST, host), (Tier.DEVICE, device)):
            measured = sum(row.peak_bytes for row in rows if row.tier == tier.value)
            yield PlanRow(f"{tier.value} bytes", sum(planned.values()), measured, "bytes")

    def _times(self) -> Iterator[PlanRow]:
        if not self._steps:
            return
        predicted = self._plan.prediction
        yield PlanRow("step", predicted.seconds, statistics.median(self._steps), "s")
        for lane, planned in sorted(predicted.busy_s.items()):
            measured = statistics.median(busy.get(lane, 0.0) for busy in self._busy) / 1e3
            if planned > _LEAST_S and measured > 0:
                yield PlanRow(f"{lane} lane", planned, measured, "s")


def _ratio(row: PlanRow) -> float:
    return row.measured / row.planned if row.planned else 1.0


def _value(row: PlanRow, value: float) -> str:
    return format_bytes(value) if row.unit == "bytes" else f"{value:.3g} s"
