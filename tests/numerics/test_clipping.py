"""Clipped by `clip_grad_norm_`, an offloaded run has the bits of a resident one that multiplies its
gradients by the same coefficients, in every update mode."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.comparison import DTYPES, make, pair, train
from tests.numerics.models import batches, loss_of
from tests.numerics.test_update_modes import report


@pytest.mark.parametrize("precision", DTYPES)
def test_it_returns_the_norm_that_the_clipping_before_has_left(precision: str) -> None:
    resident, optimizer, model = pair(make("chain"), precision)
    resident.clips = (0.5, 0.2, float("inf"))
    for tokens in batches(10 if precision == "fp16" else 2):
        resident.clipped.clear()
        resident.step([tokens], loss_of)
        optimizer.backward(loss_of(model, tokens))
        returned = [optimizer.clip_grad_norm_(max_norm).item() for max_norm in resident.clips]
        optimizer.step()
        if resident.clipped:
            assert returned == resident.clipped
        else:  # overflow: torch's loops get a norm that is not finite, too
            assert not torch.tensor(returned).isfinite().any() and report(optimizer).skipped


def test_a_wrong_guess_is_undone_and_a_right_one_kept() -> None:
    _, optimizer, model = pair(make("chain"), update="speculative")
    guesses = []
    for number, tokens in enumerate(batches(5)):
        train(optimizer, model, [tokens], clips=(0.1 if number == 3 else 1e9,))
        guesses.append(report(optimizer).speculation_hit)
    assert guesses == [None, True, True, False, True]


@pytest.mark.parametrize("how", ["optimizer", "torch"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_step_that_the_loop_has_clipped_is_not_clipped_again(how: str, reads: bool) -> None:
    """By the option `clip_norm`, which is no smaller; also where code has read the gradients."""

    def trained(clip: float | None) -> list[torch.Tensor]:
        _, optimizer, model = pair(make("chain"), clip=clip)
        for tokens in batches(3):
            optimizer.backward(loss_of(model, tokens))
            if how == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                optimizer.clip_grad_norm_(0.1)
            if reads:
                assert all(float(param.grad.norm()) < 0.1 for param in model.parameters())
            optimizer.step()
        return [masters.clone() for _, masters in optimizer.master_weights()]

    expected = trained(None)
    for clip in (0.1, 0.2):
        assert all(map(torch.equal, trained(clip), expected))
    assert not all(map(torch.equal, trained(0.01), expected))
