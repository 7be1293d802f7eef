"""Finds what bounds a planned step, and which changes make it faster, by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offloadtrain.config.units import format_seconds
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.disk import with_rates
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.plan import Plan
from offloadtrain.plan.search.suggest import SAME, Change, single_changes

MOST = 3
"""Number of changes shown of each kind."""

PARTS: dict[str, tuple[str, ...]] = {
    "the GPU's arithmetic": ("bf16_tflops", "fp16_tflops", "fp32_tflops"),
    "the GPU's memory": ("hbm_gbps",),
    "the host's memory": (
        "dram_gbps",
        "shared_dram_gbps",
        "fp32_gparams",
        "split16_gparams",
        "int8_gparams",
        "fp32_copying_gparams",
        "split16_copying_gparams",
        "int8_copying_gparams",
    ),
    "the bus": ("h2d_gbps", "d2h_gbps", "host_link_gbps", "h2d_adam_gbps", "d2h_adam_gbps"),
    "the links between ranks": ("gpu_link_gbps", "node_link_gbps"),
}
"""Part of a machine → its rates in `Machine`."""

DRIVE = {"the drive": ("disk_read_gbps", "disk_write_gbps", "disk_both_gbps")}
"""As `PARTS`, if state is on the disk."""

NOTES = {
    ("offload.update", "delayed"): "one step of staleness",
    ("offload.state", "split16"): "rounds moments",
    ("offload.state", "int8"): "rounds masters and moments",
    ("offload.sums_down", "working"): "rounds the sum of microbatches",
    ("offload.compile_blocks", True): "rounds elsewhere",
}
"""Changes that affect the numerics of a run → their effect."""


@dataclass(frozen=True, slots=True)
class Why:
    """The bound of a step, and changes that would make it faster.

    Attributes:
        gains: part of the machine → relative gain of a step if that part were twice as fast (0.1
            for a tenth), largest first.
        changes: changes that keep the numerics of a run, with their separate gains, largest first.
        rounding: changes that affect the numerics.
    """

    plan: Plan
    gains: Mapping[str, float]
    changes: Sequence[tuple[Change, float]]
    rounding: Sequence[tuple[Change, float]]


def why(plan: Plan, trace: Trace | None = None) -> Why:
    """Simulate the plan with other rates and with changed keys."""
    machine, now = plan.machine, plan.prediction
    rated = with_rates(machine)
    gains = {
        part: now.seconds / replace(plan, machine=_twice(rated, rates)).prediction.seconds - 1
        for part, rates in (PARTS | (DRIVE if plan.disk else {})).items()
    }
    candidates = single_changes(plan.job, plan.name, machine, plan.ranks, trace)
    changes = [
        (change, change.plan.prediction.tokens_per_s / now.tokens_per_s - 1)
        for change in candidates
    ]
    helping = sorted((pair for pair in changes if pair[1] > SAME), key=lambda pair: -pair[1])
    keeping = [pair for pair in helping if not _note(pair[0])]
    noted = [pair for pair in helping if _note(pair[0])]
    largest_first = dict(sorted(gains.items(), key=lambda item: -item[1]))
    return Why(plan, largest_first, keeping[:MOST], noted[:MOST])


def text(answer: Why) -> str:
    """Return the answer as text."""
    lines = [*_bounds(answer), "what to change next, each alone (--set KEY=VALUE):"]
    lines += [f"  {_percent(gain):>6}  {change.text}" for change, gain in answer.changes]
    if not answer.changes:
        lines.append(f"  nothing that keeps the numbers of the run gains {_percent(SAME)}")
    lines += [
        f"  {_percent(gain):>6}  {change.text} ({_note(change)})"
        for change, gain in answer.rounding
    ]
    return "\n".join(lines)


def _bounds(answer: Why) -> list[str]:
    plan, (part, gain) = answer.plan.prediction, next(iter(answer.gains.items()))
    waits = sorted(plan.exposed_s.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{format_seconds(s)} for {lane}" for lane, s in waits if s > 0.001)
    bound_s, busiest = plan.bound
    return [
        f"what bounds the step: {part}; twice as fast saves {100 * gain / (1 + gain):.0f} % of it",
        f"  compute works {format_seconds(plan.busy_s['compute'])}; it waits {shown or 'never'}",
        f"  no schedule is faster than its busiest lane: {busiest}, "
        f"{format_seconds(bound_s)} of {format_seconds(plan.seconds)}",
        *(f"  {part} twice as fast: {_percent(gain)}" for part, gain in answer.gains.items()),
    ]


def as_json(answer: Why) -> dict[str, Any]:
    """Return the answer as plain values."""
    changes = [
        {"keys": change.keys, "gain": gain, "note": _note(change)}
        for change, gain in (*answer.changes, *answer.rounding)
    ]
    return {"gains_of_twice": dict(answer.gains), "changes": changes}


def _twice(machine: Machine, rates: Sequence[str]) -> Machine:
    return replace(machine, **{rate: 2 * getattr(machine, rate) for rate in rates})


def _note(change: Change) -> str:
    """Return how a change affects the numerics of a run; "" if it does not."""
    return ", ".join(note for (key, value), note in NOTES.items() if change.keys.get(key) == value)


def _percent(gain: float) -> str:
    return f"+{100 * gain:.0f} %"
