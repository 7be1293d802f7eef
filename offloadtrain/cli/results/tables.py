"""Results files as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from offloadtrain.cli.results.goals import GOALS, Goal
from offloadtrain.cli.results.read import ResultsFile
from offloadtrain.config.units import format_bytes, format_count

NOTHING = "Nothing has been measured on a GPU yet."

Rows = Iterable[Sequence[str]]


def summary(files: Sequence[ResultsFile]) -> str:
    """Return the README's tables: goals, pairs, rates, the largest models, curves."""
    return _sections(files, _GOALS, _PAIRS, _LARGEST, _CURVES, _MACHINES)


def everything(files: Sequence[ResultsFile]) -> str:
    """Return all tables, with every measured step and every failed measurement."""
    return _sections(files, _GOALS, _PAIRS, _LARGEST, _CURVES, _MACHINES, _STEPS, _MISSING)


Section = tuple[str, Sequence[str], Callable[[ResultsFile], Rows]]


def _sections(files: Sequence[ResultsFile], *sections: Section) -> str:
    """Return the non-empty tables, with columns for the GPU and the file."""
    if not files:
        return NOTHING
    found = []
    for title, head, rows_of in sections:
        rows = [(file.device, *row, f"`{file.name}`") for file in files for row in rows_of(file)]
        if rows:
            found.append(f"**{title}**\n\n" + _table(("GPU", *head, "file"), rows))
    return "\n\n".join(found) or NOTHING


def _table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _goal_rows(file: ResultsFile) -> Rows:
    for goal in GOALS:
        value = goal.worst(file)
        if value is None:
            yield goal.what, _limit(goal), "not measured", "-"
        else:
            met = "yes" if goal.is_met(value) else "no"
            yield goal.what, _limit(goal), _of_goal(goal, value), met


def _limit(goal: Goal) -> str:
    return ("≤ " if goal.at_most else "≥ ") + _of_goal(goal, goal.limit)


def _of_goal(goal: Goal, value: float) -> str:
    return f"{100 * value:.0f} %" if goal.percent else f"{value:.2f}"


def _pair_rows(file: ResultsFile) -> Rows:
    for pair in file.pairs:
        ours, theirs = pair.ours.figures, pair.theirs.figures
        yield (
            pair.ours.name,
            pair.theirs.name,
            f"{_seconds(ours)} / {_seconds(theirs)}",
            f"{pair.ratio:.2f}",
            f"{_bytes(ours, 'device_peak_bytes')} / {_bytes(theirs, 'device_peak_bytes')}",
        )


def _step_rows(file: ResultsFile) -> Rows:
    for one in file.steps:
        figures = one.figures
        yield (
            one.name,
            _seconds(figures),
            format_count(figures["tokens_per_s"]),
            f"{figures['tflops']:.0f}",
            _percent(figures.get("mfu")),
            _exposed(figures),
            _ratio(figures["step_s"], one.planned.get("step_s")),
            _bytes(figures, "device_peak_bytes"),
            _bytes(figures, "host_bytes"),
        )


def _largest_rows(file: ResultsFile) -> Rows:
    for name, one in file.largest.items():
        yield (
            name.removeprefix("largest "),
            format_count(one.figures["params"]),
            one.option("state", "fp32"),
            _bytes(one.figures, "device_peak_bytes"),
            _bytes(one.figures, "host_bytes"),
            _seconds(one.figures),
        )


def _curve_rows(file: ResultsFile) -> Rows:
    resident = next((c.losses for c in file.curves if c.case == "resident"), None)
    for curve in file.curves:
        steps = f"{curve.every * len(curve.losses)}"
        apart = "-"
        if resident is not None and len(resident) == len(curve.losses):
            pairs = zip(curve.losses, resident, strict=True)
            apart = f"{max(abs(a - b) for a, b in pairs):.4f}"
        yield curve.case, steps, f"{curve.losses[-1]:.4f}", apart


def _machine_rows(file: ResultsFile) -> Rows:
    bus = file.machine.get("bus_gbps", {})
    rates = file.machine.get("machine", {})
    for name in ("h2d", "d2h", "both"):
        if name in bus:
            yield f"pinned copies, {name}", f"{bus[name]:.1f} GB/s"
    if rates:
        yield "DRAM, streamed by all cores", f"{rates['dram_gbps']:.1f} GB/s"
    for threads, by_state in file.machine.get("adam_gparams", {}).items():
        told = ", ".join(f"{state} {rate:.2f}" for state, rate in by_state.items())
        yield f"Adam, threads: {threads}", f"{told} Gparam/s"


def _missing_rows(file: ResultsFile) -> Rows:
    for name, why in file.missing.items():
        yield name, why.splitlines()[-1].replace("|", "\\|")


def _seconds(figures: Any) -> str:
    return f"{figures['step_s']:.3f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _bytes(figures: Any, key: str) -> str:
    value = figures.get(key)
    return "-" if value is None else format_bytes(value)


def _ratio(above: float, below: float | None) -> str:
    return "-" if not below else f"{above / below:.2f}"


def _exposed(figures: Any) -> str:
    """Format "12 ms (h2d 9, host 3)" without lanes below half a millisecond."""
    if "exposed_ms" not in figures:
        return "-"
    lanes = sorted(figures["exposed_by_lane"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{lane} {spent:.0f}" for lane, spent in lanes if spent >= 0.5)
    return f"{figures['exposed_ms']:.0f} ms" + (f" ({named})" if named else "")


_GOALS = ("Goals", ("goal", "wanted", "measured", "met"), _goal_rows)
_PAIRS = (
    "In turn in one process: median of the ratios of their step to ours",
    ("ours", "other", "step, ours / other", "ratio", "device, ours / other"),
    _pair_rows,
)
_LARGEST = (
    "The largest model that trains",
    ("under", "parameters", "state", "device", "host", "step"),
    _largest_rows,
)
_CURVES = (
    "A 124M GPT on Python's standard library",
    ("case", "steps", "last loss", "most from resident"),
    _curve_rows,
)
_MACHINES = ("The machine", ("what", "rate"), _machine_rows)
_STEPS = (
    "Steps",
    (
        "what",
        "step",
        "tokens/s",
        "TFLOPS",
        "MFU",
        "exposed",
        "step / plan",
        "device",
        "host",
    ),
    _step_rows,
)
_MISSING = ("Not measured", ("what", "why"), _missing_rows)
