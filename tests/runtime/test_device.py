"""In which precision a CPU computes, this machine as one that is planned for, and its bus."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from offloadtrain.hardware.machine import find
from offloadtrain.hardware.telemetry import probe
from offloadtrain.runtime import detect_machine as module
from offloadtrain.runtime import device
from offloadtrain.runtime.detect_machine import here, nearest
from offloadtrain.runtime.device import cpu_bf16_speedup, resolve_precision, speedup
from offloadtrain.runtime.device_memory import bandwidth
from offloadtrain.train import saved_state
from tests.gpu.precision import DEVICE

CPU = torch.device("cpu")
XEON = {torch.float32: 31.0, torch.bfloat16: 7.1}
"""GFLOP/s of a Xeon with AVX-512 and no instructions for bf16, of which oneDNN says it has bf16."""

CHOICE = """
import torch
from offloadtrain.runtime.device import resolve_precision
assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)
print(resolve_precision("auto", torch.device("cpu"))[0])
"""


def chosen_under(**environment: str) -> str:
    """ "auto" in a process of its own: oneDNN reads its limits once."""
    command = [sys.executable, "-c", CHOICE]
    return subprocess.run(
        command, env=os.environ | environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("times", "chosen"), [(0.13, "fp32"), (0.23, "fp32"), (1.1, "fp32"), (3.0, "bf16")]
)
def test_auto_takes_what_is_faster(
    times: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_bf16_speedup", lambda: times)
    precision, why = resolve_precision("auto", CPU)
    assert precision == chosen and f"{times:.2g} times" in why


def test_a_cpu_that_emulates_bf16_is_seen_through() -> None:
    """Whatever oneDNN calls supported: times as they were on such a machine."""
    assert speedup(lambda dtype: 1 / XEON[dtype]) == pytest.approx(0.23, abs=0.01)


def test_load_in_between_decides_nothing() -> None:
    """All but one measurement of each dtype met another program."""
    delays = {
        torch.float32: iter([9.0, 50.0, 1.0, 80.0]),
        torch.bfloat16: iter([9.0, 0.5, 70.0, 60.0]),
    }
    assert speedup(lambda dtype: next(delays[dtype], 90.0)) == 2.0


def test_measuring_draws_no_random_number_and_leaves_the_threads() -> None:
    """A job is seeded before its precision is known."""
    saved_state.seed_all(3)
    before, threads = saved_state.random_states().as_json, torch.get_num_threads()
    cpu_bf16_speedup.__wrapped__()
    assert saved_state.random_states().as_json == before and torch.get_num_threads() == threads


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limits are those of x86")
@pytest.mark.slow
def test_a_library_that_may_not_use_bf16_instructions_is_seen_through() -> None:
    """oneDNN says that it supports bf16 all the same, and emulates it."""
    assert chosen_under(ONEDNN_MAX_CPU_ISA="AVX512_CORE") == "fp32"


def test_bf16_instructions_are_used() -> None:
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("this CPU has none")
    assert resolve_precision("auto", CPU)[0] == "bf16"


# ---- this machine as one that a job can be planned for


def test_the_cpu_s_rates_follow_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = probe()
    base = find("cpu2")[1]
    for cores in (1, 2, 16):
        monkeypatch.setattr(module, "probe", lambda n=cores: replace(probed, cores_usable=n))
        name, machine = here(on_gpu=False)
        assert "cpu2" in name and machine.on_cpu and machine.cores == cores
        assert machine.dram_gbps == pytest.approx(base.dram_gbps * cores / 2, rel=1e-3)
        assert {"fp16", "fp32", "bf16"} == set(machine.precisions)


def test_memory_that_nobody_tells_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = replace(probe(), host_available_bytes=0, host_memory_bytes=7 << 30)
    monkeypatch.setattr(module, "probe", lambda: probed)
    assert 7 << 30 <= here(on_gpu=False)[1].host_memory_bytes < 40 << 30


def test_bf16_without_instructions_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (module, device):
        monkeypatch.setattr(where, "cpu_bf16_speedup", lambda: 0.25)
    machine = here(on_gpu=False)[1]
    assert machine.auto_precision == "fp32"
    assert machine.bf16_tflops == pytest.approx(machine.fp32_tflops / 4)


@pytest.mark.parametrize(
    ("gpu", "cores", "machine"),
    [
        ("NVIDIA H100 PCIe", 64, "h100_pcie"),
        ("NVIDIA H100 80GB HBM3", 112, "h100"),
        ("NVIDIA H100 80GB HBM3", 16, "h100_16cores"),
        ("NVIDIA L40", 16, "l40s"),
        ("NVIDIA RTX A5000", 16, "a6000"),
        ("NVIDIA H200", 16, "h200"),
        ("NVIDIA A100-SXM4-80GB", 16, "a100_80gb"),
        ("NVIDIA A100-PCIE-40GB", 16, "a100_40gb"),
        ("Tesla V100-SXM2-32GB", 16, "dgx2"),
        ("Tesla V100-PCIE-16GB", 16, "v100_32gb"),
        ("NVIDIA GeForce RTX 4080 SUPER", 16, "rtx4080"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 16, "rtx5090"),
        ("Some Accelerator", 16, "a100_40gb"),
    ],
)
def test_the_shipped_machine_that_is_most_like_it(gpu: str, cores: int, machine: str) -> None:
    assert nearest(gpu, cores) == machine


# ---- the bus, measured: on a CPU the memory's own copy takes its place


@pytest.mark.gpu
def test_a_copy_has_a_speed() -> None:
    result = bandwidth(DEVICE)
    assert 0.1 < result.h2d_gbps < 2000 and 0.1 < result.d2h_gbps < 2000
