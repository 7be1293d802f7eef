"""Console output: one live line, or a plain line every few seconds.

All output goes to stderr: stdout is for data. At the end of a run a summary shows the loss curve,
sample text, the folder and the next commands.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from offloadtrain.boundary.sanitize import sanitize, unfiltered
from offloadtrain.config.job import Config
from offloadtrain.config.units import format_bytes, format_clock, format_duration, format_rate
from offloadtrain.events import log_lines, schema
from offloadtrain.events.commands import resume_command, train_command
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.train.progress import Progress

SILENCE_S = 8.0
"""Silence after which the current activity is printed."""
_LOOK_EVERY_S = 1.0


def format_step(
    step: schema.Step,
    *,
    steps: int,
    device_bytes: int,
    host_bytes: int,
    eta_s: float,
    now_s: float,
) -> str:
    """Format a step as one line, most important values first, so that truncation loses least;
    unknown values are omitted.

    Args:
        steps: number of steps of the whole run.
        device_bytes, host_bytes: current bytes of the engine; on a CPU all are host bytes.
        eta_s: time left, evaluations and checkpoints included; NaN if unknown, 0 after the last.
        now_s: Unix seconds.
    """
    parts = [
        f"step {step.step}/{steps} {100 * step.step // max(steps, 1)}%",
        f"eta {format_duration(eta_s)} ({format_clock(now_s + eta_s, now_s)})" if eta_s else None,
        f"loss {step.loss:.4f}",
        "SKIPPED" if step.skipped else None,
        None if step.grad_norm is None else f"grad {step.grad_norm:.3g}",
        f"lr {step.lr:.2e}",
        format_rate(step.tokens_per_s, "tok"),
        None if step.mfu is None else f"mfu {100 * step.mfu:.1f}%",
        f"waits {step.exposed_ms:.1f}ms",
        None if step.loss_scale is None else f"scale {step.loss_scale:g}",
        f"dev {format_bytes(device_bytes)}" if device_bytes else None,
        f"host {format_bytes(host_bytes)}",
    ]
    return "  ".join(part for part in parts if part is not None)


class Console:
    """Writes step lines and messages. On a terminal one live line is rewritten in place.

    A closed terminal ends the output, not the run.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ) -> None:
        """`every_s`: time between plain lines; a live line is refreshed at most ten times a second.
        `quiet`: print nothing, since another rank prints."""
        self._quiet = quiet
        self._stream = unfiltered(stream or sys.stderr)
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._interval_s = 0.1 if self._live else every_s
        self._clock = clock
        self._shown_s = -math.inf
        self._open = False
        self._silence_s = max(SILENCE_S, every_s)
        self._spoke_s = clock()
        self._doing, self._doing_since_s = "", clock()

    @contextmanager
    def never_silent(self, what: str, first_after_s: float = SILENCE_S) -> Iterator[None]:
        """Print the current activity, initially `what`, from a thread whenever nothing else was
        printed for a while; the first time after `first_after_s`."""
        self.doing(what)
        self._spoke_s = self._clock() - self._silence_s + min(first_after_s, self._silence_s)
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_EVERY_S):
                self.fill_silence()

        thread = threading.Thread(target=look, name="silence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.end_line()

    def doing(self, what: str) -> None:
        """Set the current activity."""
        HEARTBEAT.enter(what)
        self._doing, self._doing_since_s = what, self._clock()

    def spoken(self) -> None:
        """Record that something was printed, also by other code."""
        self._spoke_s = self._clock()

    def fill_silence(self) -> None:
        """Print the current activity after a silence. On a terminal, show its progress at once."""
        now = self._clock()
        if now - self._spoke_s >= self._silence_s:
            spent = format_duration(now - self._doing_since_s)
            part = self._part()  # may say what the phase says, and how far it is
            doing = part if part.startswith(self._doing) else f"{self._doing}, {part}".rstrip(", ")
            self.say(f"... {doing}: {spent} so far")
        elif self._live and not self._quiet and (part := self._part()):
            self._show(f"... {part}")

    def _part(self) -> str:
        part = HEARTBEAT.part
        if part is None or part.done_bytes >= part.total_bytes:
            return ""
        done, total = format_bytes(part.done_bytes), format_bytes(part.total_bytes)
        return f"{part.what} {100 * part.done_bytes // part.total_bytes}% ({done} of {total})"

    def _show(self, text: str) -> None:
        """Rewrite the live line."""
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[2K{text[:width]}")
        self._open = True

    def step(self, line: Callable[[], str], *, force: bool = False) -> None:
        """Print the line of a step if it is due, or if `force` is set (first and last step)."""
        now = self._clock()
        if not force and now - self._shown_s < self._interval_s:
            return
        self._shown_s = now
        if self._live:
            self._show(line())
        else:
            self._write(f"{line()}\n")

    def say(self, text: str) -> None:
        """Print a message on its own lines, with visible control characters."""
        self.end_line()
        self._write(f"{sanitize(text)}\n")

    def end_line(self) -> None:
        """End the live line, so that output continues below it."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        self.spoken()
        if self._quiet:
            return
        with suppress(OSError, ValueError):  # the pipe's reader has left, or the stream is closed
            # A paused terminal or a pager with a full pipe blocks the run: that is not a hang.
            with HEARTBEAT.outside():
                self._stream.write(text)
                self._stream.flush()


_RAMP = "▁▂▃▄▅▆▇█"


def run_summary(
    run: Path, log: Path, config: Config, progress: Progress, status: str, nproc: int = 1
) -> str:
    """Return the text printed at the end of a run: the folder and next commands, as lines to copy.

    Args:
        log: log of rank 0.
        progress: progress over all starts of the run.
        status: "done" or "stopped".
        nproc: ranks that the printed commands start.
    """
    took = f"\n{progress.step} steps in {format_duration(progress.seconds)}"
    if not log.exists():
        missing = log if run.is_dir() else run
        return (
            f"{took}\n{missing} was removed or renamed during the run: its log is lost; later "
            f"checkpoints are in {run / 'checkpoints'}"
        )
    if status == "stopped":
        return f"{took}\nrun folder: {run}\nresume: {resume_command(run, nproc)}"
    # 0 if the job's last step was not reached, else twice the steps.
    longer = 2 * config.train.steps if progress.step >= config.train.steps else 0
    halved = f"{train_command(run, nproc)} --set optim.lr={config.optim.lr / 2:g}"
    lines = [
        (f"offloadtrain tui {shlex.quote(str(run))}", "inspect any step"),
        (resume_command(run, nproc, longer), "train longer"),
        (halved, "the same job, half the learning rate"),
        ("offloadtrain ls", "other jobs"),
        ("offloadtrain cp gpt2_124m", "copy one to edit"),
    ]
    commands = "\n".join(f"  {command}    # {why}" for command, why in lines)
    return f"\n{summary(log)}\n{took}\nrun folder: {run}\nnext:\n{commands}"


def summary(log: Path) -> str:
    """Return loss curve, losses and sample text from a run's event log, over all its starts."""
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


def loss_curve(points: Sequence[tuple[int, float]], width: int = 64, height: int = 10) -> str:
    """Return losses by step as a text plot with labelled axes.

    Args:
        points: (step, loss), steps ascending; non-finite losses are omitted.
        width, height: size of the plot in characters, without its labels.
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
    """Return the mean loss per column; a column without steps repeats the one before it."""
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
