"""A small deep model on the CPU, offloaded against resident: what a layer costs beyond its work.

    python -m benchmarks.deep_model [--steps 15]

24 layers of width 64 (1.3M parameters), 256 tokens, fp32, one thread of torch. The resident loop is
that of `offloadtrain bench step`: `torch.optim.AdamW(fused=True)`, the norm clipped by torch. All
take steps in turn in one process; a ratio is of two steps of one round. CPU time of the training
thread, which runs all lanes in order here and does all of the work but the kernels' second thread;
that is left out on both sides by one thread of the kernels.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

from offloadtrain.cli.bench.step import DEMO_OPTIONS, Step, offloaded_step, resident_step
from offloadtrain.config.model_shape import SIZES
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime import kernels

LAYERS, WIDTH, HEADS, TOKENS = 24, 64, 2, 256
CASES = ("exact", "speculative", "delayed", "streamed")
WARM_STEPS = 3


def made() -> dict[str, Step]:
    """Make the step of every case, over copies of one model."""
    shape = replace(SIZES["demo"], num_layers=LAYERS, d_model=WIDTH, num_heads=HEADS)
    model, device = Transformer(shape, seed=0), torch.device("cpu")
    steps: dict[str, Step] = {
        "resident": resident_step(copy.deepcopy(model), device, torch.float32)
    }
    for case in CASES:
        copied, options = copy.deepcopy(model), DEMO_OPTIONS[case]
        steps[case] = offloaded_step(copied, device, torch.float32, options, {}, case)
    return steps


def timed(step: Step, tokens: Tensor) -> float:
    begun = time.thread_time()
    step(tokens[:, :-1], tokens[:, 1:])
    return time.thread_time() - begun


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    count = parser.parse_args().steps
    torch.set_num_threads(1)
    kernels.set_threads(1)
    steps, tokens = made(), torch.randint(0, 256, (1, TOKENS + 1))
    spent: dict[str, list[float]] = {case: [] for case in steps}
    for number in range(WARM_STEPS + count):
        for case, step in steps.items():
            seconds = timed(step, tokens)
            if number >= WARM_STEPS:
                spent[case].append(seconds)
    print(f"{'case':12} {'ms per step':>12} {'x resident':>11} {'x, least':>9}")
    for case, own in spent.items():
        ratios = [mine / other for mine, other in zip(own, spent["resident"], strict=True)]
        least = min(own) / min(spent["resident"])
        median_ms = 1e3 * statistics.median(own)
        print(f"{case:12} {median_ms:12.1f} {statistics.median(ratios):11.2f} {least:9.2f}")


if __name__ == "__main__":
    main()
