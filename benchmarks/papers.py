"""What the ZeRO papers and GPipe publish, as runs of the models in `offloadtrain.plan.baselines`.

`published.json` there has the figures; `benchmarks.validate_plan` prints all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadtrain.config.model_shape import SIZES, ModelShape, num_params
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.baselines import published
from offloadtrain.plan.baselines.published import (
    Run,
    Software,
    gpu_bytes,
    host_bytes,
    step_times,
    too_large_for,
)

PUBLISHED = Path(published.__file__).with_name("published.json")
SOFTWARE = Software()
"""One set for all cells."""


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


def megatron_flops(shape: ModelShape, batch: float, *, recompute: bool = True) -> float:
    """FLOPs of a step of `batch` sequences (Megatron-LM, arXiv:2104.04473, equation 3).

    Without recompute the blocks run three times a forward, not four; the logits always three.
    """
    length, width, layers = shape.max_seq_len, shape.d_model, shape.num_layers
    passes = 4 if recompute else 3
    blocks = passes * 24 * (1 + length / (6 * width))
    logits = 3 * 2 * shape.vocab_size / (layers * width)
    return batch * length * layers * width**2 * (blocks + logits)


def tflops(run: Run, machine: Machine, software: Software) -> float:
    """TFLOPS per GPU with any recompute counted, the papers' unit."""
    batch = run.micro_batch * run.micro_steps
    flops = megatron_flops(run.shape, batch, recompute=run.recompute) / run.mp
    return flops / step_times(run, machine, software).step / 1e12


def with_largest_micro_batch(run: Run, machine: Machine, software: Software, most: int) -> Run:
    """Return the run with as many sequences per rank as fit, up to `most`; one if none fits.

    A power of two, as nearly all micro-batches of the papers' tables.
    """
    sizes = (replace(run, micro_batch=1 << n) for n in reversed(range(most.bit_length())))
    fitting = (each for each in sizes if not too_large_for(each, machine, software))
    return next(fitting, replace(run, micro_batch=1))


def largest_model(run: Run, machine: Machine, software: Software) -> float:
    """Parameters of the deepest model of this width that fits; depth need not be whole."""
    shallow, deep = (replace(run, shape=replace(run.shape, num_layers=n)) for n in (1, 2))
    usable = machine.gpu_memory_bytes - machine.gpu_reserved_bytes
    layers = _depth(gpu_bytes(shallow, software), gpu_bytes(deep, software), usable)
    host, deeper = (host_bytes(each, machine, software) for each in (shallow, deep))
    layers = min(layers, _depth(host, deeper, machine.host_memory_bytes))
    params = num_params(shallow.shape)
    return params + (layers - 1) * (num_params(deep.shape) - params)


def _depth(one_layer: float, two_layers: float, limit: float) -> float:
    """Return the layers that fit, extrapolated linearly from the bytes of one and two layers."""
    return (
        1 + (limit - one_layer) / (two_layers - one_layer) if two_layers > one_layer else math.inf
    )
