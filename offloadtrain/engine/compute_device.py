"""The device that a model computes on, and the cores and host memory beside it."""

from __future__ import annotations

import os

import torch

from offloadtrain.hardware.cpus import local_plan
from offloadtrain.runtime import kernels
from offloadtrain.runtime.cuda_driver import pci_address
from offloadtrain.runtime.dtypes import PRECISIONS


def resolve_device(device: str | torch.device, precision: str) -> torch.device:
    """Return the device to compute on, and bind this process to its NUMA node.

    Raises:
        ValueError: it is not there, or has no arithmetic of this precision.
    """
    on = _named_device(device)
    if precision == "auto":
        raise ValueError(f"precision = 'auto' is not one of {', '.join(map(repr, PRECISIONS))}")
    if on.type == "cuda" and precision == "bf16":
        with torch.cuda.device(on):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name = torch.cuda.get_device_name(on)
                raise ValueError(f"{name} has no bf16 arithmetic: use precision = 'fp16'")
    # Before any host memory is mapped: it lies next to the CPUs that touch it first.
    _place_kernels(on)
    return on


def _named_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device = '{device}': offload to the host works for 'cuda' and 'cpu'")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device = '{device}', but this torch sees no CUDA GPU: use 'cpu'")
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        resolved = torch.device("cuda", index)
    return resolved


def _place_kernels(device: torch.device) -> None:
    """Bind kernels and host memory to the GPU's NUMA node, whose ranks share its cores."""
    if device.type != "cuda":
        return
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), rank + 1)
    count = torch.cuda.device_count()
    gpus = [pci_address(index % count) for index in range(ranks)]
    gpus[rank] = pci_address(device.index or 0)
    kernels.place(local_plan(gpus, rank))
