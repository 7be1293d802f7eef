"""Ranks that use other parts of a model: in stage 3 a block that is not complete must not leave
after another gather, and an evaluation takes one path on all ranks.

The bits of layers that each rank uses in parts are in `test_sharded.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.process_group import RankError
from tests.distributed.conftest import Run
from tests.distributed.reference import own_batches
from tests.numerics.models import VOCAB, WIDTH
from tests.parallel import models
from tests.parallel.models import PartlyUsed


class WithAux(PartlyUsed):
    """A second head, which only one rank uses. Two others take turns in a slot and are not trained:
    backward gathers before the first gradient is there."""

    def __init__(self, user: int) -> None:
        super().__init__()
        self.tail = nn.Linear(models.VOCABULARY, models.WIDTH)
        self.head.requires_grad_(False)
        self.tail.requires_grad_(False)
        self.aux, self.user = nn.Linear(models.WIDTH, 3), user

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
    for number, tokens in enumerate(own_batches(6)):
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
        self.trained, self.left, self.right = (nn.Linear(WIDTH, VOCAB) for _ in range(3))

    def forward(self, tokens: torch.Tensor, head: str = "trained") -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.get_submodule(head)(x)


def evaluated(heads: list[str], zero_stage: int) -> str:
    """The error of evaluations after two steps, each rank's with its own head."""
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
    ("heads", "stage"), [(["left", "right"], 3), (["left", "left"], 3), (["left", "right"], 2)]
)
def test_an_evaluation_that_takes_another_path_is_refused(
    own_ranks: Run, heads: list[str], stage: int
) -> None:
    """The gathers of two heads would meet, and each rank would compute with a piece of both."""
    differ = stage == 3 and heads[0] != heads[1]
    for message in own_ranks(2, evaluated, heads, stage):
        assert message[:40] == ("ranks disagree in an evaluation: rank 1 " if differ else "")
