"""Peaks are known for whole names only."""

from __future__ import annotations

import pytest

from offloadtrain.hardware.peak_flops import peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA L40S", 362),
    ],
)
def test_listed(name: str, teraflops: float) -> None:
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == teraflops * 1e12
    assert peak_flops(name, "fp32") is None


@pytest.mark.parametrize(
    "name", ["CPU", "", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A1000"]
)
def test_not_listed(name: str) -> None:
    assert peak_flops(name, "bf16") is None
