"""Peak rates of GPUs: dense 16-bit tensor-core FLOPs per second, by device name.

From NVIDIA's data sheets; with fp32 accumulation, which training uses (GeForce cards run it at half
the advertised rate), and without sparsity.
"""

from __future__ import annotations

_TERAFLOPS = {
    "Tesla T4": 65.0,
    "Tesla V100-PCIE": 112.0,
    "Tesla V100-SXM2": 125.0,
    "Tesla V100-SXM3": 125.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A100": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA GH200": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return FLOPs per second, or None if the device or its rate in this precision is not listed.

    Args:
        device_name: torch's name; memory size and form factor may follow the listed name.
        precision: "bf16", "fp16" or "fp32".
    """
    if precision == "fp32" or "Laptop" in device_name:  # a laptop's chip is another one
        return None
    fitting = [name for name in _TERAFLOPS if _begins_with(device_name, name)]
    return 1e12 * _TERAFLOPS[max(fitting, key=len)] if fitting else None


def _begins_with(device_name: str, name: str) -> bool:
    """Match whole words only: an A10G is not an A10."""
    following = device_name.removeprefix(name)[:1]
    return device_name.startswith(name) and following in ("", " ", "-")
