"""Throughputs of the peers of `plan --compare` that their models are held against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.baselines.peers import PEERS, Work
from offloadtrain.plan.costs.costs import KERNELS
from offloadtrain.plan.costs.device_time import Kernels, Seconds, block_seconds, head_seconds

PEER_CELLS = Path(__file__).with_name("peer_cells.json")


@dataclass(frozen=True, slots=True)
class Checked:
    """A predicted value beside the published one, in one unit."""

    cell: str
    planned: float
    published: float

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


def checked(peer: str) -> list[Checked]:
    """Return the throughputs known of a peer, and what its model gives."""
    return [cell for cell, _ in _of_peer(peer)]


def calibrated_gpus(peer: str) -> frozenset[str]:
    """Return the GPUs, by torch's names, with a throughput of a peer."""
    return frozenset(gpu for _, gpu in _of_peer(peer))


@cache
def _of_peer(peer: str) -> list[tuple[Checked, str]]:
    """Steps per second of a peer's cells in `peer_cells.json`, each with the GPU."""
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
                entry = Checked(cell["cell"], 1 / seconds, 1 / cell["published_s"])
                checked.append((entry, machine.gpu))
    return checked


def _work(cell: Mapping[str, Any], machine: Machine) -> Work:
    """A step of a cell, whose forward runs again in backward. Kernels "shipped" are those of our
    transformer, eager. A cell that states no number of parameters has a head and a loss."""
    shape = ModelShape(max_seq_len=cell["seq_len"], **cell["shape"])
    kernels = KERNELS if cell["kernels"] == "shipped" else Kernels(**cell["kernels"])
    where = cell["sequences"] * cell["seq_len"], machine, cell["precision"], kernels
    block = block_seconds(shape, cell["seq_len"], *where)
    params, head = cell.get("params"), Seconds(0.0, 0.0)
    if params is None:
        params, head = num_params(shape), head_seconds(shape, *where)
    layers, again = shape.num_layers, cell["recompute"] * block.forward
    return Work(
        shape=shape,
        params=params,
        largest_block=params // layers,
        outside=0,
        activation_bytes=0,
        compute=Seconds(
            layers * block.forward + head.forward,
            layers * (block.backward + again) + head.backward,
        ),
        micro_steps=cell.get("micro_steps", 1),
        clips=cell.get("clips", False),
        frees_gradients=cell.get("frees_gradients", True),
    )
