"""Converts a run log to a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Standard library only. Format: "Trace Event Format" (Google, 2016): complete events (`X`), counters
(`C`) and names (`M`); times are in microseconds. A rank is a process, and a lane a thread of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from offloadtrain.config.errors import InputError, require_path
from offloadtrain.events import log_lines
from offloadtrain.events.log_lines import Record
from offloadtrain.events.schema import WAIT, LaneSpan, Step

LANES = (
    *("step", "compute", WAIT, "d2h", "host", "h2d", "load", "comm", "ortho", "update"),
    *("write", "disk_read", "disk_write", "disk_load"),
)
"""Threads in display order; other lanes follow."""

_COUNTERS = ("loss", "tokens_per_s", "exposed_ms")


class TraceError(InputError):
    """The run folder has nothing to trace."""


def read_run(folder: Path) -> list[Record]:
    """Return the records of all ranks.

    Raises:
        ConfigError: the path does not exist.
        TraceError: the folder is not a run folder, or no step of the run was sampled.
    """
    require_path(folder)
    logs = sorted((folder / "events").glob("rank*.jsonl")) if os.path.isdir(folder) else []
    if not logs:
        raise TraceError(f"{folder} is not a run folder: it has no events/rank*.jsonl")
    records = [record for log in logs for record in log_lines.read(log)]
    if not any(isinstance(record.event, LaneSpan) for record in records):
        raise TraceError(
            f"{folder}: no step of this run has been sampled yet; the first one is step 2"
        )
    return records


def chrome_trace(records: Iterable[Record]) -> dict[str, Any]:
    """Return the trace of all sampled steps, with a slice and counters for every step."""
    all_records = list(records)
    # (rank, step) → its start in Unix seconds; for a repeated step the last one.
    starts = {
        (record.rank, record.event.step): record.time_s - record.event.step_ms / 1e3
        for record in all_records
        if isinstance(record.event, Step)
    }
    origin_s = min(starts.values(), default=0.0)
    entries = [*_names(all_records)]
    for record in all_records:
        event = record.event
        if isinstance(event, Step):
            entries += _step(record, event, origin_s)
        elif isinstance(event, LaneSpan) and (record.rank, event.step) in starts:
            begun_us = (starts[record.rank, event.step] - origin_s) * 1e6
            entries.append(_slice(record.rank, event, begun_us))
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _step(record: Record, event: Step, origin_s: float) -> Iterator[dict[str, Any]]:
    end_us = (record.time_s - origin_s) * 1e6
    place = {"pid": record.rank, "ts": end_us - event.step_ms * 1e3}
    yield {
        "ph": "X",
        "name": f"step {event.step}",
        "tid": _thread("step"),
        "dur": event.step_ms * 1e3,
        "args": {"loss": event.loss, "grad_norm": event.grad_norm, "skipped": event.skipped},
        **place,
    }
    for counter in _COUNTERS:
        yield {"ph": "C", "name": counter, "args": {counter: getattr(event, counter)}, **place}
    if event.busy_ms:
        yield {"ph": "C", "name": "busy_ms", "args": event.busy_ms, **place}


def _slice(rank: int, span: LaneSpan, begun_us: float) -> dict[str, Any]:
    args: dict[str, float] = {"step": span.step}
    if span.num_bytes and span.duration_ms > 0:
        args |= {"bytes": span.num_bytes, "GB/s": span.num_bytes / span.duration_ms / 1e6}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": rank,
        "tid": _thread(span.lane),
        "ts": begun_us + span.start_ms * 1e3,
        "dur": span.duration_ms * 1e3,
        "args": args,
    }


def _names(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    ranks = sorted({record.rank for record in records})
    for rank in ranks:
        label = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": label}
        for lane in LANES:
            place = {"pid": rank, "tid": _thread(lane)}
            yield {"ph": "M", "name": "thread_name", "args": {"name": lane}, **place}
            order = {"sort_index": _thread(lane)}
            yield {"ph": "M", "name": "thread_sort_index", "args": order, **place}


def _thread(lane: str) -> int:
    return LANES.index(lane) if lane in LANES else len(LANES)
