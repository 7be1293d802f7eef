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
    """Return the README's table: every measured step."""
    return _sections(files, _STEPS)


def everything(files: Sequence[ResultsFile]) -> str:
    """Return all tables: steps, plans, memory, goals, rates and failed measurements."""
    return _sections(files, _STEPS, _PLANS, _HOST, _GOALS, _MACHINES, _MISSING)


Section = tuple[str, Sequence[str], Callable[[ResultsFile], Rows]]


def _sections(files: Sequence[ResultsFile], *sections: Section) -> str:
    """Return each file's note and non-empty tables."""
    paragraphs = []
    for file in files:
        paragraphs.append(f"`{file.name}`: {file.note or file.device}")
        for title, head, rows_of in sections:
            rows = list(rows_of(file))
            if rows:
                paragraphs.append(f"**{title}**\n\n" + _table(head, rows))
    return "\n\n".join(paragraphs) or NOTHING


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


def _step_rows(file: ResultsFile) -> Rows:
    for result in file.steps:
        figures = result.figures
        yield (
            result.name,
            f"`{result.group}`",
            _seconds(figures["step_s"]),
            format_count(figures["tokens_per_s"]),
            _percent(file.rate_over_resident(result)),
            _percent(figures.get("mfu")),
            _bytes(figures, "device_peak_bytes"),
            _bytes(figures, "host_bytes"),
        )


def _plan_rows(file: ResultsFile) -> Rows:
    for result in file.steps:
        if result.planned:
            planned_s, measured_s = result.planned["step_s"], result.figures["step_s"]
            ratio = f"{measured_s / planned_s:.2f}"
            exposed = _exposed(result.figures)
            right = _percent(result.figures.get("right_guesses"))
            yield result.name, _seconds(planned_s), _seconds(measured_s), ratio, exposed, right


def _host_rows(file: ResultsFile) -> Rows:
    for result in file.steps:
        if "anonymous_bytes" in result.figures:
            ledger, process = result.figures["host_bytes"], result.figures["anonymous_bytes"]
            sizes = format_bytes(ledger), format_bytes(process)
            yield result.name, *sizes, f"{process / ledger:.2f}"


def _machine_rows(file: ResultsFile) -> Rows:
    bus = file.machine.get("bus_gbps", {})
    rates = file.machine.get("machine", {})
    for name in ("h2d", "d2h", "both"):
        if name in bus:
            yield f"pinned copies, {name}", f"{bus[name]:.1f} GB/s"
    if rates:
        yield "DRAM, streamed by all cores", f"{rates['dram_gbps']:.1f} GB/s"
    for threads, by_state in file.machine.get("adam_gparams", {}).items():
        text = ", ".join(f"{state} {rate:.2f}" for state, rate in by_state.items())
        yield f"Adam, threads: {threads}", f"{text} Gparam/s"


def _missing_rows(file: ResultsFile) -> Rows:
    for name, why in file.missing.items():
        yield name, why.splitlines()[-1].replace("|", "\\|")


def _seconds(step_s: float) -> str:
    return f"{step_s:.3f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _bytes(figures: Any, key: str) -> str:
    value = figures.get(key)
    return "-" if value is None else format_bytes(value)


def _exposed(figures: Any) -> str:
    """Format "12 ms (h2d 9, host 3)" without lanes below half a millisecond."""
    if "exposed_ms" not in figures:
        return "-"
    lanes = sorted(figures["exposed_by_lane"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{lane} {spent:.0f}" for lane, spent in lanes if spent >= 0.5)
    return f"{figures['exposed_ms']:.0f} ms" + (f" ({named})" if named else "")


_GOALS = ("Goals", ("goal", "wanted", "measured", "met"), _goal_rows)
_PLANS = (
    "Planned with the machine's measured rates",
    ("what", "planned", "measured", "measured / planned", "compute waited", "right guesses"),
    _plan_rows,
)
_HOST = (
    "Host memory: the Ledger, and the most anonymous memory that the process added",
    ("what", "Ledger", "process", "process / Ledger"),
    _host_rows,
)
_MACHINES = ("The machine", ("what", "rate"), _machine_rows)
_STEPS = (
    "Steps, with the rate as a share of the same model resident on the same card",
    ("what", "group", "step", "tokens/s", "of resident", "MFU", "device", "host"),
    _step_rows,
)
_MISSING = ("Not measured", ("what", "why"), _missing_rows)
