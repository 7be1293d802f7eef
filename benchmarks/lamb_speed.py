"""The work of LAMB on one tensor on the host, beside AdamW's kernel on as many elements.

    python -m benchmarks.lamb_speed [--numel 16777216] [--rounds 9] [--state fp32]

Both run in turn on one thread, and seconds are the processor's.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from offloadtrain.optim import LAMB, AdamW, UpdateRule
from offloadtrain.runtime import kernels
from offloadtrain.step.layout.formats import FORMATS


def seconds(rule: UpdateRule, state: str, numel: int) -> float:
    """Return the processor's seconds of one update of random weights, behind another one."""
    format, group = FORMATS[state], rule.defaults()
    fields = [
        torch.zeros(field.numel(numel), dtype=getattr(torch, field.dtype or "bfloat16"))
        for field in format.fields(rule.moments)
    ]
    rule.set_master(format, tuple(fields), torch.randn(numel))
    grad, working = torch.randn(numel).bfloat16(), torch.empty(numel, dtype=torch.bfloat16)
    for step in (1, 2):
        began = time.process_time()
        rule.update(
            format,
            tuple(fields),
            grad,
            None if format.holds_weight else working,
            kernels.Layout.of_one(numel),
            group=group,
            step=step,
            grad_scale=1.0,
            seed=0,
        )
    return time.process_time() - began


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--numel", type=int, default=1 << 24)
    asked.add_argument("--rounds", type=int, default=9)
    asked.add_argument("--state", default="fp32", choices=["fp32", "split16", "int8"])
    given = asked.parse_args()
    torch.set_num_threads(1)
    kernels.set_threads(1)
    rows = [
        [seconds(rule, given.state, given.numel) for rule in (AdamW(), LAMB())]
        for _ in range(given.rounds)
    ]
    for name, at in (("adamw", 0), ("lamb", 1)):
        print(f"{name:6} {1e3 * median(row[at] for row in rows):8.1f} ms of a processor")
    print(f"lamb takes {median(lamb / adamw for adamw, lamb in rows):.2f} times as long")


if __name__ == "__main__":
    main()
