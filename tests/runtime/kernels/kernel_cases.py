"""Inputs for the kernels, and what equal bits means: every bit, except that a NaN is a NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Backend
from tests import levels, torch_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 15, 2047, 2048, 2049, 10_007)
SCALARS = AdamScalars(
    lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.37
)
INF, NAN = float("inf"), float("nan")
# In fp32 zeros, denormals and the least normal; in fp16 a denormal, the least normal, the largest,
# and the tie between it and infinity.
_FINITE = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.2e-38, 6e-8, 6.1e-5, 1.0, 65504.0, 65519.9, 65520.0]
SPECIALS = torch.tensor([*_FINITE, 3e38, -3.4e38, INF, -INF, NAN])
BACKENDS = kernels.available()

each_backend = levels.each("backend", BACKENDS)

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, AdamScalars], None]


def fused_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    working: Tensor | None,
    scalars: AdamScalars,
) -> None:
    """The kernel in force, on fp32 state."""
    state = kernels.Fp32State((master, exp_avg, exp_avg_sq))
    kernels.update(state, grad, scalars, working=working)


def plain_adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    working: Tensor | None,
    scalars: AdamScalars,
) -> None:
    """The oracle: the same in plain torch."""
    state = kernels.Fp32State((master, exp_avg, exp_avg_sq))
    torch_kernels.update(state, state, grad, working, None, scalars)


@dataclass
class State:
    """One bucket."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    working: Tensor | None

    def clone(self) -> State:
        working = None if self.working is None else self.working.clone()
        return State(
            *(x.clone() for x in (self.master, self.exp_avg, self.exp_avg_sq, self.grad)), working
        )

    def outputs(self) -> dict[str, Tensor]:
        result = {name: getattr(self, name) for name in ("master", "exp_avg", "exp_avg_sq")}
        return result if self.working is None else result | {"working": self.working}

    def step(self, adam: Step = fused_adam, scalars: AdamScalars = SCALARS) -> State:
        adam(self.master, self.exp_avg, self.exp_avg_sq, self.grad, self.working, scalars)
        return self


def random_state(
    numel: int, grad: torch.dtype, working: torch.dtype | None, seed: int = 0
) -> State:
    """Gradients and moments over eight decades, as in training."""
    source = torch.Generator().manual_seed(seed)

    def spread(low: float, high: float) -> Tensor:
        sizes = 10 ** torch.empty(numel).uniform_(low, high, generator=source)
        return sizes * torch.randn(numel, generator=source)

    return State(
        spread(-3, 0),
        spread(-6, 1),
        spread(-8, 0).square(),
        spread(-6, 2).to(grad),
        None if working is None else torch.zeros(numel, dtype=working),
    )


def special_state(grad: torch.dtype, working: torch.dtype) -> State:
    """Every special value as master, moment and gradient against every other."""
    a, b, c = torch.cartesian_prod(SPECIALS, SPECIALS, SPECIALS).unbind(1)
    numel = a.numel()
    moment = b.abs().clone()
    return State(
        a.clone(), b.clone(), moment, c.to(grad).clone(), torch.zeros(numel, dtype=working)
    )


def differences(actual: State, expected: State) -> dict[str, int]:
    """Return how many elements of each tensor differ in a bit, those with none left out."""
    pairs = ((name, x, expected.outputs()[name]) for name, x in actual.outputs().items())
    counts = {name: different_elements(x, y) for name, x, y in pairs}
    return {name: count for name, count in counts.items() if count}


def different_elements(actual: Tensor, expected: Tensor) -> int:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    unequal = actual.view(bits) != expected.view(bits)
    return int((unequal & ~(actual.isnan() & expected.isnan())).sum())


def threaded(backend: Backend) -> Iterator[Backend]:
    return (replace(backend, threads=count) for count in (1, 2, 3))
