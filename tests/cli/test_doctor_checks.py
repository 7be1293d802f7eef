"""The doctor's judgements, on machines that are made up."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from offloadtrain.cli.doctor import checks, examine, measure
from offloadtrain.cli.doctor.checks import Check, DriveRates, Status
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.nvml import link_gbps
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
    assert bad.as_json() == {
        "name": "disk",
        "status": "WARN",
        "found": "slow",
        "advice": "Buy one.",
    }


@pytest.mark.parametrize(
    ("capability", "archs", "status"),
    [
        ((7, 0), DEFAULT_ARCHS, FAIL),
        ((7, 0), ("sm_60", "sm_70", "sm_80"), PASS),
        ((8, 9), DEFAULT_ARCHS, PASS),  # sm_86 code runs on it
        ((8, 7), ("sm_89",), FAIL),
        ((9, 0), ("sm_80",), FAIL),
        ((9, 0), ("compute_80",), PASS),
        ((9, 0), ("sm_90a",), PASS),
        ((12, 1), ("sm_120a",), FAIL),
        ((12, 1), DEFAULT_ARCHS, PASS),
        ((10, 3), ("sm_100f",), PASS),
        ((8, 0), (), FAIL),
        ((8, 0), ("gfx90a",), FAIL),
    ],
)
def test_kernels_for_the_card(
    capability: tuple[int, int], archs: tuple[str, ...], status: Status
) -> None:
    assert checks.check_arch("card", capability, archs, "2.11.0+cu130").status is status


def test_a_v100_is_told_what_to_install() -> None:
    found = checks.check_arch("Tesla V100-SXM2-32GB", (7, 0), DEFAULT_ARCHS, "2.11.0+cu130")
    assert "sm_70" in found.found and "sm_75" in found.found and "2.11.0+cu130" in found.found
    assert "CUDA 12.6 build of torch 2.9" in found.advice
    newer = checks.check_arch("card", (13, 0), ("sm_90",), "2.9.0")
    assert newer.advice == "Install a torch build with sm_130."


@pytest.mark.parametrize(
    ("names", "seen", "cuda", "hidden", "status", "said"),
    [
        (["V100, 32 GiB"], ["V100"], "12.6", False, PASS, "32 GiB"),
        ([], ["V100"], None, False, FAIL, "without CUDA"),
        ([], ["V100"], "13.0", False, FAIL, "too old"),
        ([], ["V100"], "13.0", True, WARN, "CUDA_VISIBLE_DEVICES"),
        ([], [], None, False, WARN, "CUDA build"),
        ([], [], None, True, WARN, "too old"),
        ([], [], "13.0", False, WARN, "needs NVIDIA's driver"),
    ],
)
def test_a_gpu_that_torch_cannot_use(
    names: list[str], seen: list[str], cuda: str | None, hidden: bool, status: Status, said: str
) -> None:
    found = checks.check_gpu(names, seen, cuda=cuda, reason="driver too old", hidden=hidden)
    assert found.status is status and said in str(found)


@pytest.mark.parametrize(
    ("driver", "cuda", "status"),
    [
        ("610.47", "13.0", PASS),
        ("470.82.01", "12.6", FAIL),
        ("570.10", "13.0", FAIL),
        ("535.1", "12.6", PASS),
        ("", "12.6", WARN),
        ("610.47", None, PASS),
        ("400.1", "99.0", PASS),
    ],
)
def test_the_driver_of_a_cuda_version(driver: str, cuda: str | None, status: Status) -> None:
    assert checks.check_driver(driver, cuda).status is status


def test_bf16_by_emulation_is_none() -> None:
    assert checks.check_bf16("NVIDIA H100", True, "fp16").status is PASS
    found = checks.check_bf16("Tesla V100", False, "fp16")
    assert found.status is WARN and "fp16" in found.advice


def test_a_cpu_is_judged_by_what_training_takes() -> None:
    """On a Xeon of which oneDNN says that it has bf16, and which is slower in it."""
    told = checks.check_cpu_bf16(False, "a product in bf16 is 0.23 times as fast")
    assert told.status is WARN and "selects fp32" in told.advice and "0.23" in told.found
    slower = replace(MACHINE, gpu="", bf16_tflops=0.0385, fp32_tflops=0.0803)
    assert checks.check_compute(slower, False).status is PASS
    contrary = checks.check_compute(slower, True)
    assert contrary.status is WARN and '"fp32"' in contrary.advice


def test_nvml() -> None:
    assert checks.check_nvml("", 8).status is PASS
    found = checks.check_nvml("the module pynvml is not installed (No module)", 0)
    assert found.status is WARN and "nvidia-ml-py" in found.advice
    assert checks.check_nvml("no NVIDIA driver on this machine", 0).advice == ""


@pytest.mark.parametrize(
    ("generation", "width", "busy", "status"),
    [
        ((4, 4), (16, 16), True, PASS),
        ((4, 4), (4, 16), False, WARN),
        ((1, 4), (16, 16), False, PASS),
        ((3, 5), (16, 16), True, WARN),
        ((None, None), (None, None), True, PASS),
        ((4, None), (16, None), True, PASS),
    ],
)
def test_a_link(
    generation: tuple[int | None, int | None],
    width: tuple[int | None, int | None],
    busy: bool,
    status: Status,
) -> None:
    assert checks.check_pcie(0, generation, width, busy).status is status


def test_a_link_is_told_now_and_at_most() -> None:
    assert checks.check_pcie(1, (3, 4), (4, 16), True).found == "GPU 1: gen 3 x4 of gen 4 x16"


def test_device_memory_of_others() -> None:
    assert checks.check_gpu_memory(0, GIB // 2, 80 * GIB).status is PASS
    found = checks.check_gpu_memory(0, 20 * GIB, 80 * GIB)
    assert found.status is WARN and "60.0 GiB of 80.0 GiB" in found.found
    assert checks.check_gpu_memory(0, None, 80 * GIB).status is PASS


@pytest.mark.parametrize(
    ("limit", "needed", "status"),
    [
        (64 << 10, 100 * GIB, WARN),
        (64 << 10, 0, PASS),
        (None, 100 * GIB, PASS),
        (128 * GIB, 100 * GIB, PASS),
    ],
)
def test_locked_memory(limit: int | None, needed: int, status: Status) -> None:
    found = checks.check_memlock(limit, needed)
    assert found.status is status and ("memlock" in found.advice) is (status is WARN)


def test_pinning() -> None:
    assert checks.check_pinning(GIB, True).status is PASS
    assert checks.check_pinning(GIB, False).status is WARN


def test_host_memory_and_its_limits() -> None:
    found = checks.check_host_memory(128 * GIB, 112 * GIB)
    assert found.status is PASS and "8.59B in fp32" in found.found
    assert checks.check_host_memory(128 * GIB, 60 * GIB).status is WARN
    assert checks.check_cgroup(None, 64 * GIB).status is PASS
    assert checks.check_cgroup(1 << 62, 64 * GIB).status is PASS
    found = checks.check_cgroup(16 * GIB, 64 * GIB)
    assert found.status is WARN and "16.0 GiB of 64.0 GiB" in found.found


def test_cores() -> None:
    assert checks.check_cores(8, 16, 16, 7, "7 of 8").status is PASS
    found = checks.check_cores(8, 16, 2, 2, "cgroup quota 2")
    assert found.status is WARN and "cgroup quota 2" in found.found


NODES = {0: range(8), 1: range(8, 16)}


@pytest.mark.parametrize(
    ("nodes", "cpus", "memories", "gpus", "status", "said"),
    [
        ({0: range(8)}, range(8), [0], [0], PASS, "one node"),
        ({}, range(8), [], [None], PASS, "one node"),
        (NODES, range(16), [0, 1], [], PASS, "no GPU"),
        (NODES, range(16), [0, 1], [1], PASS, "GPU 0 1"),
        (NODES, range(16), [0, 1], [None], WARN, "does not report"),
        (NODES, range(8), [0, 1], [0, 1], WARN, "--cpunodebind=1"),
        (NODES, range(16), [0], [1], WARN, "--membind=1"),
    ],
)
def test_near_the_gpu(
    nodes: dict[int, range],
    cpus: range,
    memories: list[int],
    gpus: list[int | None],
    status: Status,
    said: str,
) -> None:
    found = checks.check_numa(nodes, cpus, memories, gpus)
    assert found.status is status and said in str(found)


@pytest.mark.parametrize(
    ("name", "isa", "status"),
    [
        ("native", "avx512", PASS),
        ("native", "baseline", WARN),
        ("numba", "-", WARN),
        ("torch", "-", WARN),
    ],
)
def test_cpu_kernels(name: str, isa: str, status: Status) -> None:
    found = checks.check_kernels(name, isa, "this is why")
    assert found.status is status and "this is why" in found.found and " -:" not in found.found


@pytest.mark.parametrize(
    ("free", "drive", "status", "said"),
    [
        (500 * GIB, DriveRates(disk_gbps=1.5), PASS, "written at 1.5 GB/s"),
        (
            500 * GIB,
            DriveRates(disk_gbps=1.5, disk_read_gbps=6, disk_write_gbps=4, disk_both_gbps=7),
            PASS,
            "1.5 GB/s; state on it: read at 6, written at 4, both at once at 7 GB/s",
        ),
        (500 * GIB, None, PASS, "free"),
        (500 * GIB, DriveRates(disk_gbps=0.1), WARN, "120 s"),
        (500 * GIB, DriveRates(disk_gbps=0.0), WARN, "12000 s"),
        (10 * GIB, DriveRates(disk_gbps=1.5), WARN, "12 bytes"),
        (10 << 20, None, FAIL, "full"),
        (500 * GIB, "cannot be written: Permission denied", FAIL, "Permission denied"),
    ],
)
def test_a_disk(free: int, drive: DriveRates | str | None, status: Status, said: str) -> None:
    found = checks.check_disk("/data", free, drive)
    assert found.status is status and said in str(found) and "/data" in found.found


def test_versions() -> None:
    assert checks.check_versions({"torch": "2.13.0+cpu", "numba": ""}).status is PASS
    assert checks.check_versions({"torch": "2.8.1"}).status is FAIL
    assert checks.check_versions({"torch": "2.10.0"}).status is PASS


def test_speeds() -> None:
    found = {check.name: check for check in checks.check_speeds(MACHINE, 63.0, bf16=True)}
    assert {check.status for check in found.values()} == {PASS}
    told = found["Adam"].found
    assert "fp32 0.25, split16 0.154, norm 0.0625 ns/param" in told and "80%" in told
    assert "bf16 660, fp16 655, fp32 50 Tflop/s" in found["compute"].found
    slow = replace(MACHINE, fp32_gparams=2.0, d2h_gbps=20.0)
    found = {check.name: check for check in checks.check_speeds(slow, 63.0, bf16=True)}
    assert found["Adam"].status is WARN and found["H2D, D2H"].status is WARN
    assert checks.check_bandwidth(20.0, 20.0, False, None).status is PASS
    assert "no GPU" in checks.check_bandwidth(5.0, 5.0, True, None).found


def test_what_a_link_allows() -> None:
    assert link_gbps(4, 16) == pytest.approx(31.5, rel=0.01)
    assert link_gbps(None, 16) is None and link_gbps(9, 16) is None


def test_a_curve_through_two_points() -> None:
    """`Machine.flops` finds them again."""
    limit, half = 660e12, 1720.0
    narrow, wide = (limit * w / (w + half) for w in (2048, 8192))
    assert measure.fit(2048, narrow, 8192, wide) == pytest.approx(half)
    assert measure.fit(2048, 2.0, 8192, 1.0) == 0.0
    assert measure.fit(128, 1.0, 1024, 9.0) == 1024.0


def test_buffers_fit_the_memory() -> None:
    assert measure.fitting(16 << 20, 64 * GIB) == 16 << 20
    assert measure.fitting(16 << 20, GIB) == 4 << 20
    assert measure.fitting(16 << 20, 0) == measure.LEAST_PARAMS


def test_a_disk_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_doctor(monkeypatch)
    found = asdict(measure.drive_rates(tmp_path))
    assert all(rate > 0 for rate in found.values()) and list(tmp_path.iterdir()) == []
    assert set(found) == {f.name for f in fields(Machine) if f.name.startswith("disk_")} - RATING


def test_state_in_host_memory_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves none there: a plan with such rates would be of no drive."""
    small_doctor(monkeypatch)
    monkeypatch.setattr(measure, "kind_of", lambda folder: "tmpfs")
    found = measure.drive_rates(tmp_path)
    assert found.disk_gbps > 0 and found == DriveRates(disk_gbps=found.disk_gbps)


RATING = {"disk_tbw"}
"""What is on its data sheet."""


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_memory_limits_of_both_versions(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    put(membership, "4:memory:/box/inner\n0::/job")
    assert examine.memory_limit(mount, membership) is None
    put(mount / "memory.max", "max")
    put(mount / "memory/memory.limit_in_bytes", str(1 << 62))
    assert examine.memory_limit(mount, membership) is None  # how version 1 says so
    put(mount / "memory/box/memory.limit_in_bytes", str(32 * GIB))
    assert examine.memory_limit(mount, membership) == 32 * GIB
    put(mount / "job/memory.max", str(16 * GIB))
    assert examine.memory_limit(mount, membership) == 16 * GIB


def test_nodes(tmp_path: Path) -> None:
    put(tmp_path / "devices/system/node/node1/cpulist", "8-9,12")
    put(tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node", "1")
    put(tmp_path / "bus/pci/devices/0000:5e:00.0/numa_node", "-1")
    assert examine.numa_nodes(tmp_path) == {1: [8, 9, 12]}
    assert examine.gpu_node("0000:3b:00.0", tmp_path) == 1
    assert examine.gpu_node("0000:5e:00.0", tmp_path) is None
    assert examine.gpu_node("0000:ff:00.0", tmp_path) is None
    assert examine.gpu_node(None, tmp_path) is None


def test_allowed_memories(tmp_path: Path) -> None:
    put(tmp_path / "status", "Name:\tx\nMems_allowed_list:\t0-1")
    assert examine.allowed_memories(tmp_path / "status") == [0, 1]
    put(tmp_path / "status", "Name:\tx")
    assert examine.allowed_memories(tmp_path / "status") == []


def test_no_context_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
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
