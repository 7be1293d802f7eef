"""The last words of a run: its loss curve, a sample of its text, where it is and how to go on."""

from __future__ import annotations

import shlex
from pathlib import Path

from offloadtrain.config.job import Config
from offloadtrain.config.units import format_duration
from offloadtrain.events import schema
from offloadtrain.train.console import loss_curve


def ended_as(log: Path, since_s: float) -> str | None:
    """Return the status that an event log gives the last start since a time, in Unix seconds; None
    where it tells of no end since then."""
    if not log.exists():
        return None
    ends = [
        record.event
        for record in schema.read(log)
        if isinstance(record.event, schema.RunEnded) and record.time_s >= since_s
    ]
    return ends[-1].status if ends else None


def words(run: Path, log: Path, config: Config, seconds: float, step: int, *, stopped: bool) -> str:
    """Return what is said at the end of a run.

    Args:
        log: of rank 0.
        seconds: that it took, in all its starts.
    """
    took = f"\n{step} steps in {format_duration(seconds)}"
    if not log.exists():
        return (
            f"{took}\n{run} was removed or renamed while the run was in it: what its log told is "
            f"gone; what was saved since is in {run / 'checkpoints'}"
        )
    curve = "" if stopped else f"\n{summary(log)}\n"
    return f"{curve}{took}\n{next_commands(run, config, stopped=stopped)}"


def summary(log: Path) -> str:
    """Return curve, losses and sample from a run's event log, all its starts together."""
    train: dict[int, float] = {}
    val: dict[int, float] = {}
    sample: schema.Sample | None = None
    guesses: list[bool] = []
    for event in (record.event for record in schema.read(log)):
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
        parts.append(f"speculation: {len(guesses)} steps guessed, {wrong} of them wrong")
    if sample is not None:
        parts.append(f"sample\n{_indented(sample.prompt + sample.text)}")
    return "\n\n".join(parts)


def next_commands(run: Path, config: Config, *, stopped: bool) -> str:
    """Return where the run is and what to try next, as lines to copy."""
    job, folder = shlex.quote(str(run / "resolved.toml")), shlex.quote(str(run))
    if stopped:
        return f"run folder: {run}\ngo on: offloadtrain train {job} --resume {folder}"
    longer = 2 * config.train.steps
    lines = [
        (f"offloadtrain tui {folder}", "look at any step of it"),
        (f"offloadtrain train {job} --resume {folder} --set train.steps={longer}", "train on"),
        (f"offloadtrain train {job} --set optim.lr={config.optim.lr / 2:g}", "the same, slower"),
        ("offloadtrain ls", "other jobs"),
        ("offloadtrain cp gpt2_124m", "one of them as a file of your own"),
    ]
    commands = "\n".join(f"  {command}    # {why}" for command, why in lines)
    return f"run folder: {run}\nnext:\n{commands}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
