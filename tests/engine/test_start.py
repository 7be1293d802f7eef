"""What the first call of `offload()` brings with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAINED = """
import sys
import torch
import offloadtrain as ot

for options in ({}, {"working": "host"}):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    optimizer = ot.offload(model, ot.AdamW(), device="cpu", clip_norm=1.0, **options)
    optimizer.backward(model(torch.ones(1, 8)).float().sum())
    optimizer.step()
    optimizer.state_dict()
    optimizer.close()
print(sorted({"torch._dynamo", "torch.onnx", "sympy"}.intersection(sys.modules)))
"""


@pytest.mark.slow
def test_torch_s_compiler_is_not_imported() -> None:
    """It takes over a second. Recompute needs it: torch's checkpoint imports it by itself."""
    done = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
