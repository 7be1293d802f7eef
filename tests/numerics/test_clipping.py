"""Clipped by `clip_grad_norm_`, an offloaded run has the bits of a resident one that multiplies its
gradients by the same coefficients, in every update mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.models import batches, loss_of
from tests.numerics.test_offload import DTYPES, compare, make, pair, train
from tests.numerics.test_update_modes import DelayedRun, assert_same, delayed_pair, report

CLIPS = [(0.5,), (0.5, 0.2), (0.2, 0.5), (1e9,), (float("inf"), 0.3)]
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "speculative": {"update": "speculative"},
    "streamed": {"working": "host", "update": "speculative"},
}


@pytest.mark.parametrize("clip_norm", [None, 0.3, 1e9])
@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("mode", MODES)
def test_same_bits(mode: str, clips: tuple[float, ...], clip_norm: float | None) -> None:
    compare("tied", "bf16", clip=clip_norm, clips=clips, **MODES[mode])


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("precision", DTYPES)
def test_same_bits_with_accumulation(precision: str, explicit: bool) -> None:
    if precision == "fp16" and not explicit:
        return  # refused
    steps = 10 if precision == "fp16" else 3
    for mode in MODES.values():
        compare("chain", precision, accum=2, clips=(0.4,), steps=steps, explicit=explicit, **mode)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_delayed_clips_the_gradient_of_this_step(precision: str, clip_norm: float | None) -> None:
    run, optimizer, model = delayed_pair(make("chain"), precision, warmup=1, clip=clip_norm)
    assert isinstance(run, DelayedRun)
    run.clips = (0.5, 0.2)
    for tokens in batches(10 if precision == "fp16" else 5):
        expected = run.step([tokens], loss_of)
        assert train(optimizer, model, [tokens], clips=run.clips) == expected
        assert optimizer.grad_norm == run.norms[-1]
    assert run.skipped < len(run.norms)
    run.flush()
    assert_same(run, optimizer, model)


@pytest.mark.parametrize("precision", DTYPES)
def test_it_returns_the_norm_that_the_clipping_before_has_left(precision: str) -> None:
    resident, optimizer, model = pair(make("chain"), precision)
    resident.clips = (0.5, 0.2, float("inf"))
    for tokens in batches(10 if precision == "fp16" else 2):
        resident.seen.clear()
        resident.step([tokens], loss_of)
        optimizer.backward(loss_of(model, tokens))
        returned = [optimizer.clip_grad_norm_(max_norm).item() for max_norm in resident.clips]
        optimizer.step()
        if resident.seen:
            assert returned == resident.seen
        else:  # overflow: torch's loops get a norm that is not finite, too
            assert not torch.tensor(returned).isfinite().any() and report(optimizer).skipped


def test_a_wrong_guess_is_undone_and_a_right_one_kept() -> None:
    _, optimizer, model = pair(make("chain"), update="speculative")
    guesses = []
    for number, tokens in enumerate(batches(5)):
        train(optimizer, model, [tokens], clips=(0.1 if number == 3 else 1e9,))
        guesses.append(report(optimizer).speculation_hit)
    assert guesses == [None, True, True, False, True]
