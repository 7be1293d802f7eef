"""Hyperparameters that a loop changes in `param_groups`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import on_lanes
from tests.seeded_lanes import SeededLanes


@pytest.mark.parametrize("key", ["maximize", "amsgrad"])
def test_a_variant_that_the_rule_does_not_have_is_refused_at_step(key: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = ot.offload(model, ot.AdamW(lr=0.1), device="cpu", precision="fp32")
    before = model.weight.detach().clone()
    optimizer.param_groups[0][key] = True
    optimizer.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(ValueError, match=f"{key} = True: AdamW does not have it"):
        optimizer.step()
    optimizer.param_groups[0][key] = False
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.close()


def test_a_rate_that_is_a_tensor_is_that_of_its_step() -> None:
    """A schedule of torch writes into it, while updates with the rate of before may still wait."""

    def trained(*, offloads: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        if offloads:
            run: Any = ot.offload(model, ot.SGD(lr=0.1), device="cpu", precision="fp32")
        else:
            run = torch.optim.SGD(model.parameters(), lr=0.1)
        run.param_groups[0]["lr"] = torch.tensor(0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(run, 0.1)
        for _ in range(3):
            model(torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
            run.step()
            run.zero_grad()
            schedule.step()
        return [param.detach().clone() for param in model.parameters()]

    with on_lanes(SeededLanes(0, late=True)):
        ours = trained(offloads=True)
    torch.testing.assert_close(ours, trained(offloads=False))
