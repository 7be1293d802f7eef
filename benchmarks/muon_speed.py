"""The work of Muon on one matrix, on host and device, beside AdamW's kernel on as many elements.

    python -m benchmarks.muon_speed [--width 4096] [--rounds 9]

The three are run in turn; a ratio is the median over rounds. The iteration runs where `--device`
says. A CPU without bf16 arithmetic takes seconds for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from offloadtrain.optim import AdamW, Muon
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.block_spec import MatrixSpec
from offloadtrain.step.layout.formats import FP32


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def host_rows(width: int, rounds: int) -> list[tuple[float, ...]]:
    """Return seconds of AdamW, of Muon's moments and of its masters, for each round."""
    numel, muon, adamw = width * width, Muon(), AdamW()
    layout, group = Layout.of_one(numel), muon.defaults()
    master, first, second = torch.randn(numel), torch.zeros(numel), torch.zeros(numel)
    grad, staged = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    works = (
        lambda: adamw.update(
            FP32,
            (master, first, second),
            staged,
            staged,
            layout,
            group=adamw.defaults(),
            step=1,
            grad_scale=1.0,
            seed=0,
        ),
        lambda: muon.direction(
            FP32, (master, first), grad, grad, layout, group=group, step=1, grad_scale=1.0, seed=0
        ),
        lambda: muon.apply(
            FP32, (master, first), staged, staged, layout, [(width, width)], group=group
        ),
    )
    return [tuple(map(seconds, works)) for _ in range(rounds)]


def iteration_s(width: int, device: str) -> float:
    """Return the seconds of one orthogonalization, warmed up."""
    muon, spec = Muon(), MatrixSpec(0, width, width)
    matrix = torch.randn(width, width, device=device).bfloat16()
    workspace = torch.empty(spec.workspace_numel, dtype=torch.bfloat16, device=device)

    def run() -> None:
        muon.orthogonalize(matrix, workspace, group=muon.defaults())
        matrix.flatten()[0].item()  # behind all of it

    run()
    return seconds(run)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--width", type=int, default=4096)
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--device", default="")
    given = asked.parse_args()
    rows = host_rows(given.width, given.rounds)
    for name, at in (("adamw", 0), ("muon, moments", 1), ("muon, masters", 2)):
        print(f"{name:14} {1e3 * median(row[at] for row in rows):8.1f} ms")
    ratio = median((row[1] + row[2]) / row[0] for row in rows)
    print(f"muon on the host: {ratio:.2f} times AdamW, at {torch.get_num_threads()} threads")
    if given.device:
        spent = iteration_s(given.width, given.device)
        print(f"Newton-Schulz on {given.device}: {1e3 * spent:.1f} ms")


if __name__ == "__main__":
    main()
