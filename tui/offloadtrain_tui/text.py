"""Foreign text on one line, short formats of numbers, and words for lanes and owners of the log."""

from __future__ import annotations

import math
from datetime import datetime

from offloadtrain.boundary.sanitize import one_line
from offloadtrain.config import units
from offloadtrain.events import schema


def clean(text: str, limit: int = 2000) -> str:
    """Return untrusted text as one short, printable line."""
    return one_line(text[:limit]) + ("…" if len(text) > limit else "")


def local_time(time_s: float, form: str) -> str:
    """Format a Unix time with `strftime`; "?" for invalid times, which an untrusted log may
    contain."""
    try:
        return datetime.fromtimestamp(time_s).strftime(form)
    except (OverflowError, OSError, ValueError):
        return "?"


def short(value: float | None) -> str:
    """Format with about four digits: 2.314, 0.0003 → "3e-4", 65536 → "65.5k"; None → "-"."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return units.format_count(value) if size >= 1e4 else f"{value:.4g}"


def milliseconds(value: float | None) -> str:
    """Format a time: 12.3 → "12.3 ms", 2310 → "2.31 s"; "-" for None and non-finite values."""
    if value is None or not math.isfinite(value):
        return "-"
    return units.format_seconds(value / 1e3)


_OWNERS = {
    "exp_avg": "Adam m",
    "exp_avg_sq": "Adam v",
    "exp_avg_scale": "scales of Adam m",
    "exp_avg_sq_scale": "scales of Adam v",
    "correction": "low bits of weights",
}
"""Owner of memory in the log → the word for people."""


def owner_word(owner: str) -> str:
    return _OWNERS.get(owner, owner)


_LANES = {
    "compute": "compute",
    schema.WAIT: "waits",
    "d2h": "GPU→CPU",
    "host": "CPU Adam",
    "h2d": "CPU→GPU",
    "load": "streamed",
    "comm": "ranks",
    "ortho": "matrices",
    "update": "GPU state",
    "write": "saving",
    "disk_read": "disk→CPU",
    "disk_write": "CPU→disk",
    "disk_load": "disk→GPU",
    "data": "data",
}


_LANES_ON_CPU = {
    "d2h": "gradients",
    "h2d": "weights",
    "update": "state",
    "disk_load": "disk→CPU",
}


def is_on_cpu(start: schema.RunStarted | None) -> bool:
    return start is not None and start.plan.get("device") == "cpu"


def lane_word(lane: str, start: schema.RunStarted | None) -> str:
    """Return the displayed name of a lane, which depends on the run's device and update rule."""
    rule = start.plan.get("update_rule") if start else None
    if lane == "host" and isinstance(rule, str) and not rule.startswith("Adam"):
        return f"CPU {rule}"
    # The device is unknown before the log begins.
    return (_LANES if start and not is_on_cpu(start) else _LANES | _LANES_ON_CPU).get(lane, lane)


def percent(share: float) -> str:
    """Format a fraction: 0.973 → "97%", 0.004 → "0.4%"."""
    return f"{100 * share:.1f}%" if 0 < share < 0.1 else f"{100 * share:.0f}%"
