"""This machine as a target for plans: detected sizes, with the rates of a shipped machine.

`offloadtrain doctor` measures them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import torch

from offloadtrain.hardware.host_memory import resident_bytes
from offloadtrain.hardware.machine import Machine, find, shipped
from offloadtrain.hardware.telemetry import probe
from offloadtrain.runtime.device import cpu_bf16_speedup, cpu_has_bf16

_CPU, _UNKNOWN_GPU = "cpu2", "a100_40gb"

EMULATED = 10.0
"""Slowdown of fp16 compared with fp32 on a CPU, which has no fp16 instructions."""


def here(*, on_gpu: bool) -> tuple[str, Machine]:
    """Return (name, machine): the memory available to this process plus the memory that it uses (a
    plan counts it), and the number and size of the GPUs."""
    probed = probe()
    free = probed.host_available_bytes or probed.host_memory_bytes  # the former may be unknown
    host = f"{free + (resident_bytes() or 0)}"
    if not on_gpu:
        base = find(_CPU)[1]
        faster = max(probed.cores_usable / base.cores, 0.5)
        rates = ("bf16_tflops", "fp32_tflops", "dram_gbps", "shared_dram_gbps", "hbm_gbps")
        scaled = {rate: round(getattr(base, rate) * faster, 3) for rate in rates}
        scaled["fp16_tflops"] = scaled["fp32_tflops"] / EMULATED
        if not cpu_has_bf16():
            scaled["bf16_tflops"] = scaled["fp32_tflops"] * min(cpu_bf16_speedup(), 1.0)
        machine = replace(
            base, host_memory=host, host_reserved="", cores=probed.cores_usable, **scaled
        )
        return f"this machine (rates of {_CPU} per core)", machine
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = nearest(gpu.name, probed.cores_usable)
    base = find(name)[1]
    machine = replace(
        base,
        gpu=gpu.name,
        gpus=torch.cuda.device_count(),
        gpu_memory=f"{gpu.total_memory}",
        host_memory=host,
        host_reserved="",
        cores=probed.cores_usable,
        node_link_gbps=base.node_link_gbps or base.gpu_link_gbps,
    )
    return f"this machine (rates of {name})", machine


def nearest(gpu: str, cores: int) -> str:
    """Return the shipped machine whose GPU name has the longest common prefix with `gpu`; among
    several, the machine with the closest number of cores."""
    machines = {name: find(name)[1] for name in shipped()}

    def likeness(name: str) -> tuple[int, int]:
        pairs = zip(machines[name].gpu, gpu, strict=False)
        common = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return len(common), -abs(machines[name].cores - cores)

    best = max(machines, key=likeness)
    return best if likeness(best)[0] > len("NVIDIA A") else _UNKNOWN_GPU
