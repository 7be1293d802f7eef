"""LAMB: the paper's update. The bits of offloaded runs are in `test_rules.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.optim import lamb
from offloadtrain.runtime import kernels
from offloadtrain.step.layout.formats import FP32
from tests.numerics.lamb import CAPPED, LAMB, paper_step
from tests.numerics.reference import SEED

ROWS = [(0, 300, 4), (384, 5000, 7), (5504, 1, 9)]
"""Offset, elements and id of three parameters of a bucket, with padding between them."""


def bucket(numel: int = 5632) -> tuple[tuple[torch.Tensor, ...], kernels.Layout]:
    torch.manual_seed(3)
    layout = kernels.Layout(*map(list, zip(*ROWS, strict=True)))
    state = tuple(torch.zeros(numel) for _ in range(3))
    for offset, count, _ in ROWS:
        state[0][offset : offset + count] = torch.randn(count) * 0.02
    return state, layout


def run_steps(rule: ot.LAMB, state: Any, layout: kernels.Layout, steps: int) -> list[torch.Tensor]:
    """Update with random gradients, of bf16 and in the memory of the new weights."""
    torch.manual_seed(5)
    grads = []
    for step in range(1, steps + 1):
        grads.append((torch.randn(state[0].numel()) * 10.0 ** (-step)).bfloat16())
        working = grads[-1].clone()
        rule.update(
            FP32,
            state,
            working,
            working,
            layout,
            group=rule.defaults(),
            step=step,
            grad_scale=0.5,
            seed=SEED,
        )
        assert torch.equal(working, state[0].bfloat16())
    return grads


@pytest.mark.parametrize("rule", [pytest.param(LAMB, marks=pytest.mark.slow), CAPPED])
def test_a_step_is_the_papers(rule: ot.LAMB, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against fp64, after 5 steps: a few roundings of fp32 per step and element. Every backend has
    the same bits."""
    monkeypatch.setattr(lamb, "_PIECE", 1024)
    state, layout = bucket()
    wide = [field.double() for field in state]
    grads = run_steps(rule, state, layout, 5)
    for backend in kernels.available():
        with kernels.use(backend):
            same, _ = bucket()
            run_steps(rule, same, layout, 5)
        assert all(map(torch.equal, state, same)), backend
    for offset, count, _ in ROWS:
        part = slice(offset, offset + count)
        w, m, v = (field[part] for field in wide)
        for step, grad in enumerate(grads, start=1):
            paper_step(w, m, v, grad[part].double() * 0.5, step, rule)
        for field, expected in zip(state, (w, m, v), strict=True):
            largest = expected.abs().max()
            assert (field[part].double() - expected).abs().max() < 2e-6 * largest


def test_without_a_norm_the_ratio_is_one() -> None:
    """Weights of zero, as biases begin, and directions of zero."""
    rule = ot.LAMB(lr=0.5, weight_decay=0.0)
    state, layout = (torch.zeros(128), torch.zeros(128), torch.zeros(128)), kernels.Layout.of_one(9)
    first: dict[str, Any] = {"step": 1, "grad_scale": 1.0, "seed": 0, "group": rule.defaults()}
    rule.update(FP32, state, torch.ones(128), None, layout, **first)
    assert torch.allclose(state[0][:9], torch.tensor(-0.5))
    still = (torch.ones(128), torch.zeros(128), torch.zeros(128))
    rule.update(FP32, still, torch.zeros(128), None, layout, **first)
    assert torch.equal(still[0], torch.ones(128))


def test_hyperparameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm = 0.0 is not a number above 0"):
        ot.LAMB(max_norm=0.0)
    with pytest.raises(ValueError, match=r"lr = -1.0 is not a number of at least 0.0"):
        ot.LAMB(lr=-1.0)
