"""An offloaded run has the bits of a resident one: losses, weights, masters, moments, norms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.comparison import DTYPES, assert_same, compare, make, pair, train
from tests.numerics.models import MODELS, MixedReentrant, batches, loss_of


@pytest.mark.parametrize("name", ["chain", "tied"])
def test_backwards_without_a_forward_in_between(name: str) -> None:
    """As the stages of a pipeline run them: each is a micro-step, summed in fp32."""
    resident, optimizer, model = pair(make(name), "bf16", accum=2, clip=0.5)
    for step in range(3):
        micro = batches(2, seed=step)
        expected = resident.step(micro, loss_of)
        losses = [loss_of(model, tokens) for tokens in micro]
        assert [loss.item() for loss in losses] == expected
        for loss in losses:
            (loss / 2).backward()
            optimizer.end_micro_step()
        optimizer.end_micro_step()  # nothing has begun
        optimizer.step()
        assert optimizer.last_step is not None and optimizer.last_step.micro_steps == 2
    assert_same(resident, optimizer, model)


@pytest.mark.parametrize("precision", DTYPES)
def test_a_loss_that_is_divided_already(precision: str) -> None:
    resident, optimizer, model = pair(make("chain"), precision, accum=2)
    for step in range(10 if precision == "fp16" else 3):
        micro = batches(2, seed=step)
        expected = resident.step(micro, loss_of)
        for tokens, value in zip(micro, expected, strict=True):
            loss = loss_of(model, tokens)
            assert loss.item() == value
            optimizer.backward(loss / 2, divide=False)
        optimizer.step()
    assert resident.skipped < len(resident.norms)
    assert_same(resident, optimizer, model)


@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_a_second_delivery_in_one_backward_is_added(update: str) -> None:
    """A guess for its block is undone."""
    compare(MixedReentrant, update=update)


@pytest.mark.slow
@pytest.mark.parametrize("made", [MixedReentrant, MODELS["skipping"]])
def test_sums_on_the_device_of_gradients_that_come_twice_or_not_at_all(made: Any) -> None:
    results = []
    for sums_on in ("host", "device"):
        _, optimizer, model = pair(make(made), accum=2, clip=0.5, sums_on=sums_on)
        stream = batches(8)
        losses = [train(optimizer, model, stream[at : at + 2]) for at in range(0, 8, 2)]
        results.append((losses, optimizer.grad_norm))
    assert results[0] == results[1]
