"""An offloaded run has the bits of a resident one: losses, weights, masters, moments, norms."""

from __future__ import annotations

import copy

import pytest
import torch

import offloadtrain as ot
from tests.numerics.comparison import DTYPES, assert_same, follow, make, pair, train
from tests.numerics.models import MixedReentrant, batches, loss_of
from tests.numerics.reference import ResidentRun


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
    torch.manual_seed(0)
    resident, optimizer, model = pair(MixedReentrant(), "bf16", update=update)
    follow(resident, optimizer, model, batches(4))
    assert_same(resident, optimizer, model)


def test_groups_have_their_own_hyperparameters() -> None:
    def of(name: str) -> dict[str, float]:
        return {"lr": 3e-2, "weight_decay": 0.0} if name.endswith(("bias", "norm.weight")) else {}

    model = make("chain")
    plain_model = copy.deepcopy(model)
    resident = ResidentRun(plain_model, torch.bfloat16, groups=of)
    plain = [p for n, p in model.named_parameters() if not of(n)]
    other = [p for n, p in model.named_parameters() if of(n)]
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        params=[{"params": plain}, {"params": other, "lr": 3e-2, "weight_decay": 0.0}],
        device="cpu",
    )
    for tokens in batches(3):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, model)


def test_a_scheduler_of_torch_drives_the_learning_rate() -> None:
    resident, optimizer, model = pair(make("chain"))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    plain_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(resident.adam, 5)
    for tokens in batches(4):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
        schedule.step()
        plain_schedule.step()
    assert_same(resident, optimizer, model)


def test_an_early_step_applies_what_was_accumulated() -> None:
    resident, optimizer, model = pair(make("chain"), accum=4)
    micro = batches(2)
    for tokens in micro:
        optimizer.backward(loss_of(model, tokens))
    optimizer.step()
    sums: dict[str, torch.Tensor] = {}
    for tokens in micro:
        (loss_of(resident.model, tokens) / 4).backward()
        for name, param in resident.trained.items():
            assert param.grad is not None
            sums[name] = sums.get(name, torch.zeros(())) + param.grad.float()
            param.grad = None
    resident.apply(sums)
    assert_same(resident, optimizer, model)
