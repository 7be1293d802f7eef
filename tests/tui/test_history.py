"""Logs folded: the same however they are cut, and a view of any moment never changes."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloadtrain_tui.reading.columns import SAMPLED_STEPS
from offloadtrain_tui.reading.history import LANES, STEP_FIELDS, History, fold
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, milliseconds, short
from offloadtrain_tui.widgets.lanes import union_ms

from offloadtrain.events import log_lines, schema
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, Timed, lines, plain, unlucky


def columns(history: History) -> dict[str, list[str]]:
    """Everything that charts are drawn from, NaN included."""
    series = history.series | history.busy | {"steps": history.steps}
    return {name: list(map(repr, column.values)) for name, column in series.items()}


@settings(max_examples=30)
@given(data=st.data())
def test_a_log_is_folded_the_same_in_any_pieces(data: st.DataObject) -> None:
    log = lines(unlucky())
    complete, parts = fold(log), History()
    begin = 0
    while begin < len(log):
        end = data.draw(st.integers(begin + 1, len(log)))
        parts.feed_lines(log[begin:end])
        begin = end
    assert columns(parts) == columns(complete)
    assert parts.moments.values == complete.moments.values
    assert parts.skipped == complete.skipped


def test_a_view_does_not_change_as_the_log_grows() -> None:
    log = lines(plain(60))
    history = History()
    history.feed_lines(log[:100])
    view = View.at(history)
    before = (view.step, view.last("loss"), view.memory, view.length, view.median_step_ms())
    history.feed_lines(log[100:])
    assert (view.step, view.last("loss"), view.memory, view.length, view.median_step_ms()) == before
    assert View.at(history).step == 60


def test_a_view_of_a_moment_is_the_log_cut_there() -> None:
    events = plain(60)
    history = fold(lines(events))
    for position in (3, 50, 120, len(events) - 2):
        moment = events[position][0]
        cut = [event for event in events if event[0] <= moment]
        then, alone = View.at(history, moment), View.at(fold(lines(cut)), moment)
        for name in ("step", "length", "val_loss", "memory", "system", "moments", "spans"):
            assert getattr(then, name) == getattr(alone, name), name
        assert (then.end is None) == (alone.end is None)


def test_the_fields_of_a_step() -> None:
    step = recordings.step(7, random.Random(0))
    view = View.at(fold(lines([(BEGIN_S, step)])))
    assert view.last("loss") == step.loss and view.step == 7
    assert view.busy_ms("d2h") == step.busy_ms["d2h"]
    assert view.last("d2h_gbps") == pytest.approx(step.d2h_bytes / step.busy_ms["d2h"] / 1e6)
    assert view.last("exposed_share") == pytest.approx(step.exposed_ms / step.step_ms)
    assert view.last("host_ms") == step.busy_ms["host"]


def as_number(value: object) -> float:
    """What a column has for a value of the log's JSON."""
    if value in ("nan", "inf", "-inf") or (isinstance(value, int | float) and value is not True):
        return float(value)
    return math.nan


def test_columns_equal_those_of_a_loop_over_the_lines() -> None:
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
    folded = columns(fold([json.dumps(values).encode() for values in log]))
    for name in STEP_FIELDS:
        assert folded[name] == [repr(as_number(values.get(name))) for values in log], name
    for lane in LANES:
        expected = [repr(as_number(values["busy_ms"].get(lane))) for values in log]
        assert folded[lane] == expected, lane


def test_ends_and_starts() -> None:
    events = unlucky()
    history = fold(lines(events))
    stopped = next(t for t, e in events if isinstance(e, schema.RunEnded))
    assert View.at(history, stopped - 0.01).end is None
    ended = View.at(history, stopped + 1).end
    assert ended is not None and ended.status == "stopped"
    assert View.at(history).end is None, "it goes on after that"
    started = View.at(history).start
    assert started is not None and started.pid == 4712


def test_skipped_steps_are_marked_and_described() -> None:
    history = fold(lines(unlucky()))
    assert [history.steps.values[position] for position in history.skipped] == [12, 30, 31, 44, 45]
    text = [moment.text for moment in history.moments.values if moment.kind == "step"]
    assert "loss is nan" in text[0] and "gradient norm inf" in text[1]
    assert math.isnan(history.series["loss"].values[11])


def test_alerts_are_active_until_they_are_cleared() -> None:
    def alert(code: str, state: str) -> schema.Alert:
        return schema.Alert(code=code, state=state, message="m")

    def acknowledged(code: str) -> schema.Control:
        return schema.Control(id="1", action="acknowledge", state="done", message=code)

    events = [
        (1.0, alert("a", "raised")),
        (2.0, alert("b", "raised")),
        (3.0, alert("a", "cleared")),
    ]
    events += [(4.0, alert("c", "raised")), (5.0, acknowledged("c")), (6.0, acknowledged("b"))]
    events += [(7.0, alert("b", "cleared")), (8.0, alert("b", "raised"))]
    history = fold(lines(events))
    assert [alert.code for alert in View.at(history, 4.5).active_alerts()] == ["b", "c"]
    assert View.at(history, 6.5).active_alerts() == []
    assert [alert.code for alert in View.at(history, 2.5).active_alerts()] == ["a", "b"]
    assert [alert.code for alert in View.at(history).active_alerts()] == ["b"]


def set_back(events: list[Timed], back_s: float, every: int, booted_s: float) -> list[bytes]:
    """Return the log of a process whose clock goes back at every so many records.

    Args:
        booted_s: when its monotonic clock was 0; inf: it writes none.
    """
    return [
        log_lines.to_line(
            event, 0, time_s - back_s * (index // every), int(max(time_s - booted_s, 0.0) * 1e9)
        )
        for index, (time_s, event) in enumerate(events)
    ]


@pytest.mark.parametrize("back_s", [0.5, 5.0, 120.0, 86400.0])
@pytest.mark.parametrize("every", [1, 7, 31])
@pytest.mark.parametrize("booted_s", [BEGIN_S - 1000.0, math.inf])
def test_a_clock_that_is_set_back_changes_no_order(
    back_s: float, every: int, booted_s: float
) -> None:
    events, resumed = plain(20), [recordings.start(start_step=20), *(e for _, e in plain(3)[1:])]
    history = fold(set_back(events, back_s, every, booted_s))
    ended = View.at(history).end
    assert ended is not None and ended.status == "done"
    assert View.at(history).step == 20 and not View.at(history).is_before_first_step
    times = list(history.steps.times)
    assert times == sorted(times)
    if booted_s < math.inf:
        true = fold(lines(events)).steps.times
        assert times == pytest.approx(list(true), abs=1e-4), "a step has lasted as long as it has"
    for event in resumed[:-1]:  # another boot of the machine: its clocks begin anew
        history.feed_lines([log_lines.to_line(event, 0, BEGIN_S - 90000.0, 5)])
        if isinstance(event, schema.RunStarted):
            assert View.at(history).is_before_first_step and View.at(history).step == 20
        assert View.at(history).end is None
    assert View.at(history).step == 3 and not View.at(history).is_before_first_step


def test_only_the_newest_timelines_stay() -> None:
    history = History()
    for number in range(SAMPLED_STEPS + 50):
        history.feed_lines(lines((BEGIN_S + number, span) for span in recordings.spans(number)))
    assert history.timelines.of(10) is None
    assert len(history.timelines.of(SAMPLED_STEPS + 49) or []) == 20
    assert View.at(history, BEGIN_S + 60).spans[0].step == 60


def test_a_timeline_is_the_same_whether_it_is_compressed_or_not() -> None:
    """Also of a step that a resumed run sampled again. All but the newest are compressed."""
    history, numbers = History(), (1, 2, 3, 4, 5, 3, 4, 6)
    for number in numbers:
        for span in recordings.spans(number):  # one by one, as they are written
            history.feed_lines(lines([(BEGIN_S + number, span)]))
            assert (history.timelines.of(number) or [])[-1] == span
    for number in numbers:
        assert list(history.timelines.of(number) or []) == list(recordings.spans(number))
    kept = history.timelines._lines
    assert [isinstance(kept[number], bytes) for number in sorted(kept)] == [True] * 5 + [False]


def span(lane: str, name: str, start_ms: float, spent_ms: float) -> schema.LaneSpan:
    return schema.LaneSpan(step=1, lane=lane, name=name, start_ms=start_ms, duration_ms=spent_ms)


def test_nested_work_counts_once() -> None:
    spans = [span("compute", "outer", 0, 10), span("compute", "inner", 2, 5)]
    assert union_ms([*spans, span("compute", "next", 15, 5)]) == 15


def test_a_path_that_is_not_utf8_is_read() -> None:
    """Python's halves of surrogate pairs stand for its bytes; numbers that are none stay unread."""
    line = b'{"v":1,"k":"warning","t":5.0,"m":1,"r":0,"code":"x","message":"caf\\udce9","step":%s}'
    history = History()
    history.feed_lines([line % b"3", line % b"NaN"])
    (warning,) = history.moments.values
    assert ("caf\ufffd" in warning.text, history.unreadable) == (True, 1)


def test_lines_that_are_no_records_are_counted() -> None:
    """A step with nonsense in some fields is still a step."""
    log = [b"not json", b"[1, 2]", b'"text"', b'{"k":"new kind","t":1,"r":0,"v":2}', b"", b"{}"]
    history = History()
    history.feed_lines(log)
    assert history.unreadable == 5
    history.feed_lines([b'{"k":"step","t":"soon","step":1}', b'{"k":"step","t":1.5,"step":"one"}'])
    assert history.unreadable == 7 and View.at(history).length == 0
    text = b'{"v":1,"k":"step","t":5.0,"r":0,"step":3,"loss":"high","busy_ms":[1],"lr":true}'
    huge = b'{"v":1,"k":"step","t":6.0,"r":0,"step":4,"loss":' + b"9" * 400 + b"}"
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


SHORT: list[tuple[float | None, str]] = [
    (None, "-"),
    (2.3146, "2.315"),
    (3e-4, "3e-4"),
    (65536.0, "65.5k"),
    (1.5e9, "1.5B"),
    (0.0, "0"),
    (math.nan, "nan"),
    (-0.00012, "-1.2e-4"),
    (123456.0, "123k"),
]


def test_short_numbers() -> None:
    for value, text in SHORT:
        assert short(value) == text
    assert milliseconds(12.34) == "12.3 ms"
    assert milliseconds(2310.0) == "2.31 s"
    assert milliseconds(None) == "-"
