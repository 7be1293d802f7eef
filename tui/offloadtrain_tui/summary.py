"""The header of every screen: run, progress, speed, time left."""

from __future__ import annotations

from rich.text import Text

from offloadtrain.config import units
from offloadtrain_tui.history import View
from offloadtrain_tui.text import clean, milliseconds, short
from offloadtrain_tui.view_state import ViewState

SIGNS = {
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


def headline(shown: ViewState, colors: ColorOf) -> Text:
    """Return name, state, step and time left."""
    view, state = shown.view, shown.state
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f" {clean(shown.snapshot.name)} ", "bold")
    text.append(f"{SIGNS[state]} {state}", colors.get(state, ""))
    if shown.snapshot.out_of_memory:
        text.append(", probably out of memory")
    for why in shown.snapshot.refused[:1]:
        text.append(f"  not read: {clean(why, 80)}", "bold")
    total = view.total_steps
    if total:
        text.append(f"  step {view.step}/{total} {100 * view.step / total:.1f}%")
    elif view.step:
        text.append(f"  step {view.step}")
    if shown.is_live and state in ("running", "slow") and (left := view.seconds_left()) is not None:
        text.append(f"  {units.format_duration(left)} left")
    if not shown.snapshot.whole:
        text.append("  reading…", "dim")
    return text


def numbers(shown: ViewState) -> Text:
    """Return the figures of the newest step."""
    view = shown.view
    text = Text(no_wrap=True, overflow="ellipsis")
    if not view.length:
        text.append(" no step yet", "dim")
        return text
    text.append(f" loss {short(view.last('loss'))}{trend(view)}", "bold")
    if view.val_loss is not None:
        text.append(f"  val {short(view.val_loss)}")
    for label, field in (("norm", "grad_norm"), ("lr", "lr"), ("scale", "loss_scale")):
        if (value := view.last(field)) is not None:
            text.append(f"  {label} {short(value)}")
    text.append(f"  {short(view.last('tokens_per_s'))} tok/s")
    if (mfu := view.last("mfu")) is not None:
        text.append(f"  MFU {100 * mfu:.1f}%")
    text.append(f"  step {milliseconds(view.last('step_ms'))}")
    text.append(f", exposed {milliseconds(view.last('exposed_ms'))}")
    text.append(f"  {short(view.last('tokens'))} tokens", "dim")
    return text


def when(shown: ViewState) -> Text:
    """Return the screen's position in time (live, at a step, in a replay) and active alerts."""
    text = Text(no_wrap=True, overflow="ellipsis")
    alerts = shown.view.active_alerts()
    if not shown.is_live:
        text.append(" ◀ step ", "reverse")
        text.append(f"{shown.view.step} ", "reverse")
        if (moment := shown.view.step_time_s) is not None:
            ago = max((shown.newest.step_time_s or moment) - moment, 0.0)
            text.append(f" {units.format_duration(ago)} before the newest; End: live", "dim")
    elif silent := _silence(shown):
        text.append(f" {silent}", "bold")
    for alert in alerts[-3:]:
        text.append(f"  ⚠ {clean(alert.code)}: {clean(alert.message, 120)}", "bold")
    return text


def trend(view: View) -> str:
    """Return an arrow: the mean of the last ten losses against the ten before."""
    values = [v for v in view.history.series["loss"].values[max(view.length - 20, 0) : view.length]]
    if len(values) < 20:
        return ""
    before, after = sum(values[:10]), sum(values[10:])
    if before != before or after != after:
        return ""
    change = (after - before) / (abs(before) or 1.0)
    return " ↓" if change < -1e-3 else " ↑" if change > 1e-3 else " →"


def _silence(shown: ViewState) -> str:
    since = shown.view.step_time_s
    if shown.snapshot.state != "slow" or since is None:
        return ""
    usual = milliseconds(shown.view.median_step_ms())
    return f"no step for {units.format_duration(shown.now_s - since)}; a step takes {usual}"
