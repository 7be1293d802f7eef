"""The summary of a run: loss curve, sample text, folder, next commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from offloadtrain.config.job import Config
from offloadtrain.config.units import format_duration
from offloadtrain.events import log_lines, schema

_RAMP = "▁▂▃▄▅▆▇█"


def words(
    run: Path,
    log: Path,
    config: Config,
    seconds: float,
    step: int,
    *,
    stopped: bool,
    nproc: int = 1,
) -> str:
    """Return the text printed at the end of a run.

    Args:
        log: the log of rank 0.
        seconds: duration over all its starts.
        nproc: ranks that the next commands start.
    """
    took = f"\n{step} steps in {format_duration(seconds)}"
    if not log.exists():
        missing = log if run.is_dir() else run
        return (
            f"{took}\n{missing} was removed or renamed during the run: its log is lost; later "
            f"checkpoints are in {run / 'checkpoints'}"
        )
    curve = "" if stopped else f"\n{summary(log)}\n"
    return f"{curve}{took}\n{next_commands(run, config, stopped=stopped, nproc=nproc)}"


def summary(log: Path) -> str:
    """Return curve, losses and sample from a run's event log, all its starts together."""
    train: dict[int, float] = {}
    val: dict[int, float] = {}
    sample: schema.Sample | None = None
    guesses: list[bool] = []
    for event in (record.event for record in log_lines.read(log)):
        if isinstance(event, schema.Step) and event.speculation_hit is not None:
            guesses.append(event.speculation_hit)
        if isinstance(event, schema.Step) and not event.skipped:
            train[event.step] = event.loss
        elif isinstance(event, schema.Eval):
            val[event.step] = event.val_loss
        elif isinstance(event, schema.Sample):
            sample = event
    parts = [f"training loss by step\n{loss_curve(sorted(train.items()))}"]
    if val:
        first, last = min(val), max(val)
        parts.append(
            f"validation loss (nats per token): {val[first]:.3f} at step {first}, "
            f"{val[last]:.3f} at step {last}"
        )
    if guesses:
        wrong = guesses.count(False)
        parts.append(f"speculation: {len(guesses)} steps predicted, {wrong} of them mispredicted")
    if sample is not None:
        lines = (sample.prompt + sample.text).splitlines()
        indented = "\n".join(f"  {line}" for line in lines)
        parts.append(f"sample\n{indented}")
    return "\n\n".join(parts)


def next_commands(run: Path, config: Config, *, stopped: bool, nproc: int = 1) -> str:
    """Return the run folder and next commands, as lines to copy."""
    job, folder = shlex.quote(str(run / "resolved.toml")), shlex.quote(str(run))
    train = f"offloadtrain train {job}" + (f" --nproc {nproc}" if nproc > 1 else "")
    if stopped:
        return f"run folder: {run}\nresume: {train} --resume {folder}"
    longer = 2 * config.train.steps
    lines = [
        (f"offloadtrain tui {folder}", "inspect any step"),
        (f"{train} --resume {folder} --set train.steps={longer}", "train longer"),
        (
            f"{train} --set optim.lr={config.optim.lr / 2:g}",
            "the same job, half the learning rate",
        ),
        ("offloadtrain ls", "other jobs"),
        ("offloadtrain cp gpt2_124m", "copy one to edit"),
    ]
    commands = "\n".join(f"  {command}    # {why}" for command, why in lines)
    return f"run folder: {run}\nnext:\n{commands}"


def loss_curve(points: Sequence[tuple[int, float]], width: int = 64, height: int = 10) -> str:
    """Return losses by step as a text plot with labelled axes.

    Args:
        points: (step, loss), steps ascending; non-finite losses are omitted.
        width, height: of the plot, in characters, without its labels.
    """
    finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
    if not finite:
        return "no losses to plot"
    columns = _columns(finite, width)
    known = [value for value in columns if value is not None]
    low, high = min(known), max(known)
    rows = [_row(columns, low, high, row, height) for row in reversed(range(height))]
    labels = [_label(high), *[""] * (height - 2), _label(low)] if height > 1 else [_label(high)]
    body = [f"{label:>8} │{row}" for label, row in zip(labels, rows, strict=True)]
    first, last = str(finite[0][0]), str(finite[-1][0])
    last = "" if first == last else last.rjust(max(len(columns) - len(first), len(last) + 1))
    axis = f"{'':>8} └{'─' * len(columns)}"
    return "\n".join(line.rstrip() for line in (*body, axis, f"{'':>10}{first}{last}"))


def _label(loss: float) -> str:
    return f"{loss:.3f}" if abs(loss) < 1e4 else f"{loss:.2e}"


def _columns(points: Sequence[tuple[int, float]], width: int) -> list[float | None]:
    """The mean loss of each column's steps; a column between two points takes the earlier one's."""
    first, last = points[0][0], points[-1][0]
    count = min(width, max(last - first + 1, 1))
    sums: list[list[float]] = [[] for _ in range(count)]
    for step, loss in points:
        sums[min((step - first) * count // max(last - first + 1, 1), count - 1)].append(loss)
    columns: list[float | None] = []
    for values in sums:
        columns.append(sum(values) / len(values) if values else (columns[-1] if columns else None))
    return columns


def _row(columns: Sequence[float | None], low: float, high: float, row: int, height: int) -> str:
    span = (high - low) or 1.0
    cells = []
    for value in columns:
        eighths = 0 if value is None else 1 + round((value - low) / span * (8 * height - 1))
        filled = eighths - 8 * row
        cells.append(" " if filled <= 0 else _RAMP[min(filled, 8) - 1])
    return "".join(cells)
