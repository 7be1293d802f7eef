"""Why 8-bit moments have 3 mantissa bits: one block, gradients over six decades, five codes.

    python -m benchmarks.moment_codes

Each line is a code (mantissa bits of exp_avg / exp_avg_sq), each column a decade of gradient sizes
within every block of 128. Printed: displacement against fp32 state's, 1.00 is right; below, the
elements are damped by the code's floor, above, they are blown up. Plain torch kernels, one minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offloadtrain.runtime.kernels import (
    AdamScalars,
    Backend,
    Fp32State,
    Int8State,
    Layout,
    State,
    blocks,
    codec,
    read_master,
    set_master,
    update,
    use,
)

NUMEL, STEPS, DECADES = 64 * 128, 300, 6
CODES = [(3, 3), (3, 4), (4, 3), (4, 4), (5, 4)]


@contextmanager
def code(exp_avg_bits: int, exp_avg_sq_bits: int) -> Iterator[None]:
    before = codec.SIGNED, codec.UNSIGNED
    codec.SIGNED = codec.Minifloat(exp_avg_bits, before[0].largest)
    codec.UNSIGNED = codec.Minifloat(exp_avg_sq_bits, before[1].largest)
    yield
    codec.SIGNED, codec.UNSIGNED = before


def start(wide: bool, weights: Tensor) -> State:
    if wide:
        return Fp32State((weights.clone(), torch.zeros(NUMEL), torch.zeros(NUMEL)))
    kinds = (torch.bfloat16, torch.int8, torch.uint8, torch.uint8)
    fields = [torch.zeros(NUMEL, dtype=kind) for kind in kinds]
    state = Int8State((*fields, *(torch.zeros(blocks(NUMEL)) for _ in range(2))))
    set_master(state, weights)
    return state


def displacement(state: State, weights: Tensor, gradients: list[Tensor], beta2: float) -> Tensor:
    layout = Layout.of_one(NUMEL)
    for step, grad in enumerate(gradients, start=1):
        scalars = AdamScalars(
            lr=1e-3, beta1=0.9, beta2=beta2, eps=1e-8, weight_decay=0.0, step=step
        )
        with use(Backend("numba", "-", 0, "")):  # which encodes int8 state by `codec`
            update(state, grad, scalars, layout=layout)
    master = torch.empty(NUMEL)
    read_master(state.format, scalars.moments, state, master)
    return master - weights


def main() -> None:
    source = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(NUMEL, generator=source)
    place = torch.arange(NUMEL) % 128 / 127
    mean, size = 0.3 * torch.randn(NUMEL, generator=source), 1e-2 * 10 ** (-DECADES * place)
    gradients = [(mean + torch.randn(NUMEL, generator=source)) * size for _ in range(STEPS)]
    decade = (DECADES * place).clamp(max=DECADES - 0.01).floor()
    print("beta2  code " + " ".join(f"{f'1e-{d}':>6}" for d in range(DECADES)))
    for beta2 in (0.95, 0.999):
        exact = displacement(start(True, weights), weights, gradients, beta2).abs()
        for bits in CODES:
            with code(*bits):
                found = displacement(start(False, weights), weights, gradients, beta2).abs()
            ratios = [
                float(found[decade == d].mean() / exact[decade == d].mean()) for d in range(DECADES)
            ]
            print(f"{beta2:5} {bits[0]}/{bits[1]}   " + " ".join(f"{r:6.2f}" for r in ratios))


if __name__ == "__main__":
    main()
