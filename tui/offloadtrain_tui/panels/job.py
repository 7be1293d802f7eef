"""8: the resolved job, the plan, the machine and the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Static

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.text import clean, owner_word, short
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.table import tell

_SIZES = ("memory.", "activations.")
"""Prefixes of the plan's keys with values in bytes."""
_TIMES = ("step.seconds", "step.busy_s.", "step.exposed_s.", "step.sent.")
"""Prefixes of the plan's keys with values in seconds."""


class JobPanel(Panel):
    """The configuration and facts logged at the run's start."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="job-scroll"):
            yield Static(id="job-top")
            with Horizontal(id="job-columns"):
                yield Static(id="job-left")
                yield Static(id="job-right")

    def display_state(self, shown: ViewState) -> None:
        start = shown.view.start
        others = [(other.name, other.first.start) for other in shown.other_runs]
        apart = [_apart(start, *other) for other in others] if start else []
        title, *columns = _about(start)
        texts = Text("\n").join([*apart, title]), *columns
        for name, text in zip(("top", "left", "right"), texts, strict=True):
            tell(self.query_one(f"#job-{name}", Static), text)


def differences(
    config: Mapping[str, Any], other_config: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, value, other value) for each difference of two jobs; "-" if not set."""
    settings, other_settings = dict(flat(config)), dict(flat(other_config))
    for key in [*settings, *(key for key in other_settings if key not in settings)]:
        if (values := (settings.get(key, "-"), other_settings.get(key, "-")))[0] != values[1]:
            yield key, *values


def _apart(start: schema.RunStarted, name: str, other: schema.RunStarted | None) -> Text:
    """Return the differences between two jobs as text."""
    text = Text()
    text.append(f" differences to {clean(name)}\n", "bold")
    changes = list(differences(start.config, other.config)) if other is not None else None
    if not changes:
        text.append("   its log has no job yet\n" if changes is None else "   none\n", "dim")
    for key, value, other_value in changes or ():
        text.append(f"   {clean(key, 60):<36} ")
        text.append(value, "bold").append(" here, ", "dim").append(other_value, "bold")
        text.append(" there\n", "dim")
    return text


def _about(start: schema.RunStarted | None) -> tuple[Text, Text, Text]:
    """Return a title, the job, and everything else that is logged at the start."""
    if start is None:
        return Text(" the log has no job yet", "dim"), Text(), Text()
    ranks = f"{start.world_size} rank{'s' if start.world_size != 1 else ''}"
    facts = f"  {short(start.num_params)} parameters  pid {start.pid}  {ranks}"
    title = Text.assemble((f" {clean(start.name)}", "bold"), facts)
    others = ("plan", start.plan), ("kernels", start.backend), ("machine", start.machine)
    tables = Text().join(_table(name, values) for name, values in others)
    return title, _table("job", start.config), tables


def _table(title: str, values: Mapping[str, Any]) -> Text:
    text = Text.assemble((f"\n {title}\n", "bold"))
    for key, value in flat(values):
        if value not in ("", "None"):  # not set, or unknown
            text.append(f"   {clean(key, 60):<30} {value}\n")
    return text


def flat(values: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield nested data as (dotted key, short value)."""
    if isinstance(values, dict) and depth < 6:
        for key, value in values.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    elif isinstance(values, list) and values and depth < 6 and isinstance(values[0], dict):
        for number, value in enumerate(values[:16]):
            yield from flat(value, f"{prefix}[{number}]", depth + 1)
    elif isinstance(values, int) and (prefix.endswith("_bytes") or prefix.startswith(_SIZES)):
        head, _, owner = prefix.rpartition(".")
        yield f"{head}.{owner_word(owner)}" if head else prefix, units.format_bytes(values)
    elif isinstance(values, float) and prefix.startswith(_TIMES):
        yield prefix, units.format_seconds(values)
    else:
        yield prefix, f"{values:.6g}" if isinstance(values, float) else clean(str(values), 200)
