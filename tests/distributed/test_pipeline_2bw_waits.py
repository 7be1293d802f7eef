"""The wait of a pipeline without flushes that no other one implies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.program.operations import Lane
from offloadtrain.step.program.updates import UpdatePath
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run

WIDTH, MICROBATCHES, ROWS = 24, 4, 2


class ReadsOnceMore(nn.Module):
    """Its backward reads the weight again when its gradient has left: without a gradient of its own
    for what is read, nothing else makes the engine wait."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # As the input of a later stage is: a gradient for it is computed.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return x + self.inner(F.linear(x, self.inner.weight.detach()))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


def faults(*, left_out: bool) -> list[Any]:
    """Of the program of this stage; `left_out`: uploads do not wait for what compute has read."""
    torch.manual_seed(0)
    model, lanes = (
        nn.Sequential(*(ReadsOnceMore() for _ in range(4))),
        RecordingLanes(SequentialLanes()),
    )
    waits = UpdatePath.end_backward
    if left_out:
        UpdatePath.end_backward = lambda self, _: self._order.record(Lane.COMPUTE, "backward")  # type: ignore[method-assign]
    try:
        with on_lanes(lanes):
            pipeline = ot.pipeline(
                model,
                init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")),
                ot.AdamW(lr=1e-2),
                example=torch.zeros(ROWS, WIDTH, dtype=torch.float32),
                microbatches=MICROBATCHES,
                loss_fn=loss_of,
                schedule="2bw",
                precision="fp32",
                device="cpu",
            )
        for _ in range(4):
            x = torch.randn(ROWS * MICROBATCHES, WIDTH)
            pipeline.run(x, target=x.tanh())
            pipeline.step()
        pipeline.drain()
        pipeline.close()
    finally:
        UpdatePath.end_backward = waits  # type: ignore[method-assign]
    return prove(lanes.program)


@pytest.mark.slow
def test_uploads_wait_for_the_last_reads_of_the_version_that_they_replace(ranks: Run) -> None:
    assert ranks(2, faults, left_out=False) == [[], []]
    first, _ = ranks(2, faults, left_out=True)
    assert any("h2d" in str(fault) and "backward" in str(fault) for fault in first)
