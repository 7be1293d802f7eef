"""Logs that are damaged in every way: the monitor shows what it can and never falls."""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Iterator
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadtrain_tui.panels.events import matches
from offloadtrain_tui.panels.job import flat
from offloadtrain_tui.plots import KINDS, plot
from offloadtrain_tui.reading.columns import Outline
from offloadtrain_tui.reading.history import History
from offloadtrain_tui.reading.log_reader import Snapshot
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.reports import facts, report
from offloadtrain_tui.summary import headline, numbers, when
from offloadtrain_tui.view_state import ViewState, marks
from offloadtrain_tui.widgets.chart import _extents

from tests import levels
from tests.tui.recordings import lines, plain, unlucky

LOG = lines(unlucky()) + lines(plain(30, seed=1), rank=1)


def look_at(history: History) -> None:
    """Everything that is drawn from a history, at several moments."""
    for moment in (None, history.first_time_s, history.first_time_s + 20.0):
        view = View.at(history, moment)
        snapshot = Snapshot("run", None, (view,), "running")
        shown = ViewState(snapshot, now_s=history.last_time_s + 1.0)
        for text in (headline(shown, {}), numbers(shown), when(shown, {})):
            assert "\x1b" not in text.plain and "\x07" not in text.plain
        for name in KINDS:
            chart = plot(name, shown)
            for curve in chart.curves:
                _extents(curve, chart, Outline(), 60)
        marks(view)
        report(snapshot)
        facts(snapshot)
        if view.start is not None:
            list(flat(view.start.config))
        assert all("\x1b" not in moment.text for moment in view.moments)
        assert all(matches(moment, []) for moment in view.moments)
        view.spans  # noqa: B018
        view.system  # noqa: B018


@levels.examples(60)
@given(seed=st.integers(0, 2**32), flips=st.integers(0, 200))
def test_flipped_bytes_and_lines_that_are_cut_and_mixed(seed: int, flips: int) -> None:
    draw = random.Random(seed)
    log = [line[draw.randrange(len(line)) :] if draw.random() < 0.1 else line for line in LOG]
    draw.shuffle(log)
    data = bytearray(b"".join(log))
    for _ in range(flips):
        data[draw.randrange(len(data))] = draw.randrange(256)
    history = History()
    history.feed_lines(bytes(data).split(b"\n"))
    look_at(history)


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@levels.examples(200)
@given(
    kind=st.sampled_from(
        ["step", "span", "system", "memory", "run_started", "alert", "control", "eval", "x"]
    ),
    fields=st.dictionaries(
        st.sampled_from(
            ["t", "step", "loss", "busy_ms", "gpus", "rows", "config", "name", "message", "code",
             "lane", "start_ms", "duration_ms", "val_loss", "state", "d2h_bytes", "r", "v"]
        ),
        VALUE,
    ),
)  # fmt: skip
def test_any_json_in_any_field(kind: str, fields: dict[str, object]) -> None:
    line = json.dumps({"v": 1, "k": kind, "t": 5.0, "m": 0, "r": 0, **fields}, allow_nan=True)
    history = History()
    history.feed_lines([*LOG[:40], line.encode("utf-8", "surrogatepass"), *LOG[40:60]])
    look_at(history)


WRONG: tuple[object, ...] = (
    "x",
    {},
    None,
    [1],
    -1e300,
    2**70,
    True,
    {"a": {"b": [None, "x"]}},
    "\x00\ud800",
)


def places(value: object, at: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the path of each value inside a record; of a list, that of its first ones."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:2]):
            yield from places(inner, (*at, number))


@pytest.mark.slow
def test_a_wrong_value_at_any_depth_of_any_record() -> None:
    """Types of fields are checked, and values inside of dicts and lists are used with care."""
    first_of_kind = {json.loads(line)["k"]: line for line in reversed(LOG)}
    cases = [(line, at) for line in first_of_kind.values() for at in places(json.loads(line))]
    assert len(first_of_kind) > 8 and len(cases) > 150
    for line, at in cases:
        for wrong in WRONG:
            record = json.loads(line)
            inside = reduce(operator.getitem, at[:-1], record)
            inside[at[-1]] = wrong
            history = History()
            history.feed_lines([*LOG[:30], json.dumps(record).encode(), *LOG[30:40]])
            try:
                look_at(history)
            except Exception as error:
                error.add_note(f"{record['k']}: {at} = {wrong!r}")
                raise


def test_a_file_that_is_no_log() -> None:
    for content in (b"\x00" * 5000, b"[" * 5000, b'{"k":' * 3000, b"\xff\xfe" * 99):
        history = History()
        history.feed_lines([content])
        assert history.unreadable == 1
        look_at(history)
