"""The header of every screen: run, progress, speed, time left."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.text import Text

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.history import set_up_line, set_up_words
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, milliseconds, percent, short
from offloadtrain_tui.verdict import (
    against_plan,
    bound_by,
    newest_loss,
    right_guesses,
    time_left_s,
)
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.drawn import RUN_COLORS

SIGNS = {
    "opening": "○",
    "starting": "○",
    "running": "●",
    "slow": "◐",
    "done": "✔",
    "stopped": "■",
    "failed": "✖",
    "killed": "✖",
    "unknown": "?",
}
ColorOf = dict[str, str]
WIDE_HEADLINE = 100
_WIDTH_WITHOUT_NAME = 46
"""Columns needed for state, step and progress."""
SHOWN_ALERTS = 2
TREND_STEPS = 20


def headline(shown: ViewState, colors: ColorOf, width: int = 120) -> Text:
    """Return name, state, progress and expected end, for `width` columns."""
    view, state, problem = shown.view, shown.state, shown.snapshot.problem
    name, room = clean(shown.snapshot.name), max(width - _WIDTH_WITHOUT_NAME, 12)
    if not state:  # no run: the name says which folder was searched
        return Text(f" {name}", "bold", overflow="ellipsis")
    total, progress = view.total_steps, f"  step {view.step}" if view.step else ""
    if total and view.step > total:
        progress = f"  step {view.step}, train.steps = {total}"  # resumed with fewer
    elif total:
        bar = f" {_bar(view.step / total)} " if width >= WIDE_HEADLINE else " "
        progress = f"  step {view.step}/{total}{bar}{100 * view.step / total:.1f}%"
    is_reading = not shown.snapshot.is_complete and state != "opening"
    return Text.assemble(
        (f" {name if len(name) <= room else f'{name[: room - 1]}…'} ", "bold"),
        (
            (f" REPLAY x{shown.speed:g} ", "reverse")
            if shown.at_s is not None and not shown.is_newest
            else (f"{SIGNS.get(state, '')} {state}", colors.get(state, ""))
        ),
        ", probably out of memory" if shown.snapshot.out_of_memory else "",
        (f"  {clean(problem, 100)}" if problem else "", "bold"),
        progress,
        _end(shown, state),
        ("  reading…" if is_reading else "", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _bar(share: float, cells: int = 20) -> str:
    eighths = round(8 * cells * min(max(share, 0.0), 1.0))
    full, part = divmod(eighths, 8)
    return f"▕{'█' * full}{' ▏▎▍▌▋▊▉'[part] if part else ''}".ljust(cells + 1) + "▏"


def _end(shown: ViewState, state: str) -> str:
    """Return when a running run will end, or when a run has ended and how long it took."""
    view = shown.view
    if shown.is_newest and (ending := shown.snapshot.ending):
        return f"  {ending.words(shown.now_s)}"
    if not shown.is_live or state not in runs.ALIVE or shown.snapshot.set_up:
        return ""
    if (left := time_left_s(view)) is None:
        return ""
    if not left:
        return "  ending"  # evaluation, checkpoint, end of the loggers
    at_s = (view.step_time_s or shown.now_s) + left
    ends = units.format_clock(max(at_s, shown.now_s), shown.now_s)
    return f"  ends {ends} ({units.format_duration(max(at_s - shown.now_s, 0.0))} left)"


def numbers(shown: ViewState, width: int = 120) -> Text:
    """Return the figures of the newest step, the most important first; figures that do not fit are
    left out."""
    view, is_narrow = shown.view, width < WIDE_HEADLINE  # the bound must fit a narrow line
    parts: list[str | tuple[str, str]] = [(f" {before_first_step(shown)}", "bold")]
    if not (view.is_before_first_step or (shown.is_live and shown.snapshot.set_up)):
        planned, bound, mfu = against_plan(view), bound_by(view), view.last("mfu")
        if is_narrow:
            planned = planned.partition("other programs")[0].removesuffix(", ")
            planned = planned.replace("% of", "%")
        bound = bound.replace("bound by", "bound:") if is_narrow else bound
        known = {
            "val": view.val_loss,
            "norm": view.last("grad_norm"),
            "lr": view.last("lr"),
            "scale": view.last("loss_scale"),
        }
        guesses = right_guesses(view)
        parts = [
            (f" loss {newest_loss(view)}{trend(view)}", "bold"),
            f"{'' if is_narrow else ' '} {short(view.last('tokens_per_s'))} tok/s",
            f", {planned}" if planned else "",
            (f"  {bound}" if bound else "", "bold"),
            f"  step {milliseconds(view.last('step_ms'))}",
            "" if mfu is None else f"  MFU {100 * mfu:.1f}%",
            *(f"  {label} {short(x)}" for label, x in known.items() if x is not None),
            "" if guesses is None else f"  guesses {percent(guesses)} right",
            (f"  {short(view.last('tokens'))} tokens", "dim"),
        ]
    line = Text(no_wrap=True, overflow="ellipsis")
    for part in filter(None, (Text.assemble(part) for part in parts)):
        if not line or line.cell_len + part.cell_len <= width:
            line.append(part)
    return line


def before_first_step(shown: ViewState) -> str:
    """Return the current activity of a run without steps."""
    view, state = shown.view, shown.state
    start = view.start
    if not state:
        return "this screen follows the first run that starts; until then it shows this machine"
    if shown.is_live and (now := shown.snapshot.set_up):
        return set_up_line(now, shown.now_s, is_over=state not in runs.ALIVE)
    if state not in runs.ALIVE or not shown.is_live:
        resumed_at = start.start_step if start else 0
        return f"no step since it resumed at {resumed_at}" if resumed_at else "no step yet"
    since_s = view.started_s
    if start is None or since_s is None or view.end is not None:
        return "setting up: its log begins when data, model and memory are ready"
    spent = units.format_duration(max(shown.now_s - since_s, 0.0))
    planned: Any = view.plan.get("step")
    seconds = planned.get("seconds") if isinstance(planned, dict) else None
    usual = f" of {units.format_duration(seconds)} as planned" if isinstance(seconds, float) else ""
    resumed = f", resumed after step {start.start_step}" if start.start_step else ""
    set_up = view.newest(schema.SetUp)
    before = f"; {set_up_words(set_up)}" if set_up else ""
    return f"first step: {spent}{usual}{resumed}{before}"


Parts = list[str | tuple[str, str]]
"""Texts of a line, optionally with styles."""


def when(shown: ViewState, colors: ColorOf, width: int = 120) -> Text:
    """Return, one line each, the screen's position in time (live, at a step, in a replay), how a
    run has ended, the overlaid runs, and active alerts, the newest first."""
    ending = shown.snapshot.ending if shown.is_newest else None
    saved: Parts = []
    if ending is not None and ending.saved:
        saved = [(ending.saved, "bold"), f"; {ending.next}" if ending.next else ""]
    overlaid: Parts = [("overlaid:", "dim")] if shown.other_runs else []
    for number, other in enumerate(shown.other_runs):
        color = colors.get(RUN_COLORS[number % len(RUN_COLORS)], "")
        overlaid += [
            (f" ━━ {clean(other.name)}", f"bold {color}"),
            f" loss {newest_loss(other.first)}",
        ]
    lines = (_position(shown, colors, width), saved, overlaid, _alerts(shown, colors, ending))
    return Text("\n", overflow="ellipsis").join(Text.assemble(*parts) for parts in lines if parts)


def _position(shown: ViewState, colors: ColorOf, width: int) -> Parts:
    """Return the position in time, or the reason why the run is slow or has failed."""
    view, state = shown.view, shown.snapshot.state
    if shown.at_s is not None:
        history = shown.newest.history
        position = units.format_duration(max(shown.at_s - history.first_time_s, 0.0))
        length = units.format_duration(history.last_time_s - history.first_time_s)
        text = f" {position} of {length} of a run that is {state}; Space: pause, End: its end"
        return [(" REPLAY ", "reverse"), (text, "dim")]
    if not shown.is_live:
        newest_s, moment = shown.newest.step_time_s or 0.0, view.step_time_s or 0.0
        ago = units.format_duration(max(newest_s - moment, 0.0))
        text = f"{ago} before the newest; End: {'live' if state in runs.ALIVE else 'its end'}"
        return [(f" ◀ step {view.step} ", "reverse"), (f" {text}", "dim")]
    if shown.snapshot.state == "slow" and (since_s := view.step_time_s) is not None:
        usual = milliseconds(view.median_step_ms())
        silent_s = units.format_duration(shown.now_s - since_s)
        return [(f"no step for {silent_s}; a step takes {usual}", "bold")]
    if (end := view.end) is not None and end.status == "failed" and end.message:
        return [(f"✖ {clean(end.message, 2 * width - 24)}", f"bold {colors.get('failed', '')}")]
    return []


def _alerts(shown: ViewState, colors: ColorOf, ending: runs.Ending | None) -> Parts:
    alerts = shown.view.active_alerts()
    parts: Parts = [("alerts at its end: ", "dim")] if alerts and ending else []
    for alert in alerts[: -SHOWN_ALERTS - 1 : -1]:
        color = colors.get("failed" if alert.level == "error" else "slow", "")
        parts.append((f"⚠ {clean(alert.code)}: {clean(alert.message, 200)}  ", f"bold {color}"))
    more = f"+{len(alerts) - SHOWN_ALERTS} (7) " if len(alerts) > SHOWN_ALERTS else ""
    return [*parts, (more + ("" if ending else "a: acknowledge"), "dim")] if alerts else []


def trend(view: View) -> str:
    """Return an arrow that compares the mean of the last losses with earlier ones; → within
    noise."""
    values = view.newest_values("loss", 2 * TREND_STEPS)
    before, after = values[:TREND_STEPS], values[TREND_STEPS:]
    if len(after) < TREND_STEPS or not all(map(math.isfinite, values)):
        return ""
    change = statistics.fmean(after) - statistics.fmean(before)
    noise = math.sqrt((statistics.variance(before) + statistics.variance(after)) / TREND_STEPS)
    return " →" if abs(change) <= 2 * noise else " ↓" if change < 0 else " ↑"
