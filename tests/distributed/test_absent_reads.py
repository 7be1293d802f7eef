"""Weights that a loop reads past their modules, while they are not on the device, are warned of at
the first such read; what reads no values is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.numerics.models import Chain, batches, loss_of
from tests.parallel.messages import warnings_of

Read = Callable[[nn.Module], Any]


def penalty(model: nn.Module) -> Tensor:
    return 1e-4 * sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


def warnings_of_steps(
    in_loss: Read | None,
    after_step: Read | None,
    *,
    steps: int = 2,
    tied: bool = False,
    **options: Any,
) -> list[str]:
    torch.manual_seed(0)
    model = Chain(6, tied=tied)
    with warnings_of("offloadtrain.engine.autograd.absent_reads") as messages:
        optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", **options)
        for tokens in batches(steps):
            loss = loss_of(model, tokens)
            optimizer.backward(loss if in_loss is None else loss + in_loss(model))
            optimizer.step()
            if after_step is not None:
                after_step(model)
        optimizer.close()
    if steps == 2:
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
    return messages


def asks_for_no_values(model: nn.Module) -> Tensor:
    for p in model.parameters():
        assert p.detach().dtype is p.data.dtype and torch.zeros_like(p).shape == p.shape
        assert p.grad is None and p.numel() and p.requires_grad and p.data.ndim
    return torch.zeros(())


@pytest.mark.parametrize(
    ("in_loss", "after_step"),
    [
        (penalty, None),
        *(
            pytest.param(*reads, marks=pytest.mark.slow)
            for reads in (
                (lambda model: list(model.parameters())[9].data.norm(), None),
                (None, lambda model: [p.detach().float() for p in model.parameters()]),
                (None, lambda model: [torch.clone(p) for p in model.layers.parameters()]),
                (None, lambda model: [p.tolist() for p in model.parameters()]),
            )
        ),
    ],
)
def test_the_first_read_is_warned_of(in_loss: Read | None, after_step: Read | None) -> None:
    (message,) = warnings_of_steps(in_loss, after_step, working="host")
    assert message.startswith("'layers.") and "more resident_blocks" in message
    assert __file__ in message and "optimizer.synchronize()" in message


@pytest.mark.slow
def test_what_reads_no_values_is_not_warned_of() -> None:
    assert warnings_of_steps(asks_for_no_values, asks_for_no_values, working="host") == []


@pytest.mark.slow
def test_a_penalty_that_begins_late_is_warned_of_after_the_first_skipped_step() -> None:
    calls = []

    def late(model: nn.Module) -> Tensor:
        calls.append(0)
        return penalty(model) if len(calls) > 4 else torch.zeros(())

    for steps, count in ((5, 0), (7, 1)):
        calls.clear()
        messages = warnings_of_steps(late, None, steps=steps, working="host")
        assert len(messages) == count and all("was read by pow()" in text for text in messages)


@pytest.mark.slow
def test_in_stage_3_every_rank_is_warned(ranks: Run) -> None:
    for (message,) in ranks(2, warnings_of_steps, penalty, None, zero_stage=3):
        assert 'keep_whole = ["embed"], or zero_stage = 2' in message
        assert "optimizer.full_weights()" in message
    for tied in (False, True):  # a tied head: offload() itself reads no weights that have left
        assert ranks(2, warnings_of_steps, None, None, tied=tied, working="host") == [[], []]
