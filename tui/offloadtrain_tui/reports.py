"""The monitor's data as text and JSON: `status`, `runs`, `events`, `ctl`. No Textual."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from offloadtrain.boundary.sanitize import sanitize_json
from offloadtrain.config import units
from offloadtrain.events import control, log_lines, schema
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.history import LANES, Moment, set_up_line
from offloadtrain_tui.reading.log_reader import (
    COLUMNS,
    RunReader,
    RunRow,
    Snapshot,
    list_runs,
)
from offloadtrain_tui.reading.runs import RunPath
from offloadtrain_tui.reading.tail import Tail
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, local_time, milliseconds, owner_word, short
from offloadtrain_tui.verdict import against_plan, bound_by, newest_loss, time_left_s

_LIVE_EVERY_S, _FOLLOW_EVERY_S = 1.0, 0.2
_ANSWER_S = 60.0
_RUNS_DIR = Path("runs")
DONE, FAILED, USAGE = 0, 1, 2

Flag = Annotated[bool, Parameter(negative="")]


def status(
    run: Path | None = None,
    /,
    *,
    runs_dir: Path = _RUNS_DIR,
    live: Flag = False,
    watch: Flag = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Print the status of a run, by default the newest.

    Parameters
    ----------
    run
        A run folder, a folder of runs, or an event file.
    runs_dir
        Folder searched for the newest run.
    live
        Print a line every second until the run ends.
    watch
        Print a line whenever a step, the state or the alerts have changed, at most one per second,
        until the run ends; for logs and status bars.
    json_
        Print JSON; with --live or --watch one line each time.
    """
    run_path = _find(run, runs_dir)
    printed: object = None
    for snapshot in _snapshots(run_path, _LIVE_EVERY_S if live or watch else None):
        if not watch or printed != (printed := _watched(snapshot)):
            text = line(snapshot) if live or watch else report(snapshot)
            if json_:
                text = sanitize_json(json.dumps(facts(snapshot), default=str))
            print(text, flush=True)
    if not _tell_problem(snapshot):
        return USAGE
    return FAILED if snapshot.state in ("failed", "killed") else DONE


def list_all(
    runs_dir: Path = _RUNS_DIR,
    /,
    *,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """List the runs of a folder, the newest first.

    Parameters
    ----------
    runs_dir
        The folder.
    json_
        Print one line of JSON per run.
    """
    now_s = time.time()
    rows = list_runs(runs_dir, now_s)
    if not rows:
        print(f"no runs in {runs_dir}", file=sys.stderr)
    if rows and not json_:
        print(_FORMAT.format(*COLUMNS))
    for row in rows:
        text = sanitize_json(json.dumps(asdict(row), default=str)) if json_ else _row(row, now_s)
        print(text)
    return DONE if runs_dir == _RUNS_DIR or os.path.isdir(runs_dir) else USAGE


def show_events(
    run: Path | None = None,
    /,
    *,
    runs_dir: Path = _RUNS_DIR,
    follow: Annotated[bool, Parameter(name=("--follow", "-f"), negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Print the events of a run: starts, checkpoints, alerts, notes, its end.

    Parameters
    ----------
    run
        A run folder, a folder of runs, or an event file.
    runs_dir
        Folder searched for the newest run.
    follow
        Follow the run until it ends.
    json_
        Print the raw records of the log, including steps and samples.
    """
    run_path = _find(run, runs_dir)
    if json_:
        for text in _raw(run_path, follow=follow):
            print(text, flush=follow)
        snapshot = RunReader(run_path).read_to_end(time.time())
    else:
        shown: Counter[int] = Counter()
        for snapshot in _snapshots(run_path, _FOLLOW_EVERY_S if follow else None):
            for text in _new_lines(snapshot, shown):
                print(text, flush=follow)
    return DONE if _tell_problem(snapshot) else USAGE


def ctl(
    run: Path,
    action: str,
    message: str = "",
    /,
    *,
    wait: Annotated[float, Parameter(name="--wait")] = _ANSWER_S,
) -> int:
    """Send a request to a running job, and print its answer.

    Parameters
    ----------
    run
        A run folder, or a folder of runs (selects the newest).
    action
        checkpoint: save one after this step. stop: stop after this step, with a checkpoint. abort:
        end now, without a checkpoint. note: write MESSAGE into the log. acknowledge: confirm the
        alert with the code MESSAGE.
    message
        Text of a note, or code of an alert.
    wait
        Seconds to wait for the answer; 0: do not wait.
    """
    run_path = _find(run, _RUNS_DIR)
    if run_path.folder is None:
        raise runs.RunError(f"{run_path.path} is no run folder: a log alone takes no requests")
    snapshot = RunReader(run_path).read_to_end(time.time())
    if not snapshot.is_run:
        _tell_problem(snapshot)
        return USAGE
    if snapshot.state not in runs.ALIVE:
        print(f"{run_path.folder} is not running: it is {snapshot.state}", file=sys.stderr)
        return FAILED
    return _answer(run_path, control.send(run_path.folder, action, message), wait)


# ---- output


def _watched(snapshot: Snapshot) -> tuple[object, ...]:
    """Return the values that cause a new line of --watch when they change."""
    view = snapshot.first
    codes = tuple(alert.code for alert in view.active_alerts())
    return snapshot.state, view.step, view.val_loss, codes


def facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as JSON-compatible data, with units in the names."""
    view = snapshot.first
    end = view.end
    return {
        "run": snapshot.name,
        "state": snapshot.state,
        "out_of_memory": snapshot.out_of_memory,
        "step": view.step,
        "steps": view.total_steps,
        "seconds_left": time_left_s(view),
        "last_step_unix_s": view.step_time_s,
        **{name: view.last(name) for name in view.history.series},
        "val_loss": view.val_loss,
        "busy_ms": {lane: view.busy_ms(lane) for lane in LANES},
        "memory": [asdict(row) for row in view.memory],
        "alerts": [asdict(alert) for alert in view.active_alerts()],
        "end": asdict(end) if end else None,
        "ending": asdict(snapshot.ending) if snapshot.ending else None,
        "ranks": len(snapshot.views),
        "refused_logs": list(snapshot.refused),
        "unreadable_lines": sum(view.history.unreadable for view in snapshot.views),
    }


def line(snapshot: Snapshot) -> str:
    """Return a snapshot as one line of text."""
    view = snapshot.first
    if (set_up := snapshot.set_up) is not None:
        is_over = snapshot.state not in runs.ALIVE
        return f"{snapshot.state}  {set_up_line(set_up, time.time(), is_over=is_over)}"
    total = f"/{view.total_steps}" if view.total_steps else ""
    parts = [
        f"{snapshot.state}  step {view.step}{total}",
        f"loss {newest_loss(view)}",
        f"norm {short(view.last('grad_norm'))}",
        f"{short(view.last('tokens_per_s'))} tok/s",
        f"step {milliseconds(view.last('step_ms'))}",
        f"waits {milliseconds(view.last('exposed_ms'))}",
    ]
    if snapshot.state in runs.ALIVE and (left := time_left_s(view)) is not None:
        now_s = time.time()
        parts.insert(1, f"ends {units.format_clock(now_s + left, now_s)}")
        parts.insert(2, f"{units.format_duration(left)} left")
    if snapshot.ending is not None:
        parts.insert(1, snapshot.ending.words(time.time()))
    parts += [f"! {clean(alert.code)}" for alert in view.active_alerts()]
    return "  ".join(parts)


def report(snapshot: Snapshot) -> str:
    """Return a snapshot as a few lines of text."""
    view = snapshot.first
    lines = [
        clean(snapshot.name),
        line(snapshot),
        ", ".join(filter(None, (against_plan(view), bound_by(view)))),
        _death(view) if snapshot.out_of_memory else "",
        *((ending.saved, ending.next) if (ending := snapshot.ending) else ()),
    ]
    if snapshot.set_up is None:  # otherwise these values belong to the previous start
        lines.append("" if view.val_loss is None else f"validation loss {view.val_loss:.4f}")
        both, each = {"memory": ("device", "host")}, {"device": ("device",), "host": ("host",)}
        lines += [_memory_line(view, *item) for item in (both if view.on_cpu else each).items()]
        lines += [f"alert: {clean(a.code)}: {clean(a.message)}" for a in view.active_alerts()]
        end = view.end.message if view.end else ""
        lines.append(f"ended: {clean(end)}" if end else "")
    return "\n".join(filter(None, lines))


def _memory_line(view: View, name: str, tiers: tuple[str, ...]) -> str:
    rows = [row for row in view.memory if row.tier in tiers]
    total = units.format_bytes(sum(row.num_bytes for row in rows))
    sizes = (
        f"{clean(owner_word(row.owner))} {units.format_bytes(row.num_bytes)}" for row in rows[:4]
    )
    return f"{name}: {total} ({', '.join(sizes)})" if rows else f"{name}: not known yet"


def _death(view: View) -> str:
    """Return the likely reason why a run was killed, and the last logged memory."""
    text = "killed, probably out of memory: the kernel has killed a process for it since the start"
    if (last := view.system) is None:
        return text
    free, total = (
        units.format_bytes(size) for size in (last.host_available_bytes, last.host_total_bytes)
    )
    rss = units.format_bytes(last.rss_bytes)
    return f"{text}; last logged: {free} of {total} available, {rss} held by rank 0"


def moment_line(moment: Moment) -> str:
    """Return an event as one line of text."""
    time_text = local_time(moment.time_s, "%Y-%m-%d %H:%M:%S")
    step = "" if moment.step is None else f"step {moment.step}"
    return f"{time_text}  {step:<12}  {moment.kind:<13}  {moment.text}"


_FORMAT = "{:<40}  {:<9}  {:>13}  {:>7}  {:>7}  {:>7}  {:>6}  {}"


def _row(row: RunRow, now_s: float) -> str:
    text, ending = _FORMAT.format(*row.cells(now_s)), row.ending
    if ending is None or row.state == "done":
        return text
    return f"{text}\n    {'; '.join(filter(None, (ending.saved, ending.next)))}"


# ---- reading


def _tell_problem(snapshot: Snapshot) -> bool:
    """Print problems with the logs of a run; return True if it is a run."""
    for why in snapshot.refused:
        print(f"not read: {why}", file=sys.stderr)
    if snapshot.problem and not snapshot.refused:
        print(f"{clean(snapshot.name)}: {snapshot.problem}", file=sys.stderr)
    return snapshot.is_run


def _find(run: Path | None, runs_dir: Path) -> RunPath:
    """Return the run that was named, or the newest of the folder.

    Raises:
        RunError: there is none.
    """
    run_paths = runs.find([run] if run is not None else [], runs_dir)
    if not run_paths:
        raise runs.RunError(f"no runs in {runs_dir}: give a run folder")
    return run_paths[0]


def _snapshots(run: RunPath, every_s: float | None) -> Iterator[Snapshot]:
    """Yield a snapshot of the run; with `every_s`, repeatedly until the run has ended."""
    reader = RunReader(run)
    while True:
        yield (snapshot := reader.read_to_end(time.time()))
        if every_s is None or snapshot.state not in runs.ALIVE:
            return
        time.sleep(every_s)


def _new_lines(snapshot: Snapshot, shown: Counter[int]) -> Iterator[str]:
    """Yield events that are new since the last call, the oldest first; `shown` counts the events of
    each rank that were yielded."""
    fresh: list[Moment] = []
    for view in snapshot.views:
        rank = view.history.rank
        fresh += view.moments[shown[rank] :]
        shown[rank] = len(view.moments)
    yield from map(moment_line, sorted(fresh, key=lambda moment: moment.time_s))


def _raw(run: RunPath, *, follow: bool) -> Iterator[str]:
    """Yield every record as a line of JSON."""
    tails = [Tail(path) for path in run.logs]
    while True:
        alive = runs.is_alive(run.folder)
        any_lines = False
        for tail in tails:
            for text in tail.poll():
                any_lines = True
                if log_lines.from_line(text) is not None:
                    yield sanitize_json(text.decode(errors="replace"))
        if not any_lines and (not follow or not alive):
            return
        if not any_lines:
            time.sleep(_FOLLOW_EVERY_S)


def _answer(run: RunPath, request_id: str, wait_s: float) -> int:
    """Print the states of a request until it is done or refused."""
    shown, until = 0, time.monotonic() + wait_s
    for snapshot in _snapshots(run, _FOLLOW_EVERY_S) if wait_s > 0 else ():
        controls = snapshot.first.history.of(schema.Control).values
        answers = [answer for answer in controls if answer.id == request_id]
        for answer in answers[shown:]:
            text = f": {clean(answer.message)}" if answer.message else ""
            print(f"{answer.action} {answer.state}{text}")
        shown = len(answers)
        if answers and answers[-1].state in ("done", "refused"):
            return DONE if answers[-1].state == "done" else FAILED
        if time.monotonic() >= until:
            break
    if wait_s > 0:
        print("no answer yet: the run answers after the step in progress", file=sys.stderr)
        return FAILED
    return DONE
