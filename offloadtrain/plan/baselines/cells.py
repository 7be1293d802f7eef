"""Published runs that the models of other systems are held against: what their cells describe.

`published.json` has the ZeRO papers and GPipe (`benchmarks/validate_plan.py` prints all of it),
`peer_cells.json` throughputs of the peers of `plan --compare`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.baselines.peers import DEEPSPEED, PEERS, Work
from offloadtrain.plan.baselines.published import (
    Run,
    Software,
    tflops,
    with_largest_micro_batch,
)
from offloadtrain.plan.costs.device_time import Kernels, Seconds, block_seconds

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
    """Return the throughputs published of a peer on one host or more, and what its model gives."""
    cells = list(_of_peers(peer))
    return [*_of_papers(), *cells] if peer == DEEPSPEED else cells


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


def _of_papers() -> Iterator[Checked]:
    """ZeRO-Offload's throughputs, Tflop/s of each GPU, without the delayed update."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    _, machine = find(data["machine"])
    for figure in data["figures"]:
        for cell in figure["cells"] if figure["measure"] == "tflops" else ():
            run = run_of(cell, machine)
            if run.offload and not run.dpu and not cell.get("not_asserted"):
                name = f"{figure['figure']}, {cell['cell']}"
                yield Checked(name, tflops(run, machine, SOFTWARE), float(cell["published"]))


def _of_peers(peer: str) -> Iterator[Checked]:
    """Steps per second of the cells in `peer_cells.json`."""
    for series in json.loads(PEER_CELLS.read_text(encoding="utf-8"))["series"]:
        machine = Machine(**series["machine"])
        work = _work(series, machine)
        for cell in series["cells"]:
            if cell["peer"] == peer:
                cell_work = replace(work, frees_gradients=cell.get("frees_gradients", True))
                seconds = PEERS[peer].seconds(cell_work, machine)
                yield Checked(cell["cell"], 1 / seconds, 1 / cell["published_s"])


def _work(series: Mapping[str, Any], machine: Machine) -> Work:
    """The microbatch of a series: blocks alone, whose forward is computed again in backward."""
    shape = ModelShape(max_seq_len=series["seq_len"], **series["shape"])
    tokens = series["sequences"] * series["seq_len"]
    kernels = Kernels(**series["kernels"])
    block = block_seconds(shape, series["seq_len"], tokens, machine, series["precision"], kernels)
    layers, again = shape.num_layers, series["recompute"] * block.forward
    return Work(
        shape=shape,
        params=series["params"],
        largest_block=series["params"] // layers,
        outside=0,
        activation_bytes=0,
        compute=Seconds(layers * block.forward, layers * (block.backward + again)),
        clips=False,
    )
