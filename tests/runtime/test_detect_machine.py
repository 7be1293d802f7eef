"""This machine as one that a job can be planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloadtrain.hardware.machine import find
from offloadtrain.hardware.telemetry import probe
from offloadtrain.runtime import detect_machine as module
from offloadtrain.runtime import device
from offloadtrain.runtime.detect_machine import here, nearest


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
