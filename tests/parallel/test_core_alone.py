"""A model in one piece is trained without the package that divides models; skipping loads it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import torch
import offloadtrain as ot

model = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Linear(128, 1))
optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", precision="fp32", {options})
for _ in range(2):
    optimizer.backward(model(torch.ones(4, 8)).mean())
    optimizer.step()
optimizer.close()
print(*sorted(name for name in sys.modules if name.startswith("offloadtrain.parallel")))
"""


def loaded_by(options: str) -> set[str]:
    """Return the modules of the package that a process has loaded which trains two steps."""
    code = CODE.format(options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("options", ["", "clip_norm=1.0, update='speculative'"])
def test_a_model_in_one_piece_needs_no_package_of_divided_models(options: str) -> None:
    assert loaded_by(options) == set()


def test_what_skips_parameters_is_found_by_name() -> None:
    loaded = loaded_by("skip_unused=['0.weight']")
    assert "offloadtrain.parallel.unused_experts" in loaded
    assert not any(name.startswith("offloadtrain.parallel.pipeline") for name in loaded)
