"""Other trainers that offload, as analytic models of one step: memory and seconds on a `Machine`.

Each is set up as its documentation recommends, with torch's needs for the same model and
microbatch, and modelled in its favour: page-locked memory is not rounded up, fragmentation of
device memory is not counted, and copies concurrent with compute are free. docs/comparison.md has
the sources. `checked` compares the models with known throughputs. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.baselines.published import Run, Software, pcie, step_times
from offloadtrain.plan.costs.costs import KERNELS
from offloadtrain.plan.costs.device_time import (
    NOTHING,
    Kernels,
    Seconds,
    block_seconds,
    head_seconds,
)

DEEPSPEED, ZERO3 = "DeepSpeed ZeRO-2 offload", "DeepSpeed ZeRO-3 offload"
FSDP2, TORCHAO = "FSDP2 CPU offload", "torchao"
SOFTWARE = Software(compute_share=1.0)
"""DeepSpeed of 2026: hooks and copies no longer slow compute; its Adam is that of its papers."""

FSDP2_HOST_SHARE = 0.31
"""Share of the host's memory bandwidth that the norm and torch's fused AdamW over fp32 parameters
reach; fitted to its one published cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a step under any trainer, in 16-bit mixed precision with AdamW.

    Attributes:
        shape: the model's shape; for a foreign model an estimate, from which nothing is counted.
        largest_block: parameters of the largest repeated block.
        outside: parameters outside of repeated blocks.
        activation_bytes: peak bytes of a microbatch's activations in torch.
        compute: seconds of one microbatch of one rank, recompute included.
        micro_steps: microbatches per rank and step.
        clips: the norm of all gradients is clipped.
        frees_gradients: torchao frees each gradient on the device once it is copied; it cannot if
            microbatches are accumulated.
    """

    shape: ModelShape
    params: int
    largest_block: int
    outside: int
    activation_bytes: int
    compute: Seconds
    micro_steps: int = 1
    ranks: int = 1
    clips: bool = True
    frees_gradients: bool = True

    @property
    def owned(self) -> float:
        return self.params / self.ranks


Bytes = Callable[[Work], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A trainer, as functions from `Work` to memory and time.

    Attributes:
        device: owner → peak bytes of each device.
        host: owner → bytes of one rank on its host, without the process itself.
        seconds: duration of a step.
        most_ranks: largest number of ranks; None: unlimited.
        master: description of its master weights.
        clips: it can clip the norm of all gradients.
    """

    device: Bytes
    host: Bytes
    seconds: Callable[[Work, Machine], float]
    most_ranks: int | None = None
    master: str = "fp32"
    clips: bool = True


# ── DeepSpeed, ZeRO stage 2, optimizer on the CPU ──


def _deepspeed_device(work: Work) -> dict[str, float]:
    weights = 2.0 * work.params
    return _with_activations({"weights": weights, "buckets": SOFTWARE.bucket_bytes}, work)


def _deepspeed_host(work: Work) -> dict[str, float]:
    sums = SOFTWARE.sum_bytes if work.micro_steps > 1 else 0.0
    return {"state": SOFTWARE.host_bytes * work.owned, "gradient sums": sums * work.owned}


def _deepspeed_seconds(work: Work, machine: Machine) -> float:
    run = Run(
        shape=work.shape,
        micro_batch=1,
        micro_steps=work.micro_steps,
        gpus=work.ranks,
        all_params=work.params,
        computed=work.compute,
    )
    return step_times(run, machine, SOFTWARE).step


# ── DeepSpeed, ZeRO stage 3, optimizer and weights on the CPU ──


def _zero3_device(work: Work) -> dict[str, float]:
    """Two gathered blocks, the parameters outside of blocks, and the bucket of gradients in
    flight."""
    gathered = 2.0 * (2 * work.largest_block + work.outside)
    return _with_activations({"weights": gathered, "buckets": SOFTWARE.bucket_bytes}, work)


def _zero3_seconds(work: Work, machine: Machine) -> float:
    """16-bit weights go up for each forward and backward, and gradients down, concurrently with
    compute. The host adds further microbatches' gradients in fp32; then come the norm and Adam."""
    up, down = (
        2 * work.owned / pcie(work.ranks, machine, rate) + _gathered_s(work, machine)
        for rate in (machine.h2d_gbps, machine.d2h_gbps)
    )
    each = max(work.compute.forward, up) + max(work.compute.backward, up, down)
    sums = (work.micro_steps - 1) * _host_s(12, work, machine)
    return work.micro_steps * each + sums + _host_s(12 + 28 / SOFTWARE.adam_share, work, machine)


# ── FSDP2 with CPUOffloadPolicy, fp32 parameters, fused AdamW ──


def _fsdp2_device(work: Work) -> dict[str, float]:
    """Two gathered blocks and the parameters outside of blocks, which stay; in flight for the
    largest group: its fp32 shard before the gather, 16-bit gradients, their copy to be reduced, the
    fp32 shard."""
    group = max(work.largest_block, work.outside)
    owners = {
        "gathered weights": 2.0 * (2 * work.largest_block + work.outside),
        "gradients outside of blocks": 2.0 * work.outside,
        "on the way": 2.0 * group + 4.0 * group / work.ranks,
    }
    return _with_activations(owners, work)


def _fsdp2_host(work: Work) -> dict[str, float]:
    """Parameters, gradients and two moments of the shard, all fp32."""
    return {"state": 16.0 * work.owned}


def _fsdp2_seconds(work: Work, machine: Machine) -> float:
    """fp32 parameters go up for each forward and backward, and the first microbatch's gradients
    down, concurrently with compute. The host waits for gradients of later microbatches and adds
    them. Then the host computes the norm and AdamW, with nothing else running."""
    up = 4 * work.owned / pcie(work.ranks, machine, machine.h2d_gbps) + _gathered_s(work, machine)
    down = 4 * work.owned / pcie(work.ranks, machine, machine.d2h_gbps) + _gathered_s(work, machine)
    forward = max(work.compute.forward, up)
    first = forward + max(work.compute.backward, up, down)
    later = forward + max(work.compute.backward, up) + down + _host_s(12, work, machine)
    update = _host_s(28 + (12 if work.clips else 0), work, machine) / FSDP2_HOST_SHARE
    return first + (work.micro_steps - 1) * later + update


def _gathered_s(work: Work, machine: Machine) -> float:
    """Return the seconds of one collective of all blocks' 16-bit parameters."""
    moved = 2 * work.params * (work.ranks - 1) / work.ranks
    link = machine.gpu_link_gbps if work.ranks <= machine.gpus else machine.node_link_gbps
    return moved / (1e9 * link) if moved else 0.0


# ── torchao's CPUOffloadOptimizer around torch's fused AdamW ──


def _torchao_device(work: Work) -> dict[str, float]:
    keeps = work.micro_steps > 1 or not work.frees_gradients
    owners = {"weights": 2.0 * work.params, "gradients": 2.0 * work.params if keeps else 0.0}
    return _with_activations(owners, work)


def _torchao_host(work: Work) -> dict[str, float]:
    """A copy of weights and gradients, and two moments, all in the weights' 16-bit dtype."""
    return {"state": 8.0 * work.params}


def _torchao_seconds(work: Work, machine: Machine) -> float:
    """Gradients go down during every backward; then each parameter is updated on the host (four
    16-bit tensors read, three written) and goes up during the next parameter's update."""
    down, up = (2e-9 * work.params / rate for rate in (machine.d2h_gbps, machine.h2d_gbps))
    each = work.compute.forward + max(work.compute.backward, down)
    return work.micro_steps * each + max(_host_s(14, work, machine), up)


# ── shared by all ──


def _with_activations(owners: dict[str, float], work: Work) -> dict[str, float]:
    return owners | {"activations": float(work.activation_bytes)}


def _host_s(bytes_per_param: float, work: Work, machine: Machine) -> float:
    """Return the seconds of one rank's pass over its shard, concurrent with the host's other
    ranks."""
    local = min(work.ranks, machine.gpus)
    rate = machine.dram_gbps if local == 1 else machine.shared_dram_gbps
    return bytes_per_param * work.owned * local / (1e9 * rate)


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        DEEPSPEED: Peer(device=_deepspeed_device, host=_deepspeed_host, seconds=_deepspeed_seconds),
        ZERO3: Peer(device=_zero3_device, host=_deepspeed_host, seconds=_zero3_seconds),
        FSDP2: Peer(device=_fsdp2_device, host=_fsdp2_host, seconds=_fsdp2_seconds),
        TORCHAO: Peer(
            device=_torchao_device,
            host=_torchao_host,
            seconds=_torchao_seconds,
            most_ranks=1,
            master="none: 16-bit weights",
            clips=False,
        ),
    }
)


PEER_CELLS = Path(__file__).with_name("peer_cells.json")


@dataclass(frozen=True, slots=True)
class Checked:
    """A predicted and a published value in the same unit; `gpu` is torch's name of the device."""

    cell: str
    gpu: str
    planned: float
    published: float

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


@cache
def checked(peer: str) -> list[Checked]:
    """Return known throughputs of a peer (`peer_cells.json`) and its model's predictions, in steps
    per second."""
    checked = []
    for series in json.loads(PEER_CELLS.read_text(encoding="utf-8"))["series"]:
        machine_or_name = series["machine"]
        machine = (
            find(machine_or_name)[1]
            if isinstance(machine_or_name, str)
            else Machine(**machine_or_name)
        )
        for cell in series["cells"]:
            if cell["peer"] == peer:
                seconds = PEERS[peer].seconds(_work(series | cell, machine), machine)
                checked.append(
                    Checked(cell["cell"], machine.gpu, 1 / seconds, 1 / cell["published_s"])
                )
    return checked


def _work(cell: Mapping[str, Any], machine: Machine) -> Work:
    """Return the work of a step of a cell; backward runs each block's forward `recompute` times.
    Kernels "shipped" means offloadtrain's transformer, eager. A cell without a number of
    parameters gets a head and a loss."""
    shape = ModelShape(max_seq_len=cell["seq_len"], **cell["shape"])
    kernels = KERNELS if cell["kernels"] == "shipped" else Kernels(**cell["kernels"])
    where = cell["sequences"] * cell["seq_len"], machine, cell["precision"], kernels
    block = block_seconds(shape, cell["seq_len"], *where)
    params, head = cell.get("params"), NOTHING
    if params is None:
        params, head = num_params(shape), head_seconds(shape, *where)
    again = Seconds(0.0, cell["recompute"] * block.forward)
    return Work(
        shape=shape,
        params=params,
        largest_block=params // shape.num_layers,
        outside=0,
        activation_bytes=0,
        compute=(block + again) * shape.num_layers + head,
        micro_steps=cell.get("micro_steps", 1),
        clips=cell.get("clips", False),
        frees_gradients=cell.get("frees_gradients", True),
    )
