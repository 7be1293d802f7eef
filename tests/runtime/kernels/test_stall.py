"""10,000 steps of a constant tiny gradient: no format stalls; rounding to nearest does.

The known failure: with beta2 = 0.999 the second moment decays by 1/1000 of itself per step, less
than half the last place of a bf16 number. Rounded to nearest it stays where a burst left it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Fp32State, Layout, State, torch_backend
from tests import levels
from tests.runtime.kernels.format_cases import NARROW, ids_of, preferred, zero_state

STEPS, BURST, NUMEL = 10_000, 10, 256
each_state = pytest.mark.parametrize(("name", "dtype"), NARROW, ids=ids_of)


def scalars(step: int, lr: float = 1e-5) -> AdamScalars:
    return AdamScalars(lr, 0.9, 0.999, 1e-15, 0.0, step=step, seed=3)


def start(name: str, dtype: torch.dtype) -> State:
    """Weights of ones."""
    state = zero_state(name, NUMEL, dtype)
    kernels.set_master(state, torch.ones(NUMEL))
    return state


def run(state: State, gradient: float, burst: float, lr: float = 1e-5) -> Fp32State:
    layout = Layout.of_one(NUMEL)
    large, small = torch.full((NUMEL,), gradient * burst), torch.full((NUMEL,), gradient)
    with kernels.use(preferred()):
        for step in range(1, STEPS + 1):
            grad = large if step <= BURST else small
            kernels.update(state, grad, scalars(step, lr), layout=layout)
    return kernels.to_fp32(state)


def displacement(values: Fp32State) -> Tensor:
    return (values.master.double() - 1.0).abs()


@pytest.mark.cover(0, levels.ALL)
@each_state
@pytest.mark.parametrize("burst", [1.0, 1e4])
@pytest.mark.parametrize("gradient", [1e-6, 1e-10])
def test_no_format_stalls(gradient: float, burst: float, name: str, dtype: torch.dtype) -> None:
    wide = run(start("fp32", torch.float32), gradient, burst)
    narrow = run(start(name, dtype), gradient, burst)
    # The mean over 256 elements: each one's second moment wanders by what its code cannot hold.
    expected, found = displacement(wide).mean(), displacement(narrow).mean()
    assert 0.9 < float(found / expected) < 1.1
    decayed = narrow.exp_avg_sq.double().mean() / wide.exp_avg_sq.double().mean()
    assert 0.8 < float(decayed) < 1.2
    each = displacement(narrow) / expected
    assert float(each.min()) > 0.5 and float(each.max()) < 2.0


@each_state
def test_updates_below_the_weights_last_place_add_up(name: str, dtype: torch.dtype) -> None:
    """10,000 updates of 2^-22 of a weight of one, whose last place is 2^-8 (bf16), 2^-11 (fp16)."""
    lr = 2.0**-22
    found = displacement(run(start(name, dtype), 1e-3, 1.0, lr=lr))
    assert abs(float(found.mean()) / (STEPS * lr) - 1.0) < 0.05
    assert bool((found > 0).all())


@pytest.mark.slow
def test_moments_rounded_to_nearest_stall() -> None:
    """The control: the same run with what the kernels do not do."""
    wide = Fp32State(torch.ones(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL))
    for step in range(1, STEPS + 1):
        grad = torch.full((NUMEL,), 1e-6 * (1e4 if step <= BURST else 1.0))
        torch_backend.update(wide, wide, grad, None, None, scalars(step))
        for moment in (wide.exp_avg, wide.exp_avg_sq):
            moment.copy_(moment.bfloat16().float())
    exact = run(start("fp32", torch.float32), 1e-6, 1e4)
    assert float(wide.exp_avg_sq.mean() / exact.exp_avg_sq.mean()) > 100.0
    assert float(displacement(wide).mean() / displacement(exact).mean()) < 0.5
