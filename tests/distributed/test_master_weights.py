"""`master_weights()` among ranks: every rank receives whole tensors, from shards of any stage."""

from __future__ import annotations

import pytest
import torch

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.numerics.models import Frozen, batches, loss_of


def trained(state: str, **options: object) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = Frozen()
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", state=state, **options)  # type: ignore[arg-type]
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    found = {name: value.reshape(-1).tolist() for name, value in optimizer.master_weights()}
    shapes = {name: value.shape for name, value in optimizer.master_weights()}
    assert shapes == {name: param.shape for name, param in Frozen().named_parameters()}
    optimizer.close()
    return found


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("state", ["fp32", "split16"])
def test_every_rank_has_those_of_one_rank(ranks: Run, state: str, zero_stage: int) -> None:
    # All ranks see the same batches: their sum, divided by their number, is exact.
    first, second = ranks(2, trained, state, zero_stage=zero_stage)
    assert first == second == trained(state)
