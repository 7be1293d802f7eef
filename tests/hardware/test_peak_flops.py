"""Peaks are known for whole names only."""

from __future__ import annotations

from offloadtrain.hardware.machine import find, shipped
from offloadtrain.hardware.peak_flops import peak_flops

LISTED = {
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA H200 NVL": 835,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA GeForce RTX 3090 Ti": 80,
    "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA L40S": 362,
}
OTHERS = ("CPU", "", "NVIDIA A10M", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A1000")


def test_listed() -> None:
    for precision in ("bf16", "fp16"):
        result = {name: peak_flops(name, precision) for name in LISTED}
        assert result == {name: 1e12 * teraflops for name, teraflops in LISTED.items()}
    assert not any(peak_flops(name, "fp32") for name in LISTED)


def test_the_shipped_machines_say_the_same() -> None:
    actual = {name: find(name)[1] for name in shipped() if name not in ("cpu2", "mi300x")}
    expected = {name: peak_flops(machine.gpu, "fp16") for name, machine in actual.items()}
    assert expected == {name: machine.peak_tflops * 1e12 for name, machine in actual.items()}


def test_not_listed() -> None:
    assert [name for name in OTHERS if peak_flops(name, "bf16") is not None] == []
