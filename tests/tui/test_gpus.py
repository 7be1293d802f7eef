"""GPUs over time: which samples a chart has, and the links that there are."""

from __future__ import annotations

from dataclasses import replace

from offloadtrain_tui.panels.gpus import KINDS, plot
from offloadtrain_tui.reading.history import GpuHistory, fold
from offloadtrain_tui.reading.view import View

from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, lines


def view(*, uuid: str, nvlink: float | None = None) -> View:
    """A rank on the GPU of this UUID, of a machine with two, and what they do each 5 s."""
    plan = {"gpu_uuid": uuid, "device": "cuda:0"}
    events: list[recordings.Timed] = [(BEGIN_S, recordings.start(plan=plan))]
    for number in range(10):
        gpus = tuple(
            replace(
                recordings._gpu(index),
                power_w=100.0 * (index + 1) + number,
                clock_mhz=1400 + number,
                nvlink_rx_bytes_per_s=nvlink,
                nvlink_tx_bytes_per_s=nvlink,
            )
            for index in range(2)
        )
        system = schema.System(
            cpu_percent=1.0,
            rss_bytes=1,
            host_available_bytes=1,
            host_total_bytes=2,
            swap_used_bytes=0,
            gpus=gpus,
        )
        events.append((BEGIN_S + 5 * number, system))
    return View.at(fold(lines(events)))


def test_a_rank_has_the_history_of_its_own_gpu() -> None:
    for uuid, first in (("GPU-1", 100.0), ("GPU-2", 200.0)):
        shown = plot(KINDS["power"], view(uuid=uuid))
        assert list(shown.curves[0].series.values) == [first + number for number in range(10)]
        assert shown.axis == ("45s before", "last sample")
    assert not view(uuid="GPU-9").history.systems.gpu.times, "it is not on this machine"
    shown = plot(KINDS["nvlink"], view(uuid="GPU-1", nvlink=25e9))
    assert [curve.series.last(curve.length) for curve in shown.curves] == [25e9, 25e9]
    assert shown.is_mirrored and shown.kind.form(25e9) == "25"


def test_a_moment_has_the_samples_until_then_and_zoom_the_newest() -> None:
    newest = view(uuid="GPU-1")
    then = plot(KINDS["clock"], View.at(newest.history, BEGIN_S + 21))
    assert (then.curves[0].length, then.window.hi) == (5, 5)
    history = GpuHistory()
    for number in range(100):
        history.add(BEGIN_S + number, [{"power_w": float(number)}], "")
    assert list(history.series["power_w"].values)[-1] == 99.0, "the only GPU needs no name"
    newest.history.systems.gpu = history
    assert plot(KINDS["power"], newest, 4).window.lo == 75


def test_a_hostile_sample_is_no_number() -> None:
    history = GpuHistory()
    odd: tuple[object, ...] = ("97", True, None, [1], float("nan"), 10**400, {})
    for value in odd:
        history.add(BEGIN_S, [{"power_w": value}], "")
    history.add(BEGIN_S, ["gpu", 7, None], "")
    assert len(history.times) == 7
    assert history.series["power_w"].last(7) is None
