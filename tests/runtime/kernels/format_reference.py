"""The narrow formats stated a second time, on whole tensors: bits, decoded values, float64 bounds.

Written from the contract alone. Bits are int64 tensors that hold the unsigned number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Backend, Fp32State, Int8State, Layout, State
from tests import torch_kernels
from tests.runtime.kernels.format_cases import clone, from_fp32

MANTISSA_BITS = 3
BLOCK = 128
MASK32 = 0xFFFFFFFF
ULP = 2.0**-24
LARGEST_CODE = {"exp_avg": 127, "exp_avg_sq": 256}
PLAIN = torch_kernels.LISTED


@dataclass(frozen=True)
class Case:
    """One step's operands; nothing here is written to."""

    state: State
    grad: Tensor
    layout: Layout
    scalars: AdamScalars


Step = Callable[[Case], State]


def kernel_step(backend: Backend) -> Step:
    """The step under test, on a copy."""

    def step(case: Case) -> State:
        result = clone(case.state)
        with kernels.use(backend):
            kernels.update(result, case.grad, case.scalars, layout=case.layout)
        return result

    return step


def changed(step: Step, /, **scalars: float) -> Step:
    """The step with other hyperparameters than it is given."""
    return lambda case: step(replace(case, scalars=replace(case.scalars, **scalars)))


def nearest_step(case: Case) -> State:
    """The mutant that rounds to nearest. One parameter at offset 0 only."""
    wide, result = wide_after(case), clone(case.state)
    from_fp32(result, wide)
    return result


# ---- bits --------------------------------------------------------------------------------------


def bits(values: Tensor) -> Tensor:
    width = 8 * values.element_size()
    kind = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]
    return values.view(kind).long() & ((1 << width) - 1)


def fp32_of(pattern: Tensor) -> Tensor:
    pattern = pattern & MASK32
    return torch.where(pattern >> 31 == 1, pattern - (1 << 32), pattern).int().view(torch.float32)


def signed(pattern: Tensor, width: int) -> Tensor:
    pattern = pattern & ((1 << width) - 1)
    return torch.where(pattern >> (width - 1) == 1, pattern - (1 << width), pattern)


def random_bits(key: int, count: int) -> Tensor:
    """(count,) the 32 random bits of a parameter's first elements."""
    x = torch.arange(count) ^ (key & MASK32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = x ^ (key >> 32)
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def inside(layout: Layout, numel: int) -> Tensor:
    """(numel,) whether an element belongs to a parameter."""
    result = torch.zeros(numel, dtype=torch.bool)
    for offset, length, _, _ in layout.rows():
        result[offset : offset + length] = True
    return result


def drawn(case: Case) -> Tensor:
    result = torch.zeros(case.grad.numel(), dtype=torch.int64)
    for offset, length, id, _ in case.layout.rows():
        result[offset : offset + length] = random_bits(case.scalars.key(id, 0), length)
    return result


# ---- decoding ----------------------------------------------------------------------------------


def master_of(state: State) -> Tensor:
    """(n,) fp32, finite weights only where they are fp16."""
    if isinstance(state, Fp32State):
        return state.master
    if not isinstance(state, Int8State):
        return fp32_of((bits(state.weight) << 16) + signed(bits(state.low), 16))
    correction = signed(bits(state.correction), 8)
    if state.weight.dtype is torch.bfloat16:
        return fp32_of(((bits(state.weight) << 8) + correction) << 8)
    return _fp16_magnitude((bits(state.weight) & 0x7FFF) * 256 + correction) * torch.where(
        state.weight.signbit(), -1.0, 1.0
    )


def _fp16_magnitude(extended: Tensor) -> Tensor:
    """Of 5 bits of exponent and 18 of fraction."""
    exponent, fraction = extended >> 18, (extended & 0x3FFFF).double()
    normal = (1 + fraction * 2.0**-18) * torch.exp2(exponent.double() - 15)
    return torch.where(exponent == 0, fraction * 2.0**-32, normal).float()


def decoded_code(code: Tensor) -> Tensor:
    """A moment's code as a number, before the block's scale. (n,) float64."""
    return fp32_of((code << (23 - MANTISSA_BITS)) + 0x3F800000).double() - 1.0


def wide_before(state: State) -> Fp32State:
    """What the step decodes. 8-bit moments are as the kernels read them."""
    wide = torch_kernels.to_fp32(state)
    return Fp32State((master_of(state).clone(), wide.exp_avg.clone(), wide.exp_avg_sq.clone()))


def wide_after(case: Case) -> Fp32State:
    """The fp32 state's step from the same decoded values, in plain torch."""
    wide = wide_before(case.state)
    with kernels.use(PLAIN):
        kernels.update(wide, case.grad, case.scalars)
    return wide


# ---- what the bits must be ---------------------------------------------------------------------


def expected_bits(case: Case) -> dict[str, Tensor]:
    """The fields that the contract fixes to the bit, for finite values."""
    wide, random = wide_after(case), drawn(case)
    master = bits(wide.master)
    if not isinstance(case.state, Int8State):
        return {
            "weight": (master + 0x8000 >> 16) & 0xFFFF,
            "low": master & 0xFFFF,
            "exp_avg": bits(wide.exp_avg) + (random & 0xFFFF) >> 16,
            "exp_avg_sq": bits(wide.exp_avg_sq) + (random >> 16) >> 16,
        }
    if case.state.weight.dtype is torch.float16:
        return _expected_fp16(wide.master, random & 0xFF)
    extended = master + (random & 0xFF) >> 8
    return {"weight": (extended + 0x80 >> 8) & 0xFFFF, "correction": extended & 0xFF}


def _expected_fp16(master: Tensor, r8: Tensor) -> dict[str, Tensor]:
    """Of masters of 2^-14 and more: 19 digits kept, 5 rounded with 5 random bits."""
    magnitude = (bits(master) & 0x7FFFFFFF) - (112 << 23)
    extended = magnitude + (r8 >> 3) >> 5
    sign = torch.where(master.signbit(), 0x8000, 0)
    return {"weight": (extended + 0x80 >> 8) | sign, "correction": extended & 0xFF}


def wrong_bits(actual: State, case: Case) -> dict[str, int]:
    """How many elements of each field differ from the definition."""
    expected, checked = expected_bits(case), inside(case.layout, case.grad.numel())
    if actual[0].dtype is torch.float16:
        checked = checked & (wide_after(case).master.abs() >= 2.0**-14)
    counts = {
        name: int(((bits(getattr(actual, name)) != pattern) & checked).sum())
        for name, pattern in expected.items()
    }
    return {name: count for name, count in counts.items() if count}


# ---- what the values must be -------------------------------------------------------------------


def _binade(values: Tensor, least: int) -> Tensor:
    """(n,) exponent of the power of two at or below |values|."""
    return (torch.frexp(values.abs()).exponent.double() - 1).clamp(min=least)


def master_step(state: State, values: Tensor) -> Tensor:
    """The distance of the masters that the format holds, around float64 values."""
    if not isinstance(state, Int8State):
        return torch.zeros_like(values)
    if state.weight.dtype is torch.float16:
        return torch.exp2(_binade(values, -14) - 18)
    return torch.exp2(_binade(values, -126) - 15)


def moment_step(state: State, name: str, values: Tensor, layout: Layout) -> Tensor:
    """The distance of the moments that the format holds, around float64 values."""
    if isinstance(state, Fp32State):
        return torch.zeros_like(values)
    if not isinstance(state, Int8State):
        return torch.exp2(_binade(values, -126) - 7)
    largest = block_largest(values, layout)
    unit = largest / decoded_code(torch.tensor([LARGEST_CODE[name]]))
    t = torch.where(largest > 0, values.abs() / unit, 0.0)
    # Past the code's own step: T / largest, the product and the sum are rounded to fp32.
    return torch.exp2(_binade(1 + t, 0) - MANTISSA_BITS) * unit * 1.0001 + 8 * ULP * values.abs()


def block_largest(values: Tensor, layout: Layout) -> Tensor:
    result = torch.zeros_like(values)
    for offset, length, _, _ in layout.rows():
        for start in range(offset, offset + length, BLOCK):
            end = min(start + BLOCK, offset + length)
            result[start:end] = values[start:end].abs().max()
    return result


def adam64(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """AdamW in float64, and the error that fp32 arithmetic may add to each result.

    The bounds count roundings (u = 2^-24): four of the first moment's terms, six of the second
    moment, three of the weight (1 - lr decay, its product, the sum) and sixteen of its change.
    """
    s, wide = case.scalars, wide_before(case.state)
    p, m, v = (x.double() for x in wide)
    g = case.grad.double() * float(torch.tensor(s.grad_scale))
    new_m = s.beta1 * m + (1 - s.beta1) * g
    new_v = s.beta2 * v + (1 - s.beta2) * g * g
    per_moment = s.lr / (1 - s.beta1**s.step) / ((new_v / (1 - s.beta2**s.step)).sqrt() + s.eps)
    decayed, change = p * (1 - s.lr * s.weight_decay), -per_moment * new_m
    m_error = 4 * ULP * (m.abs() + g.abs())
    p_error = 3 * ULP * decayed.abs() + 16 * ULP * change.abs() + m_error * per_moment
    truth = {"master": decayed + change, "exp_avg": new_m, "exp_avg_sq": new_v}
    return truth, {"master": p_error, "exp_avg": m_error, "exp_avg_sq": 6 * ULP * new_v}


def float64_errors(actual: State, case: Case) -> dict[str, float]:
    """Each field's largest error, in units of what arithmetic and format may add."""
    truth, bounds = adam64(case)
    values, checked = torch_kernels.to_fp32(actual), inside(case.layout, case.grad.numel())
    errors = {}
    for name, exact in truth.items():
        around = exact.abs() + bounds[name]
        if name == "master":
            step = master_step(case.state, around)
        else:
            step = moment_step(case.state, name, around, case.layout)
        error = (getattr(values, name).double() - exact).abs() / (bounds[name] + step + 2.0**-149)
        errors[name] = float(error[checked].max()) if bool(checked.any()) else 0.0
    return errors
