"""Hyperparameters that a loop changes in `param_groups`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offloadtrain as ot


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
