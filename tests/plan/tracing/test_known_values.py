"""Forwards that ask for values which follow from the batch; caches that a trace fills."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.plan.plan_model import plan_model
from offloadtrain.plan.tracing.step import TraceError
from tests.plan.tracing.measured import most_allocated
from tests.plan.tracing.test_plan_model import booked, planned

VOCAB, PAD, WIDTH = 64, 0, 128
OPTIONS: dict[str, Any] = {"precision": "fp32"}


class Asks(nn.Module):
    """As wav2vec2, M2M100 and LED do, in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if targets.max() >= VOCAB:
            raise ValueError("a target beyond the vocabulary")
        attended = tokens != PAD
        lengths = attended.sum(1)
        x = self.embed(tokens)
        for layer in self.layers:
            if torch.rand([]) >= 0.1:
                x = layer(x)
        if not attended.all():
            x = x.masked_fill(~attended[..., None], 0.0)
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        flat = targets.masked_select(targets > 0)
        aligned = F.ctc_loss(log_probs, flat, lengths, (targets > 0).sum(1), zero_infinity=True)
        return aligned + x[attended].square().mean()


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCAB, (8, 64), generator=source)
    tokens[:, 48:] = PAD
    targets = torch.randint(1, VOCAB, (8, 12), generator=source)
    targets[3:, 8:] = 0
    return tokens, targets


def test_what_follows_from_the_batch_is_known() -> None:
    plan = plan_model(Asks, batch(), machine="cpu2", **OPTIONS)
    torch.manual_seed(0)
    model = Asks()
    optimizer = ot.offload(model, device="cpu", **OPTIONS)

    def step() -> None:
        torch.manual_seed(2)  # no layer is skipped
        optimizer.backward(model(*batch()))
        optimizer.step()

    most = most_allocated(step)
    assert planned(plan) == booked(optimizer)
    assert plan.plan.activations.total / most == pytest.approx(1.0, abs=0.05)
    optimizer.close()


def test_without_values_it_is_told_what_to_give() -> None:
    tokens, targets = (tensor.to("meta") for tensor in batch())
    with pytest.raises(TraceError, match="Give a batch whose whole numbers have values"):
        plan_model(Asks, (tokens, targets), machine="cpu2", **OPTIONS)


@functools.lru_cache(maxsize=4)
def table(size: int) -> Tensor:
    """As relative positions of vision models are kept."""
    return torch.arange(size * size).view(size, size) % size


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.bias(table(8)).mean(0)
        return x.square().mean()


def trained() -> list[Tensor]:
    torch.manual_seed(0)
    model = WithTable()
    optimizer = ot.offload(model, device="cpu", **OPTIONS)
    optimizer.backward(model(torch.ones(4, 8, 8)))
    optimizer.step()
    return [weights for _, weights in optimizer.master_weights()]


def test_caches_of_the_model_keep_nothing_of_a_trace() -> None:
    table.cache_clear()
    expected = trained()
    table.cache_clear()
    plan_model(WithTable, torch.ones(4, 8, 8), machine="cpu2", **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(expected, trained(), strict=True))
