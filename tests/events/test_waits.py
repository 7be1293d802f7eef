"""What compute waited for, against a look at each millisecond."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.events import schema
from offloadtrain.events.waits import _CAUSES, exposed_by_lane, waits_of
from offloadtrain.step.program.operations import Lane


def span(lane: str, name: str, start_ms: float, end_ms: float) -> schema.LaneSpan:
    return schema.LaneSpan(
        step=1, lane=lane, name=name, start_ms=start_ms, duration_ms=end_ms - start_ms
    )


SPANS = [
    span("compute", "forward", 0, 30),
    span("wait", "h2d", 10, 20),
    span("d2h", "grad 1", 5, 12),
    span("host", "adam 0", 3, 9),
    span("host", "adam 1", 11, 16),
    span("load", "load 7", 10, 20),
    span("h2d", "h2d 1", 16.5, 19),
    span("wait", "host", 40, 41),
]


def test_a_wait_for_an_upload_that_waits_for_adam_is_a_wait_for_adam() -> None:
    """And that waits for gradients; the rest is the upload's."""
    first, second = waits_of(SPANS)
    assert first.by_lane == pytest.approx({"h2d": 2.5 + 0.5 + 1.0, "host": 5.0, "d2h": 1.0})
    assert (first.lane, first.name) == ("host", "adam 1")
    assert (second.by_lane, second.lane, second.name) == ({"host": 1.0}, "host", "")
    assert exposed_by_lane(SPANS) == pytest.approx({"h2d": 4.0, "host": 6.0, "d2h": 1.0})
    assert exposed_by_lane([]) == {}


def test_without_logged_waits_they_are_the_gaps_of_compute() -> None:
    spans = [
        span("compute", "outer", 0, 10),
        span("compute", "inner", 2, 7),
        span("h2d", "h2d 0", 3, 14.9),
        span("compute", "next", 15, 20),
        span("compute", "last", 30, 31),
    ]
    waits = [(wait.start_ms, wait.duration_ms, wait.lane, wait.name) for wait in waits_of(spans)]
    assert waits == [(10, 5, "h2d", "h2d 0"), (20, 10, "", "")]
    assert exposed_by_lane(spans) == {}


TIMES = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda x: (x[0], x[0] + x[1]))
WORK = st.tuples(st.sampled_from(["load", *_CAUSES]), TIMES)


@given(st.lists(WORK, max_size=12), st.lists(st.tuples(st.sampled_from(list(Lane)), TIMES)))
def test_each_millisecond_is_the_nearest_busy_lane_s(
    work: list[tuple[str, tuple[int, int]]], waits: list[tuple[str, tuple[int, int]]]
) -> None:
    spans = [span(lane, f"{lane} {start}", start, end) for lane, (start, end) in work]
    spans += [span("wait", lane, start, end) for lane, (start, end) in waits]
    expected: Counter[str] = Counter()
    for awaited, (start, end) in waits:
        for now in range(start, end):
            busy = {lane for lane, (begin, stop) in work if begin <= now < stop}
            expected[next((x for x in (awaited, *_CAUSES) if x in busy), awaited)] += 1
    assert exposed_by_lane(spans) == pytest.approx(dict(expected))
    assert sum(wait.duration_ms for wait in waits_of(spans)) == expected.total()


def test_all_lanes_but_those_of_forward_can_be_a_cause() -> None:
    """Loads of streamed weights are in the order of their use: a wait for one is logged as such."""
    assert {*_CAUSES} == {*map(str, Lane)} - {"compute", "load"}
