"""Peak rates of GPUs: dense 16-bit tensor-core FLOPs per second, by device name.

From NVIDIA's data sheets, with fp32 accumulation, which training uses (GeForce cards run it at half
the advertised rate), and without sparsity.
"""

from __future__ import annotations

import re

_TERAFLOPS = {
    "Tesla T4": 65.0,
    "Tesla V100-PCIE": 112.0,
    "Tesla V100-SXM2": 125.0,
    "Tesla V100-SXM3": 125.0,
    "Quadro RTX 6000": 130.5,
    "Quadro RTX 8000": 130.5,
    "TITAN RTX": 130.5,
    "NVIDIA TITAN RTX": 130.5,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H800": 989.0,
    "NVIDIA H20": 148.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA B300": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA RTX A4000": 76.7,
    "NVIDIA RTX A4500": 94.6,
    "NVIDIA RTX A5000": 111.1,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 4000 Ada Generation": 106.9,
    "NVIDIA RTX 4500 Ada Generation": 158.5,
    "NVIDIA RTX 5000 Ada Generation": 261.1,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX PRO 6000 Blackwell": 503.8,
    "NVIDIA GeForce RTX 2070": 29.9,
    "NVIDIA GeForce RTX 2070 SUPER": 36.2,
    "NVIDIA GeForce RTX 2080": 40.3,
    "NVIDIA GeForce RTX 2080 SUPER": 44.6,
    "NVIDIA GeForce RTX 2080 Ti": 53.8,
    "NVIDIA GeForce RTX 3060": 25.5,
    "NVIDIA GeForce RTX 3060 Ti": 32.4,
    "NVIDIA GeForce RTX 3070": 40.6,
    "NVIDIA GeForce RTX 3070 Ti": 43.5,
    "NVIDIA GeForce RTX 3080": 59.5,
    "NVIDIA GeForce RTX 3080 Ti": 68.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 4060": 30.2,
    "NVIDIA GeForce RTX 4060 Ti": 44.1,
    "NVIDIA GeForce RTX 4070": 58.3,
    "NVIDIA GeForce RTX 4070 SUPER": 70.9,
    "NVIDIA GeForce RTX 4070 Ti": 80.2,
    "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA GeForce RTX 4080": 97.5,
    "NVIDIA GeForce RTX 4080 SUPER": 104.4,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5060 Ti": 47.4,
    "NVIDIA GeForce RTX 5070": 61.7,
    "NVIDIA GeForce RTX 5070 Ti": 87.9,
    "NVIDIA GeForce RTX 5080": 112.6,
    "NVIDIA GeForce RTX 5090": 209.5,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return FLOPs per second, or None if the device or its rate in this precision is not listed.

    Args:
        device_name: torch's name; memory size and form factor may follow the listed name.
        precision: "bf16", "fp16" or "fp32".
    """
    if precision == "fp32" or "Laptop" in device_name:  # a laptop's chip is different
        return None
    fitting = [name for name in _TERAFLOPS if _begins_with(device_name, name)]
    return 1e12 * _TERAFLOPS[max(fitting, key=len)] if fitting else None


_WITH_FP8 = re.compile(
    r"NVIDIA (L4|H\d|GH\d|B\d|GB\d|GeForce RTX [45]0|RTX PRO|RTX \d+ Ada)", re.IGNORECASE
)


def has_fp8(device_name: str) -> bool:
    """Return True if a GPU with this name has compute capability 8.9 or later (Ada, Hopper)."""
    return _WITH_FP8.match(device_name) is not None


def _begins_with(device_name: str, name: str) -> bool:
    """Match whole words only: an A10G is not an A10."""
    following = device_name.removeprefix(name)[:1]
    return device_name.startswith(name) and following in ("", " ", "-")
