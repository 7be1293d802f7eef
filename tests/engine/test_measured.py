"""Where the gradient's norm is taken: [Note: Measured in the gather] in
`step.program.gradients`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offloadtrain import offload
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.optim import AdamW
from offloadtrain.runtime import kernels


class Picky(nn.Module):
    """A layer that is used on demand, and weights in another order than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(33, 33), nn.Linear(33, 33)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, *, both: bool = True) -> Tensor:
        y = self.first(x)
        pixels = self.conv(x.reshape(1, 3, 11, -1)).square().mean()
        return pixels + (self.second(y) if both else y).square().mean()


def norm_of(model: nn.Module, losses: list[Tensor]) -> float:
    """By its definition: of each parameter in the order of its memory."""
    total = 0.0
    for param in model.parameters():
        each = [
            torch.autograd.grad(losse, param, retain_graph=True, allow_unused=True)[0]
            for losse in losses
        ]
        result = [grad for grad in each if grad is not None]
        if not result:
            continue
        grad = torch.empty_like(param).copy_(
            result[0] if len(result) == 1 else result[0] + result[1]
        )
        total += kernels.sum_squares(grad.as_strided((param.numel(),), (1,)))
    return math.sqrt(total)


def step(model: Picky, optimizer: OffloadOptimizer, *inputs: Tensor, both: bool = True) -> None:
    """One step; two inputs deliver every gradient twice in one backward."""
    losses = [model(x, both=both) for x in inputs]
    expected = norm_of(model, losses)
    for loss in losses:
        loss.backward()
    optimizer.step()
    assert optimizer.grad_norm == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_on": "device"},
        {"state_on": {"device": 0.5}},
        {"grad_accum_steps": 2, "sums_on": "device"},
    ],
    ids=str,
)
def test_no_memory_of_the_device_is_read_in_a_step(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU such a read waits for all of compute's stream. The norms come down by a copy into
    host memory, and the thread waits for its event."""
    torch.manual_seed(0)
    model = Picky()
    optimizer = offload(model, AdamW(lr=1e-3), device="cpu", clip_norm=0.1, **options)

    def refuse(tensor: Tensor, *_: object) -> None:
        raise AssertionError(f"reads {tensor.numel()} elements of the device")

    for number in range(3):
        for _ in range(options.get("grad_accum_steps", 1)):
            optimizer.backward(model(torch.randn(11, 33).bfloat16()))
        with monkeypatch.context() as patch:
            if number:
                patch.setattr(Tensor, "cpu", refuse)
                patch.setattr(Tensor, "item", refuse)
            optimizer.step()
    on_host = [tensor for tensor in optimizer._engine.step_gradients.norm_measure._of_tier.values()]
    rows = [row for row in optimizer.ledger.rows() if row.owner == "norms" and row.tier == "host"]
    assert rows[0].bytes == sum(tensor.nbytes for tensor in on_host)
    optimizer.close()
