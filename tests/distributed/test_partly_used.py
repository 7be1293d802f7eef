"""Layers of which each rank uses other parts have the bits of resident data parallelism, in every
ZeRO stage: in stage 3 a block that is not complete must not leave behind another gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.runtime.process_group import RankError
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
@pytest.mark.cover(1)
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


class WithAux(Listed):
    """A second head, which only one rank uses. Two others take turns in a slot and are not trained:
    backward gathers before the first gradient is there."""

    def __init__(self, user: int) -> None:
        super().__init__()
        self.tail = nn.Linear(VOCAB, WIDTH)
        self.head.requires_grad_(False)
        self.tail.requires_grad_(False)
        self.aux, self.user = nn.Linear(WIDTH, 3), user

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, 1)
        loss = self.tail(self.head(x)).float().logsumexp(-1).mean()
        return loss + self.aux(x).float().square().mean() if dist.get_rank() == self.user else loss


def with_aux(user: int, *, plain: bool) -> list[float]:
    torch.manual_seed(0)
    model = WithAux(user)
    options: dict[str, Any] = {"device": "cpu", "zero_stage": 3, "grad_accum_steps": 2}
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), keep_whole=["aux"], **options)
    norms = []
    for number, tokens in enumerate(test_sharded.own_batches(6)):
        if plain:
            (model(tokens) / 2).backward()
        else:
            optimizer.backward(model(tokens))
        if number % 2:
            optimizer.step()
            norms.append(optimizer.last_step.grad_norm)  # type: ignore[union-attr]
    optimizer.close()
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("user", [0, 1])
def test_a_head_that_one_rank_uses_with_a_plain_backward(ranks: Run, user: int) -> None:
    """The rank without it gathers before anything has delivered: the micro-step begins there."""
    assert ranks(2, with_aux, user, plain=True) == ranks(2, with_aux, user, plain=False)


class Tasks(nn.Module):
    """A head for training, and one for each of two evaluations, all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.trained, self.one, self.other = (nn.Linear(WIDTH, VOCAB) for _ in range(3))

    def forward(self, tokens: torch.Tensor, head: str = "trained") -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.get_submodule(head)(x)


def evaluated(heads: list[str], zero_stage: int) -> str:
    """What evaluations behind two steps raise, each rank's with its own head."""
    torch.manual_seed(0)
    model, tokens = Tasks(), torch.arange(12).reshape(3, 4)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", zero_stage=zero_stage)
    for _ in range(2):
        optimizer.backward(model(tokens).float().logsumexp(-1).mean())
        optimizer.step()
    try:
        with torch.no_grad():
            model(tokens)
            model(tokens, heads[dist.get_rank()])
    except RankError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "stage"), [(["one", "other"], 3), (["one", "one"], 3), (["one", "other"], 2)]
)
def test_an_evaluation_that_takes_another_path_is_refused(
    own_ranks: Run, heads: list[str], stage: int
) -> None:
    """The gathers of two heads would meet, and each rank would compute with a piece of both."""
    differ = stage == 3 and heads[0] != heads[1]
    for said in own_ranks(2, evaluated, heads, stage):
        assert said[:40] == ("ranks disagree in an evaluation: rank 1 " if differ else "")
