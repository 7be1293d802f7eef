"""10,000 steps of tiny gradients, in blocks where every format must round.

Were the gradients of a block alike, or did they fall alike after a burst, the block's fp32 scale
would carry the change and no 8-bit code would move. So the first element of each block, the
keeper, has the burst's gradient throughout and is not judged.

[Note: The bounds]
With beta2 = 0.999 a second moment that nothing feeds loses 1/1000 per step, a fraction of the
distance d (relative) to its neighbour in the format. Stochastic rounding keeps its mean and adds
d / 1000 of relative variance per step, s = 10 d over the run: 0.08 for bf16 (d = 2^-7), 1.25 for
8 bits (d = 2^-3). The weight moves by 1/sqrt(second moment), whose mean is greater by at most
exp(3/8 s). Where the gradient feeds the moment, it rests between the two neighbours of its true
value, and the mean is off by at most 3/8 (d/2)^2. Means over elements add 5 sigma, and 0.005 for
the rounding of 8-bit masters, whose unit is 2^-15 in a way of 0.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Fp32State, Layout, State
from tests import levels, torch_kernels
from tests.runtime.kernels.format_cases import NARROW, ids_of, zero_state
from tests.runtime.kernels.kernel_cases import BACKENDS

STEPS, BURST, NUMEL, BETA2 = 10_000, 10, 512, 0.999
LAYOUT = Layout.of_one(NUMEL)
each_state = pytest.mark.parametrize(("name", "dtype"), NARROW, ids=ids_of)
each_burst = pytest.mark.parametrize("burst", [1.0, 1e4])
each_size = pytest.mark.parametrize("size", [1e-6, 1e-12])


@dataclass(frozen=True)
class Run:
    """What the optimizer is fed. `size`: of the largest gradient; `burst`: times it at first."""

    size: float
    burst: float = 1.0
    lr: float = 1e-5
    steps: int = STEPS

    def grad(self, step: int) -> Tensor:
        grad = _directions() * (self.size * (self.burst if step <= BURST else 1.0))
        grad[::128] = self.size * self.burst
        return grad

    def scalars(self, step: int) -> AdamScalars:
        return AdamScalars(
            lr=self.lr, beta1=0.9, beta2=BETA2, eps=1e-18, weight_decay=0.0, step=step, seed=3
        )


@cache
def _directions() -> Tensor:
    """Both signs, sizes of 1/10 to 1."""
    source = torch.Generator().manual_seed(8)
    sizes = 10 ** torch.empty(NUMEL).uniform_(-1, 0, generator=source)
    return sizes * torch.randn(NUMEL, generator=source).sign()


def start(name: str, dtype: torch.dtype) -> State:
    state = zero_state(name, NUMEL, dtype)
    kernels.set_master(state, torch.ones(NUMEL))
    return state


def trained(state: State, run: Run) -> Fp32State:
    first, later = run.grad(1), run.grad(BURST + 1)
    with kernels.use(replace(BACKENDS[0], threads=1)):
        for step in range(1, run.steps + 1):
            grad = first if step <= BURST else later
            kernels.update(state, grad, run.scalars(step), layout=LAYOUT)
    return torch_kernels.to_fp32(state)


@cache
def wide(run: Run) -> Fp32State:
    return trained(start("fp32", torch.float32), run)


def judged_ones(values: Tensor) -> Tensor:
    """All but the keepers, float64."""
    return values.double().view(-1, 128)[:, 1:].reshape(-1)


def moved(values: Fp32State) -> Tensor:
    """How far each weight went against its gradient."""
    return judged_ones((1.0 - values.master.double()) * _directions().sign())


def distance(name: str) -> float:
    """The greatest relative distance of neighbouring second moments."""
    return 2.0**-7 if name == "split16" else 2.0**-3


def judged(after: Fp32State, run: Run, name: str) -> list[str]:
    """What is wrong with a run, see [Note: The bounds]."""
    exact, d = wide(run), distance(name)
    spread = run.steps * (1 - BETA2) * d if run.burst > 1 else (d / 2) ** 2
    each = math.sqrt(math.expm1(spread))
    slack = 5 * each / math.sqrt(NUMEL) + 0.005
    farther = float((moved(after) / moved(exact)).mean())
    ratios = judged_ones(after.exp_avg_sq) / judged_ones(exact.exp_avg_sq)
    decayed = float(ratios.mean())
    wrong = []
    if not 1 - slack < farther < math.exp(3 / 8 * spread) + slack:
        wrong.append(f"weights went {farther} times as far as in fp32")
    if not abs(decayed - 1) < slack:
        wrong.append(f"the second moment is {decayed} times what it is in fp32")
    if not bool((moved(after) > 0.12 * moved(exact)).all()):
        wrong.append(f"a weight went {float((moved(after) / moved(exact)).min())} times as far")
    return wrong


@pytest.mark.cover(0, levels.ALL)
@each_state
@each_burst
@each_size
def test_no_format_stalls(size: float, burst: float, name: str, dtype: torch.dtype) -> None:
    run = Run(size, burst)
    assert judged(trained(start(name, dtype), run), run, name) == []


@each_state
def test_updates_below_the_weights_last_place_add_up(name: str, dtype: torch.dtype) -> None:
    """10,000 updates of 2^-22 in both directions; bf16 ends 2^-9 about one, fp16 2^-12."""
    run = Run(1e-3, lr=2.0**-22)
    after = trained(start(name, dtype), run)
    expected = run.steps * run.lr
    # 8 bits: each update is a whole unit u of the master with chance lr / u.
    unit = {"split16": 0.0, "int8": 2.0**-15}[name]
    slack = 5 * math.sqrt(expected * unit / NUMEL) / expected + 0.01
    assert abs(float(moved(after).mean()) / expected - 1) < slack
    assert bool((moved(after) > 0).all())


# ---- controls: the same runs with what the kernels do not do -----------------------------------


def nearest_bf16(run: Run) -> Fp32State:
    """AdamW in float64 with moments in bf16, rounded to nearest."""
    p, m, v = torch.ones(NUMEL).double(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for step in range(1, run.steps + 1):
        s, g = run.scalars(step), run.grad(step).double()
        m = (s.beta1 * m + (1 - s.beta1) * g).bfloat16().double()
        v = (s.beta2 * v + (1 - s.beta2) * g * g).bfloat16().double()
        m_hat, v_hat = m / (1 - s.beta1**step), v / (1 - s.beta2**step)
        p -= s.lr * m_hat / (v_hat.sqrt() + s.eps)
    return Fp32State((p.float(), m.float(), v.float()))


@pytest.mark.slow
def test_bf16_moments_rounded_to_nearest_stall() -> None:
    run = Run(1e-6, 1e4)
    after = nearest_bf16(run)
    assert len(judged(after, run, "split16")) == 3
    ratios = judged_ones(after.exp_avg_sq) / judged_ones(wide(run).exp_avg_sq)
    assert float(ratios.min()) > 100.0
    assert float(moved(after).mean() / moved(wide(run)).mean()) < 0.5


def test_doing_nothing_is_told_apart() -> None:
    run = Run(1e-6)
    assert len(judged(torch_kernels.to_fp32(start("split16", torch.bfloat16)), run, "split16")) == 3
