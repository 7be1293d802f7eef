"""Columns, compared with a loop over all values."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadtrain_tui.reading.columns import NOTHING, Measured, Outline, Series, Smoothed, Window
from offloadtrain_tui.widgets.chart import Canvas, Kind, Plot, bounds, logarithmic

VALUES = st.lists(
    st.one_of(
        st.floats(-1e9, 1e9), st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308]), st.none()
    ),
    max_size=700,
)


@given(values=VALUES, data=st.data())
def test_the_extent_of_any_stretch(values: list[float | None], data: st.DataObject) -> None:
    series = Series()
    cut = data.draw(st.integers(0, len(values)))
    for value in values[:cut]:
        series.append(value)
    series.extent(0, cut)  # stretches are measured, and must grow with what follows
    series.extend([math.nan if value is None else value for value in values[cut:]])
    lo = data.draw(st.integers(0, len(values)))
    hi = data.draw(st.integers(lo, len(values)))
    finite = [v for v in values[lo:hi] if v is not None and math.isfinite(v)]
    expected = (min(finite), max(finite)) if finite else NOTHING
    assert series.extent(lo, hi) == expected


def test_the_extent_of_rising_values_is_the_first_and_the_last() -> None:
    series = Series()
    series.extend(map(float, range(600)))
    for lo in range(40):
        for hi in range(lo + 1, 600, 3):
            assert series.extent(lo, hi) == (lo, hi - 1)


@given(
    measured=st.dictionaries(st.integers(0, 400), st.floats(-1e6, 1e6), min_size=1, max_size=9),
    data=st.data(),
)
def test_values_measured_now_and_then_are_joined_by_lines(
    measured: dict[int, float], data: st.DataObject
) -> None:
    """Never beyond the last value of that moment; also if it is asked in between."""
    series, positions = Measured(), sorted(measured)
    for position in positions:
        series.measure(position, measured[position])
        series.extent(0, series.shown(position + 1))
    length = data.draw(st.integers(0, 401))
    before = [position for position in positions if position < length]
    assert list(series.known(length)) == [(at, measured[at]) for at in before]
    assert series.last(length) == (measured[before[-1]] if before else None)
    assert series.shown(length) == (before[-1] + 1 if before else 0)
    lo = data.draw(st.integers(0, series.shown(length)))
    line = np.interp(range(positions[-1] + 1), positions, [measured[at] for at in positions])
    expected = line[max(lo, positions[0]) : series.shown(length)]
    if len(expected):
        extent = series.extent(lo, series.shown(length))
        assert extent == pytest.approx((min(expected), max(expected)), rel=1e-9, abs=1e-6)
    else:
        assert series.extent(lo, series.shown(length)) == NOTHING


def test_a_second_value_of_a_step_is_the_newest() -> None:
    """A resumed run evaluates again: the line stays."""
    series = Measured()
    for value in (2.0, 1.5):
        series.measure(3, value)
    assert series.last(4) == 1.5 and len(series.values) == 4


@given(lo=st.integers(0, 10**6), count=st.integers(0, 10**6), columns=st.integers(1, 300))
def test_columns_cover_a_window(lo: int, count: int, columns: int) -> None:
    window = Window(lo, lo + count)
    cut = window.columns(columns)
    if not count:
        assert cut == []
        return
    assert len(cut) == columns
    assert cut[0][0] == lo and cut[-1][1] >= lo + count
    assert all(begin < end for begin, end in cut)
    assert all(before[1] >= after[0] for before, after in itertools.pairwise(cut))
    assert count <= window.size <= count + max(count // 32, 1)


def test_most_columns_stay_as_a_run_grows() -> None:
    cuts = [tuple(Window(0, count).columns(100)) for count in range(10_000, 10_400)]
    assert len(set(cuts)) < 6


def test_the_last_number_is_before_a_gap() -> None:
    series = Series()
    assert series.last(0) is None
    for value in (1.0, None, math.nan):
        series.append(value)
    assert series.last(3) == 1.0
    assert series.last(1) == 1.0


def test_the_mean_begins_at_the_first_value_and_follows() -> None:
    source = Series()
    source.extend([4.0] * 5 + [math.nan] + [0.0] * 200)
    mean = Smoothed(source, span=20.0)
    mean.catch_up(3)
    assert list(mean.values) == pytest.approx([4.0] * 3)
    mean.catch_up(len(source))
    assert mean.values[5] == pytest.approx(4.0), "a gap changes nothing"
    assert 0 < mean.values[-1] < 0.01
    steps = list(mean.values[5:])
    assert steps == sorted(steps, reverse=True)


def drawn(extents: list[tuple[float, float]], width: int, height: int) -> list[str]:
    canvas = Canvas(width, height)
    canvas.draw(extents, *Plot(Kind("")).range_of(*(bounds([extents]) or (0.0, 1.0))), 0)
    return ["".join(text for text, _ in canvas.row(y)) for y in range(height)]


def test_columns_are_joined_and_gaps_are_not() -> None:
    step = [(0.0, 0.0), (0.0, 0.0), (7.0, 7.0), (7.0, 7.0)]
    gap = [(0.0, 0.0), NOTHING, NOTHING, (7.0, 7.0)]
    assert drawn(step, 2, 2) == [" ⡏", "⣀⠇"] and drawn(gap, 2, 2) == [" ⠈", "⡀ "]
    assert drawn([(float(i), float(i)) for i in range(8)], 4, 2) == ["  ⡠⠊", "⡠⠊  "]
    assert drawn([(3.0, 3.0)] * 4, 2, 1) == ["⠒⠒"], "a flat line is in the middle"


def test_logarithms_are_of_positive_values() -> None:
    assert logarithmic((10.0, 1000.0)) == (1.0, 3.0)
    assert logarithmic((-5.0, 100.0)) == (2.0, 2.0)
    assert logarithmic((-5.0, 0.0)) == NOTHING


def test_an_outline_that_grows_is_the_one_computed_anew() -> None:
    draw, series, outline = random.Random(0), Series(), Outline()
    for length in (*range(1, 90), 40, *range(200, 230), 229):
        series.extend(draw.gauss(0, 1) for _ in range(length - len(series)))
        window = Window(max(length - 150, 0) // 50 * 50, length)
        columns = outline.of(series, length, window, 37)
        assert columns == Outline().of(series, length, window, 37)
        assert columns == [series.extent(lo, min(hi, length)) for lo, hi in window.columns(37)]


def test_an_outline_computes_only_columns_with_new_values(monkeypatch: pytest.MonkeyPatch) -> None:
    series, outline, window = Series(), Outline(), Window(0, 1024)
    series.extend(float(n % 7) for n in range(1024))
    outline.of(series, 1000, window, 64)
    extents: list[tuple[int, int]] = []
    extent = Series.extent
    monkeypatch.setattr(
        Series, "extent", lambda self, lo, hi: extents.append((lo, hi)) or extent(self, lo, hi)
    )
    outline.of(series, 1001, window, 64)
    assert extents == [(992, 1001), (1008, 1001)]
