"""The words on the screen for the lanes of the log."""

from __future__ import annotations

from offloadtrain.events import schema

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


def lane_word(lane: str, rule: str = "") -> str:
    """Return the word for a lane. `rule`: the run's update rule, if it is not Adam's kind."""
    if lane == "host" and rule and not rule.startswith("Adam"):
        return f"CPU {rule}"
    return _LANES.get(lane, lane)


def percent(share: float) -> str:
    """0.973 → "97%", 0.004 → "0.4%"."""
    return f"{100 * share:.1f}%" if 0 < share < 0.1 else f"{100 * share:.0f}%"
