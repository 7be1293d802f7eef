"""The doctor's judgements, on machines that are made up."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offloadtrain.cli.doctor import checks, examine, measure
from offloadtrain.cli.doctor.checks import Check, DriveRates, Status
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.nvml import link_gbps
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FORMATS, ITEMSIZE
from tests.small_buffers import small_doctor

GIB = 1 << 30
DEFAULT_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL

MACHINE = Machine(
    gpu="NVIDIA H100 80GB HBM3",
    gpu_memory="79 GiB",
    host_memory="128 GiB",
    bf16_tflops=660.0,
    fp16_tflops=655.0,
    fp32_tflops=50.0,
    half_width=1720.0,
    hbm_gbps=2800.0,
    h2d_gbps=52.0,
    d2h_gbps=53.0,
    host_link_gbps=52.0,
    gpu_link_gbps=52.0,
    dram_gbps=140.0,
    shared_dram_gbps=140.0,
    cores=16,
    fp32_gparams=4.0,
    split16_gparams=6.5,
    norm_gparams=16.0,
)


def test_a_line_of_the_report() -> None:
    fine, bad = Check("disk", PASS, "all well"), Check("disk", WARN, "slow", "Buy one.")
    assert str(fine) == "PASS  disk            all well"
    assert str(bad).splitlines() == ["WARN  disk            slow", "      Buy one."]
    assert asdict(bad) == {
        "name": "disk",
        "status": "WARN",
        "found": "slow",
        "advice": "Buy one.",
    }


SM = "2.11.0+cu130"
NODES = {0: range(8), 1: range(8, 16)}
LARGE = 500 * GIB
STATE_RATES = DriveRates(disk_gbps=1.5, disk_read_gbps=6, disk_write_gbps=4, disk_both_gbps=7)
SLOWER = replace(MACHINE, gpu="", bf16_tflops=0.0385, fp32_tflops=0.0803)


def gpu(names: list[str], visible: list[str], cuda: str | None, hidden: bool = False) -> Check:
    return checks.check_gpu(names, visible, cuda=cuda, reason="driver too old", hidden=hidden)


def disk(free: int, drive: DriveRates | str | None) -> Check:
    return checks.check_disk("/data", free, drive)


JUDGED: list[tuple[Check, Status, str]] = [
    # kernels of the torch build for a card; sm_86 code runs on 8.9
    (checks.check_arch("card", (7, 0), DEFAULT_ARCHS, SM), FAIL, "sm_70"),
    (checks.check_arch("Tesla V100", (7, 0), DEFAULT_ARCHS, SM), FAIL, "CUDA 12.6 build of torch"),
    (checks.check_arch("card", (7, 0), ("sm_60", "sm_70", "sm_80"), SM), PASS, ""),
    (checks.check_arch("card", (8, 9), DEFAULT_ARCHS, SM), PASS, ""),
    (checks.check_arch("card", (8, 7), ("sm_89",), SM), FAIL, ""),
    (checks.check_arch("card", (9, 0), ("sm_80",), SM), FAIL, ""),
    (checks.check_arch("card", (9, 0), ("compute_80",), SM), PASS, ""),
    (checks.check_arch("card", (9, 0), ("sm_90a",), SM), PASS, ""),
    (checks.check_arch("card", (12, 1), ("sm_120a",), SM), FAIL, ""),
    (checks.check_arch("card", (12, 1), DEFAULT_ARCHS, SM), PASS, ""),
    (checks.check_arch("card", (10, 3), ("sm_100f",), SM), PASS, ""),
    (checks.check_arch("card", (8, 0), (), SM), FAIL, ""),
    (checks.check_arch("card", (8, 0), ("gfx90a",), SM), FAIL, ""),
    (checks.check_arch("card", (13, 0), ("sm_90",), "2.9.0"), FAIL, "a torch build with sm_130."),
    # a GPU that torch cannot use
    (gpu(["V100, 32 GiB"], ["V100"], "12.6"), PASS, "32 GiB"),
    (gpu([], ["V100"], None), FAIL, "without CUDA"),
    (gpu([], ["V100"], "13.0"), FAIL, "too old"),
    (gpu([], ["V100"], "13.0", hidden=True), WARN, "CUDA_VISIBLE_DEVICES"),
    (gpu([], [], None), WARN, "CUDA build"),
    (gpu([], [], None, hidden=True), WARN, "too old"),
    (gpu([], [], "13.0"), WARN, "needs NVIDIA's driver"),
    (checks.check_driver("610.47", "13.0"), PASS, ""),
    (checks.check_driver("470.82.01", "12.6"), FAIL, ""),
    (checks.check_driver("570.10", "13.0"), FAIL, ""),
    (checks.check_driver("535.1", "12.6"), PASS, ""),
    (checks.check_driver("", "12.6"), WARN, ""),
    (checks.check_driver("610.47", None), PASS, ""),
    (checks.check_driver("400.1", "99.0"), PASS, ""),
    (checks.check_nvml("", 8), PASS, ""),
    (checks.check_nvml("the module pynvml is not installed", 0), WARN, "nvidia-ml-py"),
    # bf16 by emulation; on a CPU that is slower in it
    (checks.check_bf16("NVIDIA H100 computes in bf16", True, "fp16"), PASS, ""),
    (checks.check_bf16("Tesla V100 has none", False, "fp16"), WARN, "fp16"),
    (
        checks.check_bf16("a product in bf16 is 0.23 times as fast", False, "fp32"),
        WARN,
        "selects fp32",
    ),
    (checks.check_compute(SLOWER, False), PASS, ""),
    (checks.check_compute(SLOWER, True), WARN, '"fp32"'),
    # links, device memory, pinned memory
    (checks.check_pcie(0, (4, 4), (16, 16), True), PASS, ""),
    (checks.check_pcie(1, (3, 4), (4, 16), False), WARN, "GPU 1: gen 3 x4 of gen 4 x16"),
    (checks.check_pcie(0, (1, 4), (16, 16), False), PASS, ""),
    (checks.check_pcie(0, (3, 5), (16, 16), True), WARN, ""),
    (checks.check_pcie(0, (None, None), (None, None), True), PASS, ""),
    (checks.check_pcie(0, (4, None), (16, None), True), PASS, ""),
    (checks.check_gpu_memory(0, GIB // 2, 80 * GIB), PASS, ""),
    (checks.check_gpu_memory(0, 20 * GIB, 80 * GIB), WARN, "60.0 GiB of 80.0 GiB"),
    (checks.check_gpu_memory(0, None, 80 * GIB), PASS, ""),
    (checks.check_memlock(64 << 10, 100 * GIB), WARN, "memlock"),
    (checks.check_memlock(64 << 10, 0), PASS, ""),
    (checks.check_memlock(None, 100 * GIB), PASS, ""),
    (checks.check_memlock(128 * GIB, 100 * GIB), PASS, ""),
    (checks.check_pinning(GIB, True), PASS, ""),
    (checks.check_pinning(GIB, False), WARN, ""),
    # host memory, cores, nodes
    (checks.check_host_memory(128 * GIB, 112 * GIB), PASS, "8.59B in fp32"),
    (checks.check_host_memory(128 * GIB, 60 * GIB), WARN, ""),
    (checks.check_cgroup(None, 64 * GIB), PASS, ""),
    (checks.check_cgroup(1 << 62, 64 * GIB), PASS, ""),
    (checks.check_cgroup(16 * GIB, 64 * GIB), WARN, "16.0 GiB of 64.0 GiB"),
    (checks.check_cores(8, 16, 16, 7, "7 of 8"), PASS, ""),
    (checks.check_cores(8, 16, 2, 2, "cgroup quota 2"), WARN, "cgroup quota 2"),
    (checks.check_numa({0: range(8)}, range(8), [0], [0]), PASS, "one node"),
    (checks.check_numa({}, range(8), [], [None]), PASS, "one node"),
    (checks.check_numa(NODES, range(16), [0, 1], []), PASS, "no GPU"),
    (checks.check_numa(NODES, range(16), [0, 1], [1]), PASS, "GPU 0 1"),
    (checks.check_numa(NODES, range(16), [0, 1], [None]), WARN, "does not report"),
    (checks.check_numa(NODES, range(8), [0, 1], [0, 1]), WARN, "--cpunodebind=1"),
    (checks.check_numa(NODES, range(16), [0], [1]), WARN, "--membind=1"),
    # kernels, disks, versions
    (checks.check_kernels("native", "avx512", "the reason"), PASS, "the reason"),
    (checks.check_kernels("native", "baseline", "the reason"), WARN, "the reason"),
    (checks.check_kernels("numba", "-", "the reason"), WARN, "the reason"),
    (disk(LARGE, DriveRates(disk_gbps=1.5)), PASS, "written at 1.5 GB/s"),
    (disk(LARGE, STATE_RATES), PASS, "read at 6, written at 4, both at once at 7 GB/s"),
    (disk(LARGE, None), PASS, "free"),
    (disk(LARGE, DriveRates(disk_gbps=0.1)), WARN, "120 s"),
    (disk(LARGE, DriveRates(disk_gbps=0.0)), WARN, "12000 s"),
    (disk(10 * GIB, DriveRates(disk_gbps=1.5)), WARN, "12 bytes"),
    (disk(10 << 20, None), FAIL, "full"),
    (disk(LARGE, "cannot be written: Permission denied"), FAIL, "Permission denied"),
    (checks.check_versions({"torch": "2.13.0+cpu", "numba": ""}), PASS, ""),
    (checks.check_versions({"torch": "2.8.1"}), FAIL, ""),
    (checks.check_versions({"torch": "2.10.0"}), PASS, ""),
]


def test_every_check_judges_a_machine() -> None:
    wrong = [
        (check, status, text)
        for check, status, text in JUDGED
        if check.status is not status or text not in str(check)
    ]
    assert wrong == []


def test_speeds() -> None:
    by_name = {check.name: check for check in checks.check_speeds(MACHINE, 63.0, bf16=True)}
    assert {check.status for check in by_name.values()} == {PASS}
    adam = by_name["Adam"].found
    assert "fp32 0.25, split16 0.154, norm 0.0625 ns/param" in adam and "80%" in adam
    assert "copies run both ways: not measured" in adam
    rates = {"fp32_copying_gparams": 2.5, "split16_copying_gparams": 4.0}
    unmeasured = dict.fromkeys([f"{kernel}_gparams" for kernel in checks.KERNELS], 0.0)
    assert checks.check_adam(replace(MACHINE, **unmeasured)).status == "SKIP"
    slowed = replace(MACHINE, **rates, h2d_adam_gbps=33.3, d2h_adam_gbps=51.0)
    found = checks.check_adam(slowed).found
    assert found.endswith("both ways: fp32 0.4, split16 0.25 (33.3 GB/s up, 51 down)")
    assert "bf16 660, fp16 655, fp32 50 Tflop/s" in by_name["compute"].found
    slow = replace(MACHINE, fp32_gparams=2.0, d2h_gbps=20.0)
    by_name = {check.name: check for check in checks.check_speeds(slow, 63.0, bf16=True)}
    assert by_name["Adam"].status is WARN and by_name["H2D, D2H"].status is WARN
    assert checks.check_bandwidth(20.0, 20.0, False, None).status is PASS
    assert "no GPU" in checks.check_bandwidth(5.0, 5.0, True, None).found


def test_adam_is_timed_while_copies_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam takes its time, and copies have moved what they have until it ends, in every round."""
    log: list[str] = []

    class Copies:
        def start(self, seconds: float) -> None:
            assert seconds > 0
            log.append("start")

        def finished_bytes(self) -> tuple[int, int]:
            log.append("finished")
            # One of each is over before the update begins.
            return (4 * 10**9, 5 * 10**9) if log[-2] == "update" else (10**9, 10**9)

        def wait(self) -> None:
            log.append("wait")

    def update(*args: object, **keys: object) -> None:
        log.append("update")

    b = SimpleNamespace(grad=torch.zeros(4), layout=None, working=None, states={"fp32": 0})
    monkeypatch.setattr(measure, "allocate", lambda numel, states: b)
    monkeypatch.setattr(measure, "STATES", ("fp32",))
    monkeypatch.setattr(measure.kernels, "update", update)
    rates = measure.rates_at_once(Copies(), 4)  # type: ignore[arg-type]
    seconds = 4 / rates["fp32_copying_gparams"] / 1e9
    assert rates.keys() == {"fp32_copying_gparams", "h2d_adam_gbps", "d2h_adam_gbps"}
    assert rates["h2d_adam_gbps"] == pytest.approx(3 / seconds)
    assert rates["d2h_adam_gbps"] == pytest.approx(4 / seconds)
    one_round = ["start", "finished", "update", "finished", "wait"]
    assert log[-5 * measure.ROUNDS :] == measure.ROUNDS * one_round


def test_figures_of_the_measurements() -> None:
    """`Machine.flops` returns the two points again that a curve was fitted to."""
    assert link_gbps(4, 16) == pytest.approx(31.5, rel=0.01)
    assert link_gbps(None, 16) is None and link_gbps(9, 16) is None
    limit, half = 660e12, 1720.0
    narrow, wide = (limit * w / (w + half) for w in (2048, 8192))
    assert measure.fit(2048, narrow, 8192, wide) == pytest.approx(half)
    assert measure.fit(2048, 2.0, 8192, 1.0) == 0.0
    assert measure.fit(128, 1.0, 1024, 9.0) == 1024.0
    assert measure.fitting(16 << 20, 64 * GIB, 0) == 16 << 20
    assert measure.fitting(16 << 20, GIB, 0) == 4 << 20
    assert measure.fitting(16 << 20, 0, 300 << 20) == measure.LEAST_PARAMS


def test_buffers_are_larger_than_the_caches() -> None:
    """Those of int8, the narrowest state, are four times as large, within memory and seconds."""
    narrow = FORMATS["int8"].fields(ADAM_MOMENTS)
    state_bytes = sum(f.numel(1 << 10) * ITEMSIZE[f.dtype or "bfloat16"] for f in narrow) / 1024
    int8 = state_bytes + 2
    assert measure.INT8_BYTES <= int8
    for cache in (32 << 20, 300 << 20):
        numel = measure.fitting(16 << 20, 64 * GIB, cache)
        assert 4 * cache <= int8 * numel <= 4.3 * cache and numel % 1024 == 0
    assert measure.fitting(64 << 20, 64 * GIB, 32 << 20) == 64 << 20, "they are larger already"
    assert measure.fitting(16 << 20, 256 * GIB, 2 * GIB) == measure.MOST_PARAMS
    assert measure.fitting(16 << 20, 16 * GIB, 300 << 20) == 43 << 20, "a quarter of memory"


def test_a_disk_is_measured_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for state if it is host memory: a plan with such rates would be of no drive."""
    small_doctor(monkeypatch)
    rates = asdict(measure.drive_rates(tmp_path))
    assert all(rate > 0 for rate in rates.values()) and list(tmp_path.iterdir()) == []
    assert set(rates) == {f.name for f in fields(Machine) if f.name.startswith("disk_")} - RATING
    monkeypatch.setattr(measure, "kind_of", lambda folder: "tmpfs")
    in_memory = measure.drive_rates(tmp_path)
    assert in_memory.disk_gbps > 0 and in_memory == DriveRates(disk_gbps=in_memory.disk_gbps)


RATING = {"disk_tbw"}
"""A figure of its data sheet."""


def test_a_gpu_without_a_context_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nUpdate it.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    assert examine.torch_gpus() == ((), "The NVIDIA driver on your system is too old.")


@pytest.mark.gpu(until="cuda_driver.register")
def test_the_gpu_of_this_machine() -> None:
    gpus, _ = examine.torch_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert all(gpu.memory_bytes > GIB for gpu in gpus)
    assert examine.can_pin(64 << 20)


@pytest.mark.gpu(until="torch.cuda._lazy_init")
def test_rates_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    rates = measure.compute(device, False, 0.01)
    assert "bf16_tflops" not in rates and rates["fp16_tflops"] > rates["fp32_tflops"] > 0.1
    assert rates["half_width"] >= 0 and 0 < rates["flash_share"] and rates["launch_us"] > 0
    assert measure.device_memory_gbps(device) > 10
