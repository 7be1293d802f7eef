"""The run log: what is written reads back, whatever else is in the file; emit never waits."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.events import log_lines, schema
from offloadtrain.events import writer as event_writer
from offloadtrain.events.log_lines import Record, from_line, to_line
from offloadtrain.events.schema import Event, LaneSpan, Step, Warning_
from offloadtrain.events.writer import EventWriter
from tests import levels

STEP = Step(step=3, loss=2.5, lr=1e-3, tokens=6144)
HANGS_S = 120.0
SPAN = LaneSpan(step=3, lane="h2d", name="block 1", start_ms=0.5, duration_ms=1.25)

_TEXT = st.text(st.characters(), max_size=20)  # any code point, lone surrogates too
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: _TEXT,
    int: st.integers(),
    bool: st.booleans(),
    float: st.floats(),
    dict: st.dictionaries(_TEXT, _JSON, max_size=3),
}


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Return what a field annotated `kind` may hold."""
    if get_origin(kind) is UnionType:
        return st.none() | _values(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return st.lists(_values(get_args(kind)[0]), max_size=3).map(tuple)
    if get_origin(kind) is dict and get_args(kind)[1] is not Any:
        return st.dictionaries(_TEXT, _values(get_args(kind)[1]), max_size=3)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(cast(Any, kind), **{f.name: _values(hints[f.name]) for f in fields(kind)})
    return _PLAIN[get_origin(kind) or kind]


def _same(value: Any, other: Any) -> bool:
    """Equality in which nan equals nan and 1 does not equal 1.0."""
    if is_dataclass(value) and type(value) is type(other):
        return all(_same(getattr(value, f.name), getattr(other, f.name)) for f in fields(value))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, float) and math.isnan(value):
        return isinstance(other, float) and math.isnan(other)
    return type(value) is type(other) and value == other


@pytest.mark.parametrize("kind", schema.KINDS.values(), ids=str)
@levels.examples(40)
@given(st.data(), st.integers(0, 1000), st.floats(0, 1e10), st.integers(0, 2**63))
def test_every_kind_reads_back_equal_and_a_torn_line_is_no_record(
    kind: type[Event], data: st.DataObject, rank: int, time_s: float, monotonic_ns: int
) -> None:
    event = data.draw(_values(kind))
    line = to_line(event, rank, time_s, monotonic_ns)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert line.isascii() and all(byte >= 0x20 for byte in line[:-1])
    assert _same(from_line(line), Record(event, rank, time_s, monotonic_ns))
    cut = data.draw(st.integers(0, len(line) - 3))
    assert from_line(line[:cut]) is None and from_line(line[cut + 1 :]) is None


@levels.examples(100)
@given(st.binary() | _JSON.map(lambda value: json.dumps(value).encode()))
def test_a_foreign_line_is_no_record(line: bytes) -> None:
    assert from_line(line) is None


def test_non_finite_floats_are_valid_json() -> None:
    line = to_line(Step(step=1, loss=math.nan, lr=math.inf, tokens=0, mfu=-math.inf), 0, 0.0)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    parsed = json.loads(line, parse_constant=refuse)
    assert (parsed["loss"], parsed["lr"], parsed["mfu"]) == ("nan", "inf", "-inf")


def _edited(**changes: Any) -> Record | None:
    values = json.loads(to_line(STEP, 0, 1.0)) | changes
    return from_line(json.dumps({key: v for key, v in values.items() if v is not ...}))


def test_the_envelope_is_as_documented() -> None:
    values = json.loads(to_line(STEP, 2, 12.5, 99))
    assert [values[key] for key in "vktmr"] == [schema.SCHEMA, "step", 12.5, 99, 2]
    clashing = {f.name for kind in schema.KINDS.values() for f in fields(kind)} & set("vktmr")  # type: ignore[arg-type]
    assert not clashing


def test_readers_ignore_unknown_fields_kinds_and_versions() -> None:
    assert _edited() == Record(STEP, 0, 1.0)
    assert _edited(new_field={"a": 1}) == Record(STEP, 0, 1.0)
    assert _edited(grad_norm=...) == Record(STEP, 0, 1.0)
    later = _edited(v=2)
    assert later is not None and later.version == 2 and later.event == STEP
    assert _edited(k="kind_of_a_later_version") is None


WRONG_TYPES: list[dict[str, Any]] = [
    *({"k": value} for value in (["step"], ...)),
    *({"step": value} for value in ("3", 3.0, True, None, ...)),
    *({"loss": value} for value in ("low", True, [1.0])),
    *({"skipped": 0}, {"r": "0"}, {"r": ...}, {"t": None}, {"v": 1.5}),
    *({"busy_ms": value} for value in ({"h2d": "x"}, {"h2d": {}}, {"h2d": None}, {"h2d": [1.0]})),
]
HOSTILE = [b"[" * 100_000, b'{"k":' * 50_000, b'{"v":' + b"9" * 5000 + b"}"]


def test_a_line_of_wrong_types_or_endless_nesting_is_no_record() -> None:
    assert [changes for changes in WRONG_TYPES if _edited(**changes) is not None] == []
    assert list(map(from_line, HOSTILE)) == [None] * len(HOSTILE)


# ---- the writer


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank000.jsonl"


class Stall:
    """Holds every `os.write` to the log until released; counts the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self.released = threading.Event()
        self.reached = threading.Event()
        self.calls = 0
        self._log, self._write = log, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: bytes) -> int:
        if self._is_log(fd):
            self.calls += 1
            self.reached.set()
            assert self.released.wait(HANGS_S)
        return self._write(fd, data)

    def _is_log(self, fd: int) -> bool:
        return self._log.exists() and os.path.samestat(os.fstat(fd), self._log.stat())


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch, log: Path) -> Iterator[Stall]:
    stall = Stall(monkeypatch, log)
    yield stall
    stall.released.set()


def opened(log: Path, **options: Any) -> EventWriter:
    writer = EventWriter(**options)
    writer.open(log)
    return writer


def _steps(log: Path) -> list[int]:
    return [r.event.step for r in log_lines.read(log) if isinstance(r.event, Step)]


def _step(number: int) -> Step:
    return Step(step=number, loss=1.0, lr=1.0, tokens=number)


def test_records_arrive_in_order_and_each_is_one_write(log: Path, stall: Stall) -> None:
    stall.released.set()
    writer, before = opened(log, rank=3), time.time()
    for number in range(100):
        writer.emit(_step(number))
    assert writer.flush() and stall.calls == 100
    records = list(log_lines.read(log))
    assert [(r.event, r.rank) for r in records] == [(_step(number), 3) for number in range(100)]
    assert all(before <= r.time_s <= time.time() for r in records)
    assert sorted(r.monotonic_ns for r in records) == [r.monotonic_ns for r in records]
    assert log.stat().st_mode & 0o777 == 0o600
    writer.close()
    assert writer.flush() and writer.dropped == 0
    writer.emit(STEP)
    assert writer.dropped == 1, "after close"


def test_emit_never_waits_for_a_stalled_disk_and_drops_are_logged(log: Path, stall: Stall) -> None:
    writer = opened(log, capacity=50)
    writer.emit(_step(0))
    assert stall.reached.wait(HANGS_S)
    for number in range(1, 1000):
        writer.emit(_step(number))
    assert not stall.released.is_set(), "the disk was free after all"
    assert writer.dropped == 999 - 50
    assert not writer.flush(timeout_s=0.01)
    stall.released.set()
    writer.close()
    assert _steps(log) == list(range(51))
    *_, last = log_lines.read(log)
    assert isinstance(last.event, Warning_) and last.event.code == "events-dropped"
    assert last.event.message.startswith("949 events were dropped")


def test_spans_never_push_a_step_out(log: Path, stall: Stall) -> None:
    writer = opened(log, capacity=100)
    writer.emit(_step(0))
    assert stall.reached.wait(HANGS_S)
    for _ in range(500):
        writer.emit(SPAN)
    for number in range(1, 26):
        writer.emit(_step(number))
    stall.released.set()
    writer.close()
    assert _steps(log) == list(range(26))
    assert sum(isinstance(r.event, LaneSpan) for r in log_lines.read(log)) == 75
    assert writer.dropped == 425


def test_close_does_not_wait_for_a_hanging_disk(log: Path, stall: Stall) -> None:
    writer = opened(log)
    writer.emit(STEP)
    writer.close(timeout_s=0.05)
    assert _steps(log) == [] and not stall.released.is_set(), "it hangs yet"
    writer.close()


class Disk:
    """Has so much room for the log; takes what fits of a write, and then refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self.room = 1 << 30
        self._log, self._write = log, os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(event_writer, "_reserved", lambda folder: self)
        monkeypatch.setattr(event_writer, "RETRY_S", 0.01)

    def write(self, fd: int, data: bytes) -> int:
        if not (self._log.exists() and os.path.samestat(os.fstat(fd), self._log.stat())):
            return self._write(fd, data)
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        """Give the reserve back."""
        self.room += event_writer.RESERVED_BYTES


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, log: Path) -> Disk:
    log.touch()
    return Disk(monkeypatch, log)


def _waits(done: Callable[[], object]) -> None:
    until = time.monotonic() + HANGS_S
    while not done():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_record_that_is_written_in_parts(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    writer = opened(log)
    for number in range(3):
        writer.emit(_step(number))
    writer.close()
    monkeypatch.undo()
    assert _steps(log) == [0, 1, 2]


def test_records_lost_on_a_full_disk_are_counted_in_the_log(log: Path, disk: Disk) -> None:
    lines: list[str] = []
    writer = opened(log, capacity=5, say=lines.append)
    disk.room = 0
    writer.emit(_step(0))
    _waits(lambda: writer.error)
    for number in range(1, 10):
        writer.emit(_step(number))
    disk.room = 1 << 30
    _waits(lambda: len(lines) == 2)
    writer.emit(_step(10))
    writer.close()
    events = [record.event for record in log_lines.read(log)]
    assert events[:6] == [_step(number) for number in range(6)]
    assert isinstance(events[6], Warning_) and events[6].code == "events-dropped"
    assert (
        events[6].message == "4 events were lost: the log's disk refused (No space left on device)"
    )
    assert events[7:] == [_step(10)], "reported once"
    assert lines[0].startswith("warning: the event log cannot be written (No space left on device)")
    assert lines[1:] == ["the event log is being written again; 4 records were lost"]


def test_the_end_of_a_run_is_recorded_on_a_full_disk(
    log: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "END_WITHIN_S", 0.05)
    lines: list[str] = []
    writer = opened(log, capacity=5, say=lines.append)
    writer.emit(_step(0))
    assert writer.flush()
    disk.room = 5  # tears a line
    for number in range(1, 20):
        writer.emit(_step(number))
    end = schema.RunEnded(status="done", step=19)
    writer.emit(end)
    writer.close()
    first, *between, lost, last = [record.event for record in log_lines.read(log)]
    assert (first, between, last) == (_step(0), [], end)
    assert isinstance(lost, Warning_) and lost.message.startswith("19 events were lost")
    assert lines[-1] == "the event log is being written again; 19 records were lost"


def test_events_wait_in_memory_until_there_is_a_log(log: Path) -> None:
    writer = EventWriter()
    writer.emit(_step(1))
    assert writer.flush()
    writer.open(log)
    writer.emit(_step(2))
    writer.close()
    assert _steps(log) == [1, 2]
    never = EventWriter()
    never.emit(_step(1))
    never.close()


def test_an_event_that_cannot_be_written_is_reported_and_costs_no_other(
    log: Path,
) -> None:
    itself: dict[str, Any] = {}
    itself["again"] = itself
    base: dict[str, Any] = {
        "run_id": "r",
        "name": "n",
        "pid": 1,
        "num_params": 1,
        "backend": {},
        "machine": {},
    }
    writer = opened(log)
    writer.emit(schema.RunStarted(config=itself, plan={}, **base))
    writer.emit(schema.RunStarted(config=cast(Any, {(1, 2): 3}), plan={}, **base))
    writer.emit(STEP)
    writer.close()
    kinds = [(r.event.KIND, getattr(r.event, "code", "")) for r in log_lines.read(log)]
    assert kinds == [("warning", "event-unwritable")] * 2 + [("step", "")]


def test_a_line_torn_by_a_crash_costs_no_later_record(log: Path) -> None:
    log.write_bytes(to_line(_step(1), 0, 0.0) + to_line(_step(2), 0, 0.0)[:20])
    writer = opened(log)
    writer.emit(_step(3))
    writer.close()
    assert _steps(log) == [1, 3]
