"""What bounds a step, its speed relative to the plan, and the time left."""

from __future__ import annotations

import statistics
from array import array
from typing import Any

from offloadtrain.events import schema
from offloadtrain.events.time_left import Pause, seconds_left
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import lane_word, percent, short

RECENT_STEPS = 20
_CALM, _LEVEL, _BUSY = 0.05, 10.0, 0.25
_UNMEASURED = "(rates of "
"""Part of a machine's name if its rates were copied from a shipped machine."""
_LEAST_SHARE = 0.3
"""A cause with a smaller fraction of the step is not reported as its bound."""


def newest_loss(view: View) -> str:
    """Return the loss of the newest step, even if it is not finite."""
    values = view.history.series["loss"].values
    return short(values[view.length - 1]) if view.length else short(None)


def bound_by(view: View) -> str:
    """Return, for example, "bound by COMPUTE 97%, waits 0.4% (CPU Adam)"; "" if unknown."""
    parts = shares(view)
    if not parts:
        return ""
    first = max(parts, key=lambda lane: parts[lane])
    if parts[first] < _LEAST_SHARE:
        return ""
    text = f"bound by {lane_word(first, view.start).upper()} {percent(parts[first])}"
    waits = {lane: share for lane, share in parts.items() if lane not in ("compute", "data")}
    if first in waits:
        return f"{text}: compute waits, and works {percent(parts['compute'])}"
    waited = sum(waits.values())
    longest = max(waits, key=lambda lane: waits[lane], default="")
    return f"{text}, waits {percent(waited)}" + (
        f" ({lane_word(longest, view.start)})" if longest and waited >= 0.0005 else ""
    )


def shares(view: View) -> dict[str, float]:
    """Return the fractions of recent step time: compute, data, and waits for each lane."""
    step_ms = _recent(view, view.history.series["step_ms"].values)
    compute_ms = _recent(view, view.history.busy["compute"].values)
    if not step_ms or not compute_ms:
        return {}
    waited = _recent(view, view.history.series["exposed_ms"].values) / step_ms
    data_ms = _recent(view, view.history.series["data_ms"].values)
    by_cause = {"compute": min(compute_ms / step_ms, 1.0), "data": data_ms / step_ms}
    return by_cause | {lane: waited * part for lane, part in waited_for(view).items()}


def waited_for(view: View) -> dict[str, float]:
    """Return lane → fraction of compute's waits, from the newest sampled step. Without a sample,
    all waits are attributed to the busiest lane."""
    waits = view.spans.exposed_by_lane
    if total := sum(waits.values()):
        return {lane: spent / total for lane, spent in waits.items()}
    busy = {lane: view.busy_ms(lane) for lane in ("host", "d2h", "h2d", "load", "comm")}
    return {max(busy, key=lambda lane: busy[lane]): 1.0}


def is_calm(view: View) -> bool:
    """Return True if compute hardly waits and the gradient norm stays below ten times its
    median."""
    norms = view.newest_values("grad_norm", RECENT_STEPS)
    known = sorted(norm for norm in norms if norm == norm)
    waits = sum(share for lane, share in shares(view).items() if lane not in ("compute", "data"))
    is_level = not known or known[-1] <= _LEVEL * known[len(known) // 2]
    return waits < _CALM and is_level and len(known) == len(norms)


def right_guesses(view: View) -> float | None:
    """Return the fraction of recent speculative updates that were correct; None without any."""
    known = [x for x in view.newest_values("speculation_hit", RECENT_STEPS) if x == x]
    return statistics.fmean(known) if known else None


def against_plan(view: View) -> str:
    """Return the speed as a percentage of the planned speed; if it is much slower, also the CPU use
    of other programs; "" without a plan. On a CPU that `doctor` has not measured, omit the
    percentage."""
    planned: Any = view.plan.get("step")
    seconds = planned.get("seconds") if isinstance(planned, dict) else None
    step_ms = view.median_step_ms(RECENT_STEPS)
    if not isinstance(seconds, float | int) or not seconds > 0 or not step_ms:
        return ""
    share, others = 1e3 * seconds / step_ms, _other_programs(view)
    if view.on_cpu and _UNMEASURED in str(view.plan.get("machine")):
        return others
    if share >= 0.5:
        return f"{100 * share:.0f}% of plan"
    slower = f"{1 / share:.{0 if share <= 0.1 else 1}f}x slower than plan"
    return ", ".join(filter(None, (slower, others)))


def _other_programs(view: View) -> str:
    """Return, for example, "other programs use 93% of the CPU"; "" below a quarter."""
    sample = view.system
    if sample is None or not sample.host_cpus or view.start is None:
        return ""
    share = sample.host_cpu_percent - view.start.world_size * sample.cpu_percent
    share /= 100 * sample.host_cpus
    return f"other programs use {percent(share)} of the CPU" if share >= _BUSY else ""


def time_left_s(view: View) -> float | None:
    """Return the seconds until the run ends, including evaluations and checkpoints."""
    total, step_ms = view.total_steps, view.median_step_ms()
    if total is None or step_ms is None:
        return None
    evaluation = view.newest(schema.Eval)
    evaluation_s = evaluation.duration_ms / 1e3 if evaluation else 0.0
    eval_every = view.setting("train", "eval_every")
    save_every = view.setting("train", "checkpoint_every")
    both = bool(eval_every and save_every and save_every % eval_every == 0)
    stalled_s = _checkpoint_stall_s(view, save_every) - (evaluation_s if both else 0.0)
    pauses = Pause(eval_every, evaluation_s), Pause(save_every, max(stalled_s, 0.0))
    left_s = seconds_left(view.step, total, step_ms / 1e3, pauses)
    train: Any = view.start.config.get("train") if view.start else None
    limit_s = train.get("max_s") if isinstance(train, dict) else None
    if isinstance(limit_s, float) and limit_s > 0 and view.step_time_s and view.started_s:
        left_s = min(left_s, max(limit_s - (view.step_time_s - view.started_s), 0.0))
    return left_s


def _checkpoint_stall_s(view: View, every: int) -> float:
    """Return the time from the newest checkpoint's step to the next step, without the duration of
    that step itself."""
    steps, series = view.history.steps, view.history.series["step_ms"]
    if not every:
        return 0.0
    for position in range(view.length - 2, max(view.length - 2 - every, -1), -1):
        if steps.values[position] % every == 0:
            apart_s = steps.times[position + 1] - steps.times[position]
            return max(apart_s - series.values[position + 1] / 1e3, 0.0)
    return 0.0


def _recent(view: View, values: array[float]) -> float:
    """Return the sum of the recent steps' values; missing values count as 0."""
    chunk = values[max(view.length - RECENT_STEPS, 0) : view.length]
    return sum(value for value in chunk if value == value)
