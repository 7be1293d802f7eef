"""Logs folded: the same however they are cut, and a view of any moment never changes."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloadtrain_tui.reading import timelines
from offloadtrain_tui.reading.history import History, fold
from offloadtrain_tui.reading.packed import pack
from offloadtrain_tui.reading.step_columns import LANES, STEP_FIELDS
from offloadtrain_tui.reading.timelines import SAMPLED_STEPS
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, milliseconds, short
from offloadtrain_tui.widgets.lanes import union_ms, waits_of

from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, lines, plain, unlucky


def columns(history: History) -> dict[str, list[str]]:
    """Everything that charts are drawn from, NaN included."""
    series = history.series | history.busy
    found = {name: list(map(repr, column.values)) for name, column in series.items()}
    return found | {"steps": list(map(repr, history.steps.values))}


@settings(max_examples=30)
@given(data=st.data())
def test_a_log_is_folded_the_same_in_any_pieces(data: st.DataObject) -> None:
    log = lines(unlucky())
    whole, parts = fold(log), History()
    begin = 0
    while begin < len(log):
        end = data.draw(st.integers(begin + 1, len(log)))
        parts.feed_lines(log[begin:end])
        begin = end
    assert columns(parts) == columns(whole)
    assert parts.moments.values == whole.moments.values
    assert parts.skipped == whole.skipped


def test_a_view_does_not_change_as_the_log_goes_on() -> None:
    log = lines(plain(60))
    history = History()
    history.feed_lines(log[:100])
    view = View.at(history)
    before = (view.step, view.last("loss"), view.memory, view.length, view.median_step_ms())
    history.feed_lines(log[100:])
    assert (view.step, view.last("loss"), view.memory, view.length, view.median_step_ms()) == before
    assert View.at(history).step == 60


def test_a_view_of_a_moment_is_the_log_cut_there() -> None:
    told = plain(60)
    history = fold(lines(told))
    for position in (3, 50, 120, len(told) - 2):
        moment = told[position][0]
        cut = [one for one in told if one[0] <= moment]
        then, alone = View.at(history, moment), View.at(fold(lines(cut)))
        assert then.step == alone.step
        assert then.length == alone.length
        assert then.val_loss == alone.val_loss
        assert then.memory == alone.memory
        assert then.system == alone.system
        assert then.moments == alone.moments
        assert then.spans == alone.spans
        assert (then.end is None) == (alone.end is None)


def test_what_a_step_says() -> None:
    one = recordings.step(7, random.Random(0))
    history = fold(lines([(BEGIN_S, one)]))
    view = View.at(history)
    assert view.last("loss") == one.loss and view.step == 7
    assert view.busy_ms("d2h") == one.busy_ms["d2h"]
    assert view.last("d2h_gbps") == pytest.approx(one.d2h_bytes / one.busy_ms["d2h"] / 1e6)
    assert view.last("exposed_share") == pytest.approx(one.exposed_ms / one.step_ms)
    assert view.last("host_ms") == one.busy_ms["host"]


def as_number(value: object) -> float:
    """What a column has for a value of the log's JSON."""
    if value in ("nan", "inf", "-inf") or (isinstance(value, int | float) and value is not True):
        return float(value)
    return math.nan


def test_columns_are_what_a_loop_over_the_lines_says() -> None:
    """Also of values that are missing, null, no numbers, or not finite, and of lanes that a few
    steps have."""
    draw, log = random.Random(0), []
    odd = ("nan", "-inf", None, "fast", [1], 10**300, True)
    for number in range(1, 400):
        values = json.loads(lines([(BEGIN_S + number, recordings.step(number, draw))])[0])
        values["busy_ms"] |= {"comm": 1.0 * number} if number % 50 == 0 else {}
        values["own_ms"] = None  # a column without a number
        for name in draw.sample(("loss", "grad_norm", "mfu", "lr", "d2h_bytes"), number % 3):
            values[name] = draw.choice(odd)
        if number % 70 == 0:
            del values["mfu"], values["step_ms"], values["busy_ms"]["h2d"]
        log.append(values)
    found = columns(fold([json.dumps(values).encode() for values in log]))
    for name in STEP_FIELDS:
        assert found[name] == [repr(as_number(values.get(name))) for values in log], name
    for lane in LANES:
        told = [repr(as_number(values["busy_ms"].get(lane))) for values in log]
        assert found[lane] == told, lane


def test_ends_and_starts() -> None:
    told = unlucky()
    history = fold(lines(told))
    stopped = next(t for t, e in told if isinstance(e, schema.RunEnded))
    assert View.at(history, stopped - 0.01).end is None
    ended = View.at(history, stopped + 1).end
    assert ended is not None and ended.status == "stopped"
    assert View.at(history).end is None, "it goes on after that"
    started = View.at(history).start
    assert started is not None and started.pid == 4712


def test_odd_steps_are_marked_and_told() -> None:
    history = fold(lines(unlucky()))
    assert [history.steps.values[position] for position in history.skipped] == [12, 30, 31, 44, 45]
    text = [moment.text for moment in history.moments.values if moment.kind == "step"]
    assert "loss is nan" in text[0] and "gradient norm inf" in text[1]
    assert math.isnan(history.series["loss"].values[11])


def test_alerts_are_active_until_they_are_cleared() -> None:
    def alert(code: str, state: str) -> schema.Alert:
        return schema.Alert(code=code, state=state, message="m")

    def seen(code: str) -> schema.Control:
        return schema.Control(id="1", action="acknowledge", state="done", message=code)

    told = [(1.0, alert("a", "raised")), (2.0, alert("b", "raised")), (3.0, alert("a", "cleared"))]
    told += [(4.0, alert("c", "raised")), (5.0, seen("c")), (6.0, seen("b"))]
    told += [(7.0, alert("b", "cleared")), (8.0, alert("b", "raised"))]
    history = fold(lines(told))
    assert [one.code for one in View.at(history, 4.5).active_alerts()] == ["b", "c"]
    assert View.at(history, 6.5).active_alerts() == []
    assert [one.code for one in View.at(history, 2.5).active_alerts()] == ["a", "b"]
    assert [one.code for one in View.at(history).active_alerts()] == ["b"]


def test_a_clock_that_is_set_back_hides_nothing() -> None:
    told = plain(20)
    back = [(t - (3600.0 if i > 30 else 0.0), e) for i, (t, e) in enumerate(told)]
    history = fold(lines(back))
    assert View.at(history).step == 20
    assert View.at(history, back[30][0]).step <= 20
    assert history.steps.times == sorted(history.steps.times)


def test_only_the_newest_timelines_are_kept() -> None:
    history = History()
    for number in range(SAMPLED_STEPS + 50):
        history.feed_lines(lines((BEGIN_S + number, span) for span in recordings.spans(number)))
    assert history.timelines.of(10) is None
    assert len(history.timelines.of(SAMPLED_STEPS + 49) or []) == 20
    assert View.at(history, BEGIN_S + 60).spans[0].step == 60


@pytest.mark.parametrize(("plain_bytes", "compressed"), [(0, 7), (6000, 5), (1 << 19, 0)])
def test_a_timeline_is_the_same_whether_it_is_compressed_or_not(
    plain_bytes: int, compressed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a step that a resumed run sampled again. A step's lines have about 2,800 bytes: the
    limits keep none of them, two, or all; and always the newest."""
    packed: list[int] = []

    def counted(kept: list[bytes]) -> bytes:
        packed.append(len(kept))
        return pack(kept)

    monkeypatch.setattr(timelines, "PLAIN_BYTES", plain_bytes)
    monkeypatch.setattr(timelines, "pack", counted)
    history, numbers = History(), (1, 2, 3, 4, 5, 3, 4, 6)
    for number in numbers:
        for span in recordings.spans(number):  # one by one, as they are written
            history.feed_lines(lines([(BEGIN_S + number, span)]))
            assert (history.timelines.of(number) or [])[-1] == span
    for number in numbers:
        assert list(history.timelines.of(number) or []) == list(recordings.spans(number))
    assert len(packed) == compressed


def test_waits_of_compute_name_what_ended_them() -> None:
    def span(lane: str, name: str, start_ms: float, spent_ms: float) -> schema.LaneSpan:
        return schema.LaneSpan(
            step=1, lane=lane, name=name, start_ms=start_ms, duration_ms=spent_ms
        )

    found = waits_of(
        [
            span("compute", "root", 0, 10),
            span("compute", "inside", 2, 5),
            span("h2d", "h2d 0", 3, 11.9),
            span("host", "adam 0", 0, 9),
            span("compute", "next", 15, 5),
            span("compute", "last", 30, 1),
        ]
    )
    assert [(wait.start_ms, wait.duration_ms, wait.lane, wait.name) for wait in found] == [
        (10, 5, "h2d", "h2d 0"),
        (20, 10, "", ""),
    ]
    assert union_ms([span("compute", "a", 0, 10), span("compute", "b", 2, 5)]) == 10
    told = waits_of(
        [
            span("compute", "root", 0, 20),
            span("wait", "h2d", 4, 3),
            span("h2d", "h2d 1", 2, 4.9),
            span("compute", "next", 30, 5),
        ]
    )
    assert [(wait.start_ms, wait.duration_ms, wait.name) for wait in told] == [(4, 3, "h2d 1")]


def test_foreign_lines_are_counted_and_unknown_kinds_too() -> None:
    log = [b"not json", b"[1, 2]", b'"text"', b'{"k":"new kind","t":1,"r":0,"v":2}', b"", b"{}"]
    history = History()
    history.feed_lines(log)
    assert history.unreadable == 5
    odd = [b'{"k":"step","t":"soon","step":1}', b'{"k":"step","t":1.5,"step":"one"}']
    history.feed_lines(odd)
    assert history.unreadable == 7 and View.at(history).length == 0


def test_a_step_with_nonsense_in_it_is_still_a_step() -> None:
    text = b'{"v":1,"k":"step","t":5.0,"r":0,"step":3,"loss":"high","busy_ms":[1],"lr":true}'
    huge = b'{"v":1,"k":"step","t":6.0,"r":0,"step":4,"loss":' + b"9" * 400 + b"}"
    history = History()
    history.feed_lines([text, huge])
    view = View.at(history)
    assert view.step in (3, 4)
    assert view.last("loss") is None or not math.isnan(view.last("loss") or 0.0)


def test_escapes_are_taken_out() -> None:
    history = fold(lines(unlucky()))
    notes = [moment.text for moment in history.moments.values if moment.kind == "control"]
    assert notes == ["note done: disk \ufffd[31mchanged\ufffd"]
    assert clean("a\nb\tc\x00\u202e\u200b") == "a b c\ufffd\ufffd\ufffd"
    assert clean("x" * 50, 10) == "x" * 10 + "…"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (2.3146, "2.315"), (3e-4, "3e-4"), (65536.0, "65.5k"), (1.5e9, "1.5B"),
     (0.0, "0"), (math.nan, "nan"), (-0.00012, "-1.2e-4"), (123456.0, "123k")],
)  # fmt: skip
def test_short_numbers(value: float | None, text: str) -> None:
    assert short(value) == text


def test_milliseconds_are_seconds_from_a_thousand_on() -> None:
    assert milliseconds(12.34) == "12.3 ms"
    assert milliseconds(2310.0) == "2.31 s"
    assert milliseconds(None) == "-"
