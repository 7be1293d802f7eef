"""A model in one piece is trained without the package that divides models; skipping loads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys

import pytest
import torch
import offloadtrain as ot

for options in ({}, {"clip_norm": 1.0, "update": "speculative"}, {"skip_unused": ["0.weight"]}):
    model = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Linear(128, 1))
    optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", precision="fp32", **options)
    for _ in range(2):
        optimizer.backward(model(torch.ones(4, 8)).mean())
        optimizer.step()
    optimizer.close()
    print(*sorted(name for name in sys.modules if name.startswith("offloadtrain.parallel")))
"""


@pytest.mark.slow
def test_a_model_in_one_piece_needs_no_package_of_divided_models() -> None:
    """Which modules of it a process has loaded, after each run."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    exact, speculative, skipping = done.stdout.splitlines()
    assert exact == speculative == ""
    assert "offloadtrain.parallel.unused_experts" in skipping.split()
    assert "offloadtrain.parallel.pipeline" not in skipping
