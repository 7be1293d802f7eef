"""Stages of a pipeline in ZeRO stage 3 whose replicas use other parts of a layer: the bits of the
same replicas without stages. Several microbatches are in flight, and each has a path of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.distributed.test_partly_used import Listed
from tests.distributed.test_pipeline import loss_of
from tests.numerics.models import VOCAB

MICROBATCHES, STEPS, ROWS, LENGTH = 4, 3, 2, 8
LR = ot.AdamW(lr=1e-2)


class Passing(Listed):
    """Passes over what other stages hold."""

    def forward(self, tokens: Tensor) -> Tensor:
        x, turn = tokens if self.embed is None else self.embed(tokens), self.turn
        # The forward that tells shapes is of a copy of the model.
        self.turn += 1
        for layer in self.layers:
            x = layer(x, turn)
        return x if self.head is None else self.head(x)


def model() -> nn.Module:
    torch.manual_seed(3)
    return Passing()


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 * step + replica)
    tokens = torch.randint(0, VOCAB, (MICROBATCHES * ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def flat(**options: Any) -> dict[str, Any]:
    whole = model()
    optimizer = ot.offload(whole, LR, device="cpu", grad_accum_steps=MICROBATCHES, **options)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step, dist.get_rank())
        for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = loss_of(whole(x), y)
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
    found = {name: value.numpy() for name, value in optimizer.master_weights()}
    optimizer.close()
    return {"losses": losses, "masters": found}


def staged(schedule: str, **options: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline = ot.pipeline(
        model(),
        mesh,
        LR,
        example=torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        microbatches=MICROBATCHES,
        loss_fn=loss_of,
        schedule=schedule,
        device="cpu",
        **options,
    )
    losses: list[float] = []
    for step in range(STEPS):
        tokens, targets = batch(step, pipeline.replicas.rank)
        losses += pipeline.run(tokens, target=targets).tolist()
        pipeline.step()
    found = {name: value.numpy() for name, value in pipeline.optimizers[0].master_weights()}
    pipeline.close()
    return {"losses": losses, "masters": found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "activation"), [("1f1b", "keep"), ("1f1b", "recompute"), ("gpipe", "recompute")]
)
def test_paths_of_microbatches_in_flight(ranks: Run, schedule: str, activation: str) -> None:
    options = {"zero_stage": 3, "precision": "fp32", "activation": activation}
    plain = ranks(2, flat, **options)
    found = ranks(4, staged, schedule, **options)
    for rank, one in enumerate(found):
        whole = plain[rank % 2]
        assert one["losses"] == whole["losses"], rank
        for name, value in one["masters"].items():
            assert (whole["masters"][name] == value).all(), name
    assert found[0]["masters"].keys() | found[2]["masters"].keys() == plain[0]["masters"].keys()
