"""Plans of what people train, beside a step of it: bytes of the engine, and activations.

    python -m benchmarks.plan_architectures [--only NAME ...]
    python -m benchmarks.plan_architectures --options '{"activation": "recompute"}'

Each model of `benchmarks.architectures` is planned from its module and one microbatch, then trained
for two steps in fp32 on the CPU. Bytes of the engine, by owner, must equal the Ledger. Activations
are compared with the most that torch's allocator gives out in a step, which has no microbatch: its
bytes are subtracted from the plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import offloadtrain as ot
from benchmarks.architectures.models import ARCHITECTURES, Architecture
from benchmarks.architectures.training import build, microbatches
from offloadtrain.plan.plan_model import plan_model
from offloadtrain.plan.tracing.step import TraceError
from tests.plan.tracing.measured import most_allocated
from tests.plan.tracing.test_plan_model import booked, planned

CLOSE = 0.05


class _WithLoss(nn.Module):
    """A model that returns its loss, as its users compute it."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self, **batch: Any) -> Tensor:
        return self._loss_of(self.model, batch)


def compare(architecture: Architecture, options: Mapping[str, Any]) -> tuple[float, bool]:
    """Return planned over measured activations, and whether the engine's bytes are equal.

    Raises:
        TraceError: the model cannot be planned.
    """
    batch = dict(microbatches(architecture)[0])

    def made() -> nn.Module:
        return _WithLoss(build(architecture), architecture.loss_of).train()

    plan = plan_model(made, batch, machine="cpu2", precision="fp32", **options)
    model = made()
    optimizer = ot.offload(model, device="cpu", precision="fp32", **options)

    def step() -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        optimizer.backward(model(**batch))
        optimizer.step()

    most = most_allocated(step)
    given = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    same = planned(plan) == booked(optimizer)
    optimizer.close()
    return (plan.plan.activations.total - given) / most, same


def main(argv: list[str] | None = None) -> int:
    """Print a line for each model, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--options", type=json.loads, default={}, help="of offload()")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="transformers|diffusers")
    ratios, wrong, refused = list[float](), 0, 0
    for name in asked.only:
        try:
            ratio, same = compare(ARCHITECTURES[name], asked.options)
        except TraceError as error:
            refused += 1
            print(f"{name:28} cannot be traced: {str(error).partition('. ')[0]}", flush=True)
            continue
        ratios.append(ratio)
        wrong += not same
        print(f"{name:28} {ratio:6.3f} {'' if same else 'other bytes of the engine'}", flush=True)
    close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    print(
        f"{len(ratios)} planned, {refused} cannot be traced; the engine's bytes differ in {wrong}; "
        f"activations within {CLOSE:.0%} of {close}, median {statistics.median(ratios):.3f}"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
