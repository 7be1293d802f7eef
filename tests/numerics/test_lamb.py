"""LAMB offloaded: the paper's update, and the bits of a resident loop over torch's fused AdamW with
lr times each tensor's trust ratio."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.optim import lamb
from offloadtrain.runtime import kernels
from offloadtrain.step.layout.formats import FORMATS, FP32
from tests.numerics.lamb import CAPPED, LAMB, LambRun, NarrowLambRun, paper_step
from tests.numerics.models import batches
from tests.numerics.test_offload import make
from tests.numerics.test_rules import OPTIONS, SEED, assert_same, follow, pair
from tests.runtime.kernels.test_adam import needs_fma_in_torch

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


@pytest.mark.parametrize("rule", [LAMB, CAPPED], ids=["", "capped"])
def test_a_step_is_the_papers(rule: ot.LAMB, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against fp64, after 5 steps: a few roundings of fp32 per step and element."""
    monkeypatch.setattr(lamb, "_PIECE", 1024)
    state, layout = bucket()
    wide = [field.double() for field in state]
    grads = run_steps(rule, state, layout, 5)
    for offset, count, _ in ROWS:
        part = slice(offset, offset + count)
        w, m, v = (field[part] for field in wide)
        for step, grad in enumerate(grads, start=1):
            paper_step(w, m, v, grad[part].double() * 0.5, step, rule)
        for found, expected in zip(state, (w, m, v), strict=True):
            largest = expected.abs().max()
            assert (found[part].double() - expected).abs().max() < 2e-6 * largest


def test_without_a_norm_the_ratio_is_one() -> None:
    """Weights of zero, as biases begin, and directions of zero."""
    rule = ot.LAMB(lr=0.5, weight_decay=0.0)
    state, layout = (torch.zeros(128), torch.zeros(128), torch.zeros(128)), kernels.Layout.of_one(9)
    given: dict[str, Any] = {"step": 1, "grad_scale": 1.0, "seed": 0, "group": rule.defaults()}
    rule.update(FP32, state, torch.ones(128), None, layout, **given)
    assert torch.allclose(state[0][:9], torch.tensor(-0.5))
    still = (torch.ones(128), torch.zeros(128), torch.zeros(128))
    rule.update(FP32, still, torch.zeros(128), None, layout, **given)
    assert torch.equal(still[0], torch.ones(128))


def test_every_kernel_gives_the_same_bits() -> None:
    found = []
    for backend in kernels.available():
        with kernels.use(backend):
            state, layout = bucket()
            run_steps(LAMB, state, layout, 3)
            found.append(state)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


# ---- offloaded


@needs_fma_in_torch
@pytest.mark.parametrize("name", ["clipped", "speculative"])
def test_few_steps_have_the_bits_of_resident(name: str) -> None:
    accum = OPTIONS[name].get("grad_accum_steps", 1)
    run, optimizer, model = pair(LAMB, LambRun, **OPTIONS[name])
    follow(run, optimizer, model, batches(3 * accum), accum)
    assert_same(run, optimizer, model)
    optimizer.close()


@needs_fma_in_torch
@pytest.mark.slow
@pytest.mark.parametrize("rule", [LAMB, CAPPED], ids=["", "capped"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_offloaded_has_the_bits_of_resident(options: dict[str, Any], rule: Any) -> None:
    run, optimizer, model = pair(rule, LambRun, **options)
    accum = options.get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(5 * accum), accum)
    assert_same(run, optimizer, model)
    optimizer.close()


@pytest.mark.parametrize("state", ["split16", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["clipped", *(pytest.param(n, marks=pytest.mark.slow) for n in ("speculative",))]
)
def test_narrow_state_has_the_bits_of_its_definition(name: str, state: str) -> None:
    run, optimizer, model = pair(LAMB, NarrowLambRun, state=state, **OPTIONS[name])
    accum = OPTIONS[name].get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(3 * accum), accum)
    for key, kept in optimizer.named_state():
        for (field, found), expected in zip(kept.items(), run.kept[key], strict=True):
            assert torch.equal(found.reshape(-1), expected), (key, field)
    optimizer.close()


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    run, optimizer, model = pair(LAMB, LambRun, clip_norm=0.5)
    stream = batches(4)
    follow(run, optimizer, model, stream[:2], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    other = make("chain", seed=1)
    again = ot.offload(other, LAMB, device="cpu", seed=SEED, clip_norm=0.5)
    again.load_state_dict(saved)
    follow(run, again, other, stream[2:], 1)
    assert_same(run, again, other)
    again.close()


def test_its_bytes_are_adams() -> None:
    rows = []
    for rule in (LAMB, ot.AdamW()):
        optimizer = ot.offload(make("chain"), rule, device="cpu")
        rows.append({row.owner: row.bytes for row in optimizer.ledger.rows()})
        optimizer.close()
    assert rows[0] == rows[1] and FORMATS["fp32"].keeps_moments(LAMB.moments)


def test_hyperparameters_out_of_range_are_told() -> None:
    with pytest.raises(ValueError, match=r"max_norm = 0.0 is not a number above 0"):
        ot.LAMB(max_norm=0.0)
    with pytest.raises(ValueError, match=r"lr = -1.0 is not a number of at least 0.0"):
        ot.LAMB(lr=-1.0)
