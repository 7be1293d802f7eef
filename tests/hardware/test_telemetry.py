"""The machine as it is told: every refusal of NVML or of the system is a state, never a crash."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from offloadtrain.events.log_lines import from_line, to_line
from offloadtrain.events.schema import Event, System
from offloadtrain.hardware import telemetry
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.hardware.telemetry import Sampler, probe

GIB = 2**30


class FakeNvml(types.SimpleNamespace):
    """A `pynvml` with two GPUs; raises the given error in the given functions."""

    def __init__(self, failing: dict[str, Exception] | None = None, gpus: int = 2) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: gpus,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlSystemGetDriverVersion": lambda: b"610.47",
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle[-1]}",
            "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(
                total=140 * GIB, used=3 * GIB
            ),
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 4,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
            "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=97, memory=9),
            "nvmlDeviceGetPowerUsage": lambda handle: 654_321,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        }
        for name, error in (failing or {}).items():
            answers[name] = _raising(error)
        super().__init__(**answers)


def _raising(error: Exception) -> Callable[..., Any]:
    def refuse(*args: object) -> None:
        raise error

    return refuse


def nvml(**failing: Exception) -> Nvml:
    return Nvml(lambda: FakeNvml(failing))


def error(code: int) -> Exception:
    return pynvml.NVMLError(code)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NVML_ERROR_LIBRARY_NOT_FOUND", "no NVIDIA driver on this machine"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "the NVIDIA driver is not loaded"),
        ("NVML_ERROR_NO_PERMISSION", "this user may not query the driver"),
        ("NVML_ERROR_FUNCTION_NOT_FOUND", "the NVIDIA driver is too old for NVML"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "the NVIDIA driver was updated"),
        ("NVML_ERROR_GPU_IS_LOST", "a GPU is lost"),
        ("NVML_ERROR_NOT_SUPPORTED", "NVML: Not Supported"),
        ("NVML_ERROR_UNKNOWN", "NVML: Unknown Error"),
    ],
)
def test_why_there_are_no_gpus_to_see(name: str, text: str) -> None:
    for call in ("nvmlInit", "nvmlDeviceGetCount"):
        source = nvml(**{call: error(getattr(pynvml, name))})
        assert text in source.state
        assert source.describe() == () and source.sample() == () and source.driver() == ""


def test_no_module_and_no_gpu_are_states_too() -> None:
    missing = Nvml(_raising(ImportError("No module named 'pynvml'")))
    assert missing.state == "the module pynvml is not installed (No module named 'pynvml')"
    assert Nvml(_raising(AttributeError("nvmlInit"))).state == "NVML: nvmlInit"
    assert Nvml(lambda: FakeNvml(gpus=0)).state == "NVML sees no GPU"


def test_one_lost_gpu_does_not_hide_the_other() -> None:
    module = FakeNvml()
    lost = _raising(error(pynvml.NVML_ERROR_GPU_IS_LOST))
    module.nvmlDeviceGetHandleByIndex = lambda index: lost() if index == 0 else "handle 1"
    source = Nvml(lambda: module)
    assert source.state == "GPU 0: a GPU is lost: the machine must be restarted"
    assert [gpu.index for gpu in source.describe()] == [1]
    assert [gpu.index for gpu in source.sample()] == [1]


# ---- the machine


def test_probe_tells_this_machine() -> None:
    machine = probe(nvml())
    assert machine.cpu and machine.host
    assert 1 <= machine.cores_usable <= machine.cores_logical
    assert machine.cores_usable <= len(os.sched_getaffinity(0))
    assert 0 < machine.host_available_bytes <= machine.host_memory_bytes
    assert machine.host_memory_bytes <= psutil.virtual_memory().total
    assert machine.torch.startswith("2.") and machine.python.count(".") == 2
    assert machine.driver == "610.47" and len(machine.gpus) == 2 and machine.gpu_state == ""


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup tree in which this process is in /job/task."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job/task\n")
    (mount / "job" / "task").mkdir(parents=True)
    monkeypatch.setattr(telemetry, "_PROC", proc)
    monkeypatch.setattr(telemetry, "_CGROUPS", mount)
    return mount


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 64), ("400000 100000", 4), ("150000 100000", 1), ("5000 100000", 1), ("x", 64)],
)
def test_every_cgroup_above_limits_cores(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch, text: str, cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    for folder in ("job/task", "job"):
        (cgroups / folder / "cpu.max").write_text(f"{text}\n")
        assert probe(nvml()).cores_usable == cores
        (cgroups / folder / "cpu.max").unlink()


def test_affinity_limits_cores(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 9})
    assert probe(nvml()).cores_usable == 3


# ---- the sampler


def test_the_sampler_emits_until_closed() -> None:
    emitted: list[Event] = []
    third = threading.Event()

    def emit(event: Event) -> None:
        emitted.append(event)
        if len(emitted) == 3:
            third.set()

    sampler = Sampler(emit, interval_s=0.01, nvml=nvml())
    assert third.wait(120)
    sampler.close()
    count = len(emitted)
    assert not any(t.name == "sampler" for t in threading.enumerate())
    sampler.close()
    assert len(emitted) == count
    sample = emitted[0]
    assert isinstance(sample, System)
    assert sample.rss_bytes > 10 * 2**20 and sample.gpus[0].temperature_c == 61
    assert 0 < sample.host_available_bytes <= sample.host_total_bytes
    record = from_line(to_line(sample, 0, 0.0))
    assert record is not None and record.event == sample


def test_what_the_system_refuses_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = _raising(psutil.AccessDenied())
    sampler = Sampler(lambda event: None, interval_s=60, nvml=nvml())
    for name in ("swap_memory", "virtual_memory"):
        monkeypatch.setattr(psutil, name, refused)
    monkeypatch.setattr(psutil.Process, "cpu_percent", refused)
    monkeypatch.setattr(telemetry, "resident_bytes", lambda: None)
    monkeypatch.setattr(telemetry, "available_bytes", _raising(ValueError("odd text")))
    sample = sampler.sample()
    sampler.close()
    assert (sample.cpu_percent, sample.rss_bytes, sample.swap_used_bytes) == (0.0, 0, 0)
    assert (sample.host_available_bytes, sample.host_total_bytes) == (0, 0)
    assert len(sample.gpus) == 2
