"""Among ranks, too, a program that is driven does what the engine is recorded to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.conftest import Run
from tests.distributed.reference import own_batches
from tests.numerics.models import VOCAB, WIDTH, Layer
from tests.step.test_drive import STEPS, compared

PLACES: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 2, summed in fp32": {"zero_stage": 2, "reduction": "fp32"},
    "stage 3, device": {"zero_stage": 3},
    "stage 3, host": {"working": "host"},
    "stage 3, some stay": {"working": "host", "resident_blocks": 2, "device_slots": 1},
}


def differs(mode: str, accum: int, options: dict[str, Any]) -> str:
    return compared(mode, accum, options, own_batches(STEPS * accum))


@pytest.mark.parametrize(
    ("mode", "accum", "place"),
    [
        ("exact", 1, "stage 1"),
        ("speculative", 1, "stage 3, host"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("exact", 2, "stage 2"),
                ("early", 2, "stage 2, summed in fp32"),
                ("speculative", 1, "stage 2"),
                ("delayed", 2, "stage 1"),
                ("exact", 2, "stage 3, device"),
                ("early", 2, "stage 3, host"),
                ("delayed", 2, "stage 3, some stay"),
                ("delayed", 2, "stage 3, device"),
                ("speculative", 1, "stage 3, some stay"),
                ("exact", 1, "stage 2, summed in fp32"),
            )
        ),
    ],
)
def test_every_rank_does_what_its_program_says(
    ranks: Run, mode: str, accum: int, place: str
) -> None:
    assert ranks(2, differs, mode, accum, PLACES[place]) == ["", ""]


class TiedTables(nn.Module):
    """Two tables that share a slot, and a head that reads the first of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def differs_tied(mode: str, accum: int, options: dict[str, Any]) -> str:
    return compared(mode, accum, options, own_batches(STEPS * accum), made=TiedTables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "accum", "place"),
    [
        ("exact", 2, "stage 3, device"),
        ("early", 1, "stage 3, host"),
        ("delayed", 1, "stage 3, device"),
    ],
)
def test_tied_weights_are_read_at_both_ends(ranks: Run, mode: str, accum: int, place: str) -> None:
    assert ranks(2, differs_tied, mode, accum, PLACES[place]) == ["", ""]
