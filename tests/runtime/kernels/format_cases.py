"""States in every format, and an independent statement of what the narrow ones hold.

Written from the definition with Python and numpy integers, not from the code under test.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Backend, Layout, State
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FP32, INT8, SPLIT16
from tests.runtime.kernels.kernel_cases import BACKENDS, NAN, SPECIALS

SCALARS = AdamScalars(
    lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.37, seed=11
)
NARROW = [("split16", torch.bfloat16), ("int8", torch.bfloat16), ("int8", torch.float16)]
ids_of = [f"{name}-{str(dtype)[6:]}" for name, dtype in NARROW]


def layout_of(numels: list[int], gap: int = 0) -> tuple[Layout, int]:
    """Parameters on block boundaries with `gap` blocks between, and the buffers' length."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += (kernels.blocks(numel) + gap) * kernels.BLOCK
    return Layout(offsets, numels, [7 * i + 3 for i in range(len(numels))]), end


def zero_state(name: str, numel: int, dtype: torch.dtype) -> State:
    def zeros(kind: torch.dtype, count: int = numel) -> Tensor:
        return torch.zeros(count, dtype=kind)

    if name == "fp32":
        return kernels.Fp32State(zeros(torch.float32) for _ in range(3))
    if name == "split16":
        halves = [zeros(torch.bfloat16) for _ in range(3)]
        return kernels.Split16State((halves[0], zeros(torch.int16), *halves[1:]))
    scales = [zeros(torch.float32, kernels.blocks(numel)) for _ in range(2)]
    codes = (zeros(torch.int8), zeros(torch.uint8), zeros(torch.uint8))
    return kernels.Int8State((zeros(dtype), *codes, *scales))


def random_state(name: str, numel: int, dtype: torch.dtype, seed: int = 0) -> State:
    """Masters and moments over several decades, as after some training."""
    source = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.empty(numel).uniform_(-4, 0, generator=source)
    values = kernels.Fp32State(
        (
            spread * torch.randn(numel, generator=source),
            1e-2 * spread * torch.randn(numel, generator=source),
            1e-3 * spread.square(),
        ),
    )
    state = zero_state(name, numel, dtype)
    from_fp32(state, values)
    return state


FORMAT_OF = {kernels.Fp32State: FP32, kernels.Split16State: SPLIT16, kernels.Int8State: INT8}


def from_fp32(state: State, values: kernels.Fp32State) -> None:
    """Take over the state of one parameter, rounded to nearest."""
    kernels.convert_by_codec(FP32, values, FORMAT_OF[type(state)], state)


def gradient(numel: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.empty(numel).uniform_(-3, 0, generator=source)
    return (sizes * torch.randn(numel, generator=source)).to(dtype)


def special_gradient(numel: int, dtype: torch.dtype) -> Tensor:
    """Every special value in turn, CUDA's own NaN among them."""
    values = SPECIALS.repeat(-(-numel // SPECIALS.numel()))[:numel].clone()
    values[5::40] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    result = values.to(dtype)
    if dtype is torch.float16:
        result[6::40] = torch.tensor([0x7FFF], dtype=torch.int16).view(torch.float16)
    return result


def clone(state: State) -> State:
    return type(state)(tensor.clone() for tensor in state)


def stepped(
    state: State, grad: Tensor, layout: Layout, backend: Backend, scalars: AdamScalars = SCALARS
) -> State:
    """A copy of the state after one step."""
    result = clone(state)
    with kernels.use(backend):
        kernels.update(result, grad, scalars, layout=layout)
    return result


def differing(a: State, b: State, moments: tuple[str, ...] = ADAM_MOMENTS) -> dict[str, int]:
    """How many elements of each field differ in a bit; a NaN is a NaN."""
    counts = {
        name: int(_unequal(x, y).sum()) for name, x, y in zip(a.names(moments), a, b, strict=True)
    }
    return {name: count for name, count in counts.items() if count}


def _unequal(x: Tensor, y: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x != y
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return (x.view(bits) != y.view(bits)) & ~(x.isnan() & y.isnan())


def preferred() -> Backend:
    return replace(BACKENDS[0], threads=2)


# ---- the definition, again ---------------------------------------------------------------------


def bits(value: float | np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


assert np.isnan(NAN)
