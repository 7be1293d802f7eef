"""Layers of which each rank uses other parts have the bits of resident data parallelism, in every
ZeRO stage: in stage 3 a block that is not complete must not leave behind another gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed import test_sharded
from tests.distributed.conftest import Run
from tests.numerics.models import VOCAB, WIDTH


class Chosen(nn.Module):
    """A layer with a list of experts: in some microbatches a rank uses all of them, in others one.
    Its first addition waits for no weight, so that its last gradient is that of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(WIDTH))
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        x = self.router(x + self.before)
        used = self.experts if (turn + dist.get_rank()) % 2 else [self.experts[turn % 3]]
        for expert in used:
            x = x + torch.tanh(expert(x))
        return x


class Listed(nn.Module):
    """Five such layers."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Chosen() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.reentrant = reentrant
        self.turn = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, turn = self.embed(tokens), self.turn
        self.turn += 1
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, turn)
            else:
                x = checkpoint(layer, x, turn, use_reentrant=self.reentrant)
        return self.head(x)


def compare(reentrant: bool | None = None, **options: Any) -> None:
    test_sharded.OWN["listed"] = lambda: Listed(reentrant)
    test_sharded.compare("listed", steps=6, **options)


def test_a_block_that_is_not_complete_leaves_in_front_of_the_next_gather(ranks: Run) -> None:
    ranks(2, compare, zero_stage=3)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["in order", "threads", "seeded"])
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 1},
        {"zero_stage": 3, "accum": 2},
        {"working": "host", "accum": 2, "activation": "offload"},
        {"zero_stage": 3, "activation": "recompute", "device_slots": 3},
        {"zero_stage": 3, "activation": "offload_saved", "offload_saved_above": 0},
        {"working": "host", "update": "speculative", "clip": 1e9},
        {"zero_stage": 3, "state_on": "device", "reduction": "fp32"},
        {"zero_stage": 3, "reentrant": False},
        {"working": "host", "reentrant": True},
    ],
)
def test_parts_of_layers_in_every_placement(
    ranks: Run, options: dict[str, Any], lanes: str
) -> None:
    ranks(2, compare, lanes=lanes, **options)
