"""A 124M GPT on the same tokens, resident or in one format: `python -m …convergence CASE`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.spec import Spec
from benchmarks.gpu.systems import here, make, precision_of
from offloadtrain.data.batches import Batches
from offloadtrain.data.prepare import prepare
from offloadtrain.data.tokens import TokenFile

STEPS, EVERY = 2000, 20
SPEC = Spec(size="gpt2-124m", seq_len=512, micro_batch=32, recompute=False)
CASES: dict[str, dict[str, Any]] = {
    "resident": {"system": "resident"},
    "fp32": {},
    "split16": {"options": {"state": "split16"}},
    "int8": {"options": {"state": "int8"}},
}


def curve(case: str, *, toy: bool) -> dict[str, Any]:
    """The mean loss of every EVERY steps, on bytes of Python's standard library."""
    spec = replace(SPEC, size="debug", seq_len=32, micro_batch=4) if toy else SPEC
    steps = 2 * EVERY if toy else STEPS
    with TemporaryDirectory() as folder:
        tokens = TokenFile(prepare("python-stdlib", Path(folder)).train)
        device = here()
        spec = replace(spec, precision=precision_of(device), **CASES[case])
        losses = _curve(spec, tokens, steps, device)
    return {"losses": losses, "every": EVERY, "figures": {"loss": losses[-1]}}


def _curve(spec: Spec, tokens: TokenFile, steps: int, device: torch.device) -> list[float]:
    system = make(spec, device)
    batches = Batches(tokens, batch=spec.micro_batch, seq_len=spec.seq_len, seed=1)
    losses, means = [], []
    for _ in range(steps):
        batch = batches.next()
        losses.append(system.micro(batch.tokens_BT.to(device), batch.targets_BT.to(device)))
        system.step()
        if len(losses) == EVERY:
            means.append(float(torch.stack(losses).mean()))
            losses = []
    system.close()
    return means


if __name__ == "__main__":
    print(json.dumps(curve(sys.argv[1], toy="--toy" in sys.argv)))
