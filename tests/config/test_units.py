"""Quantities: what is printed is short, close to the truth, and can be read back."""

from __future__ import annotations

import math
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config.units import (
    format_bytes,
    format_clock,
    format_count,
    format_duration,
    format_rate,
    format_seconds,
    parse_bytes,
)

_COUNT_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


BYTES: list[tuple[float, str]] = [
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1.0 KiB"),
    (1536, "1.5 KiB"),
    (2**20 - 1, "1.0 MiB"),  # not 1024.0 KiB
    (14 * 2**30, "14.0 GiB"),
    (2**60, "1024.0 PiB"),
    (-2048, "-2.0 KiB"),
    (math.nan, "nan B"),
]


def test_bytes() -> None:
    for count, text in BYTES:
        assert format_bytes(count) == text


COUNTS: list[tuple[float, str]] = [
    (0, "0"),
    (999, "999"),
    (1000, "1k"),
    (12_345.6, "12.3k"),
    (999_999, "1M"),  # not 1e+03k
    (1_340_000_000, "1.34B"),
    (1.3e13, "13T"),
]


def test_counts() -> None:
    for count, text in COUNTS:
        assert format_count(count) == text


def test_rates() -> None:
    assert format_rate(12_345.6, "tok") == "12.3k tok/s"


DURATIONS: list[tuple[float, str]] = [
    (0, "0ms"),
    (0.25, "250ms"),
    (0.9999, "1s"),  # not 1000ms
    (1, "1s"),
    (59.7, "1m00s"),
    (75.2, "1m15s"),
    (3599.8, "1h00m"),
    (4000, "1h06m"),
    (86_399.9, "1d00h"),
    (200_000, "2d07h"),
    (-1, "-"),
    (math.inf, "-"),
    (math.nan, "-"),
]


def test_durations() -> None:
    for seconds, text in DURATIONS:
        assert format_duration(seconds) == text


SIZES = [
    ("4096", 4096),
    (" 32GiB ", 32 * 2**30),
    ("1.5 MB", 1_500_000),
    (".5kib", 512),
    ("1T", 10**12),
    ("7 B", 7),
]


def test_sizes_are_read() -> None:
    for text, count in SIZES:
        assert parse_bytes(text) == count


NO_SIZES = ["", "GiB", "5 iB", "-1", "1e9", "1 GiB free", "1,5GB", "nan"]


def test_other_text_is_no_size() -> None:
    for text in NO_SIZES:
        with pytest.raises(ValueError, match="is not a size such as 32GiB"):
            parse_bytes(text)


@given(st.integers(0, 2**60))
def test_printed_bytes_read_back_within_their_digits(count: int) -> None:
    text = format_bytes(count)
    assert abs(parse_bytes(text) - count) <= 0.05 * 1024 ** _power(text) + 0.5


def _power(text: str) -> int:
    return ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(text.split()[1])


@given(st.integers(0, 999 * 10**12))
def test_printed_counts_are_short_and_right_to_three_digits(count: int) -> None:
    text = format_count(count)
    digits = text.rstrip("kMBT")
    assert "e" not in text and len(text) <= 5
    assert math.isclose(float(digits) * _COUNT_UNITS[text[len(digits) :]], count, rel_tol=0.0051)


SECONDS = [
    (164.7, "165 s"),
    (0.073, "73 ms"),
    (4.4e-5, "44 µs"),
    (1.5e-9, "0 s"),
    (2320.0, "2320 s"),
]


def test_seconds_of_tables() -> None:
    for seconds, text in SECONDS:
        assert format_seconds(seconds) == text


def test_a_clock_says_the_day_only_where_it_must() -> None:
    now_s = datetime(2026, 11, 20, 18, 0).timestamp()
    assert format_clock(now_s + 3 * 3600, now_s) == "21:00"
    assert format_clock(now_s + 33 * 3600, now_s) == "Sun 03:00"
    assert format_clock(now_s + 34 * 86_400, now_s) == "Dec 24"
    assert format_clock(math.nan, now_s) == "-"
