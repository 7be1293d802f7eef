"""Published runs that the models of other systems are held against: what their cells describe.

`published.json` has the ZeRO papers and GPipe (`benchmarks/validate_plan.py` prints all of it),
`peer_cells.json` throughputs of the peers of `plan --compare`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from offloadtrain.config.model_shape import SIZES, ModelShape, num_params
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.baselines.peers import PEERS, Work
from offloadtrain.plan.baselines.published import Run, Software, with_largest_micro_batch
from offloadtrain.plan.costs.costs import KERNELS
from offloadtrain.plan.costs.device_time import Kernels, Seconds, block_seconds, head_seconds

PUBLISHED = Path(__file__).with_name("published.json")
PEER_CELLS = Path(__file__).with_name("peer_cells.json")
SOFTWARE = Software()
"""One set for all cells."""


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


def run_of(cell: Mapping[str, Any], machine: Machine) -> Run:
    """The run that a published cell describes.

    `batch` is of all ranks together. `largest_micro_batch` is an upper bound: the micro-batch is as
    large as memory allows.
    """
    shape = trained(SIZES[cell.get("size", "gpt-10b")])
    if "width" in cell:
        shape = replace(shape, d_model=cell["width"], num_heads=cell["heads"])
    if "layers" in cell:
        shape = replace(shape, num_layers=cell["layers"])
    run = Run(shape=shape, **{"micro_batch": 1, **cell["run"]})
    if "largest_micro_batch" in cell:
        run = with_largest_micro_batch(run, machine, SOFTWARE, cell["largest_micro_batch"])
    if "batch" in cell:
        run = replace(run, micro_steps=cell["batch"] / (run.ranks * run.micro_batch))
    return run


def trained(shape: ModelShape) -> ModelShape:
    """The shape as the papers train it: GPT-2's recipe, with dropout."""
    return replace(shape, dropout=0.1)


@cache
def _of_peer(peer: str) -> list[tuple[Checked, str]]:
    """Steps per second of a peer's cells in `peer_cells.json`, each with the GPU."""
    found = []
    for series in json.loads(PEER_CELLS.read_text(encoding="utf-8"))["series"]:
        told = series["machine"]
        machine = find(told)[1] if isinstance(told, str) else Machine(**told)
        for cell in series["cells"]:
            if cell["peer"] == peer:
                seconds = PEERS[peer].seconds(_work(series | cell, machine), machine)
                checked_cell = Checked(cell["cell"], 1 / seconds, 1 / cell["published_s"])
                found.append((checked_cell, machine.gpu))
    return found


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
