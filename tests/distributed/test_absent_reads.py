"""Weights that a loop reads past their modules, while they are not on the device, are told of at
the first such read; what reads no values is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.numerics.models import Chain, batches, loss_of

Read = Callable[[nn.Module], Any]


def penalty(model: nn.Module) -> Tensor:
    return 1e-4 * sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


def told(
    read_in_loss: Read | None, read_behind: Read | None, *, tied: bool = False, **options: Any
) -> list[str]:
    """The messages of two steps."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("offloadtrain.engine.autograd.absent_reads")
    logger.addHandler(handler)
    try:
        torch.manual_seed(0)
        model = Chain(6, tied=tied)
        optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", **options)
        for tokens in batches(2):
            loss = loss_of(model, tokens)
            if read_in_loss is not None:
                loss = loss + read_in_loss(model)
            optimizer.backward(loss)
            optimizer.step()
            if read_behind is not None:
                read_behind(model)
        optimizer.close()
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
    finally:
        logger.removeHandler(handler)
    return heard


def asks_for_no_values(model: nn.Module) -> Tensor:
    for p in model.parameters():
        assert p.detach().dtype is p.data.dtype and torch.zeros_like(p).shape == p.shape
        assert p.grad is None and p.numel() and p.requires_grad and p.data.ndim
    return torch.zeros(())


READS: list[tuple[Read | None, Read | None]] = [
    (penalty, None),
    (lambda model: list(model.parameters())[9].data.norm(), None),
    (None, lambda model: [p.detach().float() for p in model.parameters()]),
    (None, lambda model: [torch.clone(p) for p in model.layers.parameters()]),
    (None, lambda model: [p.tolist() for p in model.parameters()]),
]


@pytest.mark.parametrize(
    "reads", [READS[0], *(pytest.param(some, marks=pytest.mark.slow) for some in READS[1:])]
)
def test_the_first_read_is_told(reads: tuple[Read | None, Read | None]) -> None:
    (message,) = told(*reads, working="host")
    assert message.startswith("'layers.") and "more resident_blocks" in message
    assert __file__ in message and "optimizer.synchronize()" in message


@pytest.mark.slow
def test_what_reads_no_values_is_not_told() -> None:
    assert told(asks_for_no_values, asks_for_no_values, working="host") == []


@pytest.mark.slow
def test_a_penalty_that_begins_late_is_told_behind_the_first_skipped_step() -> None:
    calls = []

    def late(model: nn.Module) -> Tensor:
        calls.append(0)
        return penalty(model) if len(calls) > 4 else torch.zeros(())

    torch.manual_seed(0)
    model, heard = Chain(6), []
    optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", working="host")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append((len(calls), record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("offloadtrain.engine.autograd").addHandler(handler)
    for tokens in batches(7):
        optimizer.backward(loss_of(model, tokens) + late(model))
        optimizer.step()
    optimizer.close()
    logging.getLogger("offloadtrain.engine.autograd").removeHandler(handler)
    ((call, message),) = heard
    assert call == 6 and "was read by pow()" in message


@pytest.mark.slow
def test_in_stage_3_every_rank_is_told(ranks: Run) -> None:
    for (message,) in ranks(2, told, penalty, None, zero_stage=3):
        assert 'keep_whole = ["embed"], or zero_stage = 2' in message
        assert "optimizer.full_weights()" in message
    for tied in (False, True):  # a tied head: offload() itself reads no weights that have left
        assert ranks(2, told, None, None, tied=tied, working="host") == [[], []]


def out_of_scope(close: bool) -> tuple[list[str], set[tuple[int, ...]]]:
    """The messages, and the shapes of the layers' parameters afterwards."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offloadtrain").addHandler(handler)
    try:
        model = Chain()
        optimizer = ot.offload(model, device="cpu", zero_stage=3)
        optimizer.backward(loss_of(model, batches(1)[0]))
        optimizer.step()
        if close:
            optimizer.close()
        del optimizer
        return heard, {tuple(param.shape) for param in model.layers.parameters()}
    finally:
        logging.getLogger("offloadtrain").removeHandler(handler)


def test_out_of_scope_in_stage_3_is_told(ranks: Run) -> None:
    """Weights in shards cannot be gathered there: their parameters are empty, and not NaN."""
    for heard, shapes in ranks(2, out_of_scope, False):
        assert "dict(optimizer.full_weights()) on all ranks" in heard[0] and shapes == {(0,)}
    assert ranks(2, out_of_scope, True) == [([], {(0,)})] * 2
