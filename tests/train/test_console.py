"""The console: the contents of a line, when it is shown, and that no text controls the terminal."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from offloadtrain.config.units import format_clock
from offloadtrain.events import schema
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.train.log.console import Console, format_step, loss_curve

STEP = schema.Step(
    step=3,
    loss=2.34567,
    tokens=0,
    grad_norm=0.912345,
    lr=3e-4,
    tokens_per_s=12_345.6,
    mfu=0.4123,
    exposed_ms=1.26,
)
NOW_S = 1_795_000_000.0
"""11:06:40 UTC."""
FIGURES = {
    "steps": 200,
    "device_bytes": 3 * 2**30,
    "host_bytes": 14 * 2**30,
    "eta_s": 4000.0,
    "now_s": NOW_S,
}


def line_of(changed: Mapping[str, Any] = MappingProxyType({}), **figures: Any) -> str:
    """Return the line of a step, changed, with other figures of the run."""
    return format_step(replace(STEP, **changed), **FIGURES | figures)


def of_step(step: int = 3) -> Callable[[], str]:
    return partial(line_of, {"step": step})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_set_up_shows_its_progress() -> None:
    """At once on a terminal, with the next sign of life elsewhere; a part that is done shows
    nothing."""
    part = "page-locking host memory 25% (30.0 GiB of 118.0 GiB)"
    begin = "... preparing data and model"
    for stream, silent_s, expected in (
        (Terminal(), 1, f"... {part}"),
        (io.StringIO(), 8, f"{begin}, {part}: 8s so far\n"),
    ):
        clock = Clock()
        console = Console(stream, clock=clock)
        console.doing("preparing data and model")
        HEARTBEAT.advance("page-locking host memory", 30 << 30, 118 << 30)
        for _ in range(silent_s):
            assert "page-locking" not in stream.getvalue()
            clock.now += 1
            console.fill_silence()
        assert stream.getvalue().endswith(expected)
        HEARTBEAT.advance("page-locking host memory", 118 << 30, 118 << 30)
        clock.now += 9
        console.fill_silence()
        assert stream.getvalue().endswith(f"{begin}: {silent_s + 9}s so far\n")
    assert HEARTBEAT.spent_s["page-locking host memory"] >= 0.0
    console.doing("step 1")
    assert HEARTBEAT.part is None


# ---- lines


def test_a_phase_of_one_part_is_named_once() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(stream, clock=clock)
    console.doing("evaluating")
    HEARTBEAT.advance("evaluating", 1 << 30, 4 << 30)
    clock.now += 8
    console.fill_silence()
    assert stream.getvalue() == "... evaluating 25% (1.0 GiB of 4.0 GiB): 8s so far\n"
    console.doing("step 1")


def test_a_step_line_says_it_all() -> None:
    clock = format_clock(NOW_S + 4000, NOW_S)
    assert line_of() == (
        f"step 3/200 1%  eta 1h06m ({clock})  loss 2.3457  grad 0.912  lr 3.00e-04  12.3k tok/s  "
        "mfu 41.2%  waits 1.3ms  dev 3.0 GiB  host 14.0 GiB"
    )


def test_unknown_figures_are_left_out_and_rare_ones_are_added() -> None:
    assert "dev" not in line_of(device_bytes=0), "on a CPU all are the host's"
    bare = line_of({"grad_norm": None, "mfu": None}, eta_s=math.nan)
    assert "grad" not in bare and "mfu" not in bare and "1%  eta - (-)  loss" in bare
    full = line_of({"skipped": True, "loss_scale": 65536.0}, eta_s=0.0)
    assert "SKIPPED  grad" in full and "scale 65536" in full
    assert "eta" not in full, "the last step has no time left"
    broken = line_of({"loss": math.nan, "grad_norm": math.inf})
    assert "loss nan" in broken and "grad inf" in broken


def test_a_long_phase_is_reported_every_few_seconds() -> None:
    """A first validation, a step under load, a compiler: never ten seconds without a word. Other
    output counts, and a longer interval is respected."""
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, clock=clock)
    console.say("the demo")
    console.doing("validation")
    times_s = [clock.now]
    for _ in range(60):
        clock.now += 1
        before = stream.getvalue()
        console.fill_silence()
        times_s += [clock.now] if stream.getvalue() != before else []
    assert all(b - a < 10 for a, b in itertools.pairwise([*times_s, clock.now]))
    assert stream.getvalue().splitlines()[:3] == [
        "the demo",
        "... validation: 8s so far",
        "... validation: 16s so far",
    ]
    for every_s, silent_s in ((5, 9), (600, 599)):
        stream = io.StringIO()
        console = Console(stream, clock=clock, every_s=every_s)
        clock.now += silent_s
        if every_s == 5:
            console.spoken()
        console.fill_silence()
        assert stream.getvalue() == ""


# ---- when and where


def test_a_plain_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the output is no terminal, or a dumb one."""
    monkeypatch.setenv("TERM", "dumb")
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        console = Console(stream, every_s=5.0, clock=clock)
        for step in range(1, 13):
            console.step(of_step(step))
            clock.now += 1
        shown = [line.split()[1] for line in stream.getvalue().splitlines()]
        assert shown == ["1/200", "6/200", "11/200"]
        console.step(of_step(200), force=True)
        assert stream.getvalue().splitlines()[-1].startswith("step 200/200")
        assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_live_line_is_rewritten_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And messages keep it."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("TERM", raising=False)
    stream, clock = Terminal(), Clock()
    console = Console(stream, every_s=5.0, clock=clock)
    console.say("before")
    console.step(of_step())
    console.step(of_step(4))  # too early for a terminal, too
    clock.now += 0.2
    console.step(of_step(5))
    console.say("after")
    console.end_line()
    first, second = of_step()()[:39], of_step(5)()[:39]
    erase = "\r\x1b[2K"
    assert stream.getvalue() == f"before\n{erase}{first}{erase}{second}\nafter\n"


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("live", [False, True])
def test_a_terminal_that_goes_away_does_not_end_the_run(live: bool) -> None:
    stream = Gone()
    stream.isatty = lambda: live  # type: ignore[method-assign]
    console = Console(stream)
    console.step(of_step())
    console.say("hello")
    console.end_line()
    stream.close()
    console.say("hello")


# ---- text from elsewhere

HOSTILE = [
    "\x1b]52;c;ZXZpbA==\x07",  # writes the clipboard
    "\x1b[2J",
    "\x9b2J",  # the same in one C1 character
    "\x1b]0;title\x1b\\",
    "a\rb",
    "a\x08b",
    "a\x7fb",
    "\u202egnp.exe",
    "\u2066hidden\u2069",
    "a\u2028b",
]


def test_no_text_controls_the_terminal() -> None:
    for text in HOSTILE:
        stream = io.StringIO()
        Console(stream).say(text)
        assert stream.getvalue()[:-1].isprintable(), ascii(text)


# ---- the curve


CURVES: list[tuple[list[tuple[int, float]], int, int, str]] = [
    (
        [(step, 8.0 - step) for step in range(1, 8)],
        *(7, 3),
        "   7.000 │█▄\n         │███▅▁\n   1.000 │█████▅▁\n         └───────\n          1     7",
    ),
    ([(1, 2.0), (100, 1.0)], 10, 2, "   2.000 │█████████\n"),  # gaps are filled from the left
    ([], 72, 1, "no losses to plot"),
    ([(1, math.nan), (2, math.inf)], 72, 1, "no losses to plot"),
    ([(7, 2.5), (8, 2.5)], 72, 1, "   2.500 │▁▁\n         └──\n          7 8"),
    (
        [(1, 5e6), (2, math.nan), (3, 5e6)],
        *(72, 1),
        "5.00e+06 │▁▁▁\n         └───\n          1 3",
    ),
]


def test_curves() -> None:
    for points, width, height, expected in CURVES:
        assert loss_curve(points, width=width, height=height).startswith(expected)
    points = [(step, 1.0 if step % 2 else 3.0) for step in range(1, 1001)]
    curve = loss_curve([*points, (1001, 4.0), (1002, 4.0)], width=10, height=4)
    assert curve.startswith("   2.040 │"), "the last column: 98 steps of 1 and 3, 2 of 4"
