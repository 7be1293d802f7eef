"""NaN, infinities, denormals and huge gradients in every format and backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, Int8State, Layout
from tests import torch_kernels
from tests.runtime.kernels import format_reference as reference
from tests.runtime.kernels.format_cases import (
    NARROW,
    SCALARS,
    differing,
    gradient,
    ids_of,
    random_state,
)
from tests.runtime.kernels.format_cases import zero_state as zeros
from tests.runtime.kernels.format_reference import PLAIN, Case, bits, kernel_step
from tests.runtime.kernels.kernel_cases import BACKENDS, DTYPES, each_backend

EVERY = [("fp32", torch.float32), *NARROW]
each_state = pytest.mark.parametrize(("name", "dtype"), EVERY, ids=["fp32", *ids_of])
NUMEL = 4 * 128
PLACES = (0, 127, 130, 301)
NANS = {
    torch.float32: (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FFF8000),
    torch.bfloat16: (0x7FFF, 0xFFFF, 0x7F81, 0xFFC0),
    torch.float16: (0x7FFF, 0xFFFF, 0x7C01, 0xFE00),
}


def of_pattern(pattern: int, dtype: torch.dtype) -> Tensor:
    width = 32 if dtype is torch.float32 else 16
    value = pattern - (1 << width) if pattern >> (width - 1) else pattern
    kind = torch.int32 if width == 32 else torch.int16
    return torch.tensor([value], dtype=kind).view(dtype)


def plain_case(name: str, dtype: torch.dtype, grad: torch.dtype) -> Case:
    state, layout = random_state(name, NUMEL, dtype), Layout.of_one(NUMEL, 4)
    return Case(state, gradient(NUMEL, grad), layout, SCALARS)


def poisoned(case: Case, value: Tensor) -> Case:
    grad = case.grad.clone()
    grad[list(PLACES)] = value.expand(len(PLACES))
    return replace(case, grad=grad)


def unpoisoned() -> Tensor:
    result = torch.ones(NUMEL, dtype=torch.bool)
    result[list(PLACES)] = False
    return result


def check_neighbours(case: Case, bad: Case, backend: Backend) -> None:
    """Elements beside the poisoned ones are what they are without poison."""
    a, b = (kernel_step(backend)(x) for x in (case, bad))
    blocks = torch.tensor([False, False, False, True]).repeat_interleave(128)
    for name, x, y in zip(a.names(), a, b, strict=True):
        if x.numel() != NUMEL:
            assert float(x[3]) == float(y[3]), name
            continue
        moment = isinstance(a, Int8State) and name.startswith("exp_avg")
        unaffected = blocks if moment else unpoisoned()
        assert torch.equal(bits(x)[unaffected], bits(y)[unaffected]), name


@each_backend
@each_state
def test_nan_stays_nan(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for grad, pattern in ((kind, bits_of) for kind in DTYPES for bits_of in NANS[kind]):
        case = plain_case(name, dtype, grad)
        bad = poisoned(case, of_pattern(pattern, grad))
        assert int(bad.grad.isnan().sum()) == len(PLACES)
        result = kernel_step(backend)(bad)
        assert differing(result, kernel_step(PLAIN)(bad)) == {}, hex(pattern)
        for _ in range(2):
            wide = torch_kernels.to_fp32(result)
            assert all(bool(x[list(PLACES)].isnan().all()) for x in wide), hex(pattern)
            assert bool(result[0][list(PLACES)].isnan().all()), hex(pattern)
            result = kernel_step(backend)(replace(case, state=result))
        check_neighbours(case, bad, backend)


EXTREME = [float("inf"), -float("inf"), 3e38, -3e38, 1e25, 1e-45, -1e-39]


@each_backend
@each_state
def test_extreme_gradients(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for value in EXTREME:
        check_extreme(value, plain_case(name, dtype, torch.float32), backend)


def check_extreme(value: float, case: Case, backend: Backend) -> None:
    bad = poisoned(case, torch.tensor([value]))
    actual, expected = kernel_step(backend)(bad), kernel_step(PLAIN)(bad)
    assert differing(actual, expected) == {}
    if abs(value) > 1e-30:
        check_neighbours(case, bad, backend)
    wide, exact = torch_kernels.to_fp32(actual), reference.wide_after(bad)
    assert torch.equal(wide.master.isnan(), exact.master.isnan())
    if isinstance(actual, Int8State):
        return
    for x, y in zip(wide, exact, strict=True):
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf())


@each_backend
def test_a_bad_moment_takes_its_block(backend: Backend) -> None:
    """3e38 overflows the second moment alone."""
    for dtype, value in product(DTYPES[1:], (float("nan"), float("inf"), 3e38)):
        check_bad_moment(value, dtype, backend)


def check_bad_moment(value: float, dtype: torch.dtype, backend: Backend) -> None:
    case = plain_case("int8", dtype, torch.float32)
    grad = case.grad.clone()
    grad[200] = value
    case = replace(case, grad=grad, scalars=replace(SCALARS, grad_scale=1.0))
    wide = torch_kernels.to_fp32(kernel_step(backend)(case))
    for name in ("exp_avg", "exp_avg_sq"):
        bad = getattr(wide, name).isnan().view(4, 128)
        takes_block = name == "exp_avg_sq" or value != 3e38
        assert bad.all(1).tolist() == [False, takes_block, False, False], name
        assert bad.any(1).tolist() == bad.all(1).tolist()


def graded_case(name: str, dtype: torch.dtype, size: float) -> Case:
    """A first step on weights of one, gradients of size / 100 to size."""
    state = zeros(name, NUMEL, dtype)
    kernels.set_master(state, torch.ones(NUMEL))
    grad = gradient(NUMEL, torch.float32).sign() * size * torch.linspace(0.01, 1, NUMEL)
    return Case(state, grad, Layout.of_one(NUMEL), replace(SCALARS, step=1, grad_scale=1.0))


SIZES = [1e-44, 1e-30, 1e-22, 1e-19, 1e-16, 1e-14, 1e-10, 1e18]


@each_backend
@each_state
def test_moments_near_the_ends_of_fp32(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Blocks whose largest second moment is denormal, or whose reciprocal overflows."""
    for size in SIZES:
        check_moments(size, graded_case(name, dtype, size), backend)


def check_moments(size: float, case: Case, backend: Backend) -> None:
    for step in range(1, 5):
        case = replace(case, scalars=replace(case.scalars, step=step))
        result = kernel_step(backend)(case)
        assert differing(result, kernel_step(PLAIN)(case)) == {}, step
        wide = torch_kernels.to_fp32(result)
        assert all(bool(x.isfinite().all()) for x in wide), step
        assert bool((wide.exp_avg_sq >= 0).all())
        errors = reference.float64_errors(result, case)
        assert errors["master"] <= 1.0, errors
        if size >= 1e-10:  # below, products are denormal, and 8-bit second moments have a floor
            assert max(errors.values()) <= 1.0, errors
        case = replace(case, state=result)


@each_state
def test_the_floor_of_the_second_moment(name: str, dtype: torch.dtype) -> None:
    """Its root is true to 1/16 (a distance of 1/8) or to 1e-17, which no eps in use can notice."""
    for size in (1e-22, 1e-19, 1e-17, 1e-16, 1e-14, 1e-12):
        case = graded_case(name, dtype, size)
        exact = reference.wide_after(case).exp_avg_sq.double().sqrt()
        root = torch_kernels.to_fp32(kernel_step(BACKENDS[0])(case)).exp_avg_sq.double().sqrt()
        assert bool(((root - exact).abs() <= exact / 15 + 1e-17).all()), size


@each_backend
@each_state
def test_bad_masters(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """NaN of every payload, infinities and the largest numbers as weights."""
    case = plain_case(name, dtype, torch.bfloat16)
    values = torch.cat([of_pattern(p, torch.float32) for p in NANS[torch.float32]])
    values = torch.cat([values, torch.tensor([float("inf"), -float("inf"), 3.4e38, -65519.0])])
    masters = values.repeat(-(-NUMEL // values.numel()))[:NUMEL].clone()
    kernels.set_master(case.state, masters)
    result = kernel_step(backend)(case)
    assert differing(result, kernel_step(PLAIN)(case)) == {}
    after = torch_kernels.decoded_master(result)
    assert torch.equal(after.isnan(), masters.isnan())
    assert torch.equal(result[0].isnan() | (name == "fp32"), masters.isnan() | (name == "fp32"))
    infinite = masters.isinf()
    assert torch.equal(after[infinite], masters[infinite])


@each_backend
def test_fp16_weights_at_their_ends(backend: Backend) -> None:
    """Denormal halves, and masters around the tie with infinity."""
    ends = [65503.9, 65519.9, 65520.0, 65535.9, 65536.0, 1e30, 6.1e-5, 6e-8, 3e-8, 2e-8, 1e-9, 0.0]
    masters = torch.tensor(ends + [-x for x in ends]).repeat(16)
    state = zeros("int8", masters.numel(), torch.float16)
    kernels.set_master(state, masters)
    scalars = replace(SCALARS, lr=1e-12, weight_decay=0.0)
    grad = torch.ones(masters.numel())
    case = Case(state, grad, Layout.of_one(masters.numel()), scalars)
    result = kernel_step(backend)(case)
    assert differing(result, kernel_step(PLAIN)(case)) == {}
    exact, stored = (
        reference.wide_after(case).master.double(),
        torch_kernels.decoded_master(result).double(),
    )
    finite = exact.abs() < 65536.0
    assert torch.equal(stored[~finite], exact[~finite].sign() * float("inf"))
    error = (stored - exact).abs()[finite] / reference.master_step(state, exact[finite])
    assert float(error.max()) <= 1.0
    assert not bool(stored.isnan().any())


@each_backend
@pytest.mark.parametrize(("name", "dtype"), NARROW, ids=ids_of)
def test_every_code_with_every_upper_half_of_a_master(
    name: str, dtype: torch.dtype, backend: Backend
) -> None:
    """Denormals, -0.0, NaN and infinities among them, and carries from mantissa to exponent."""
    numbers = torch.arange(1 << 16)
    lows = torch.tensor([0, 1, 0x7F, 0x7FFF, 0x8000, 0xFF80, 0xFFFF])
    state = zeros(name, numbers.numel(), dtype)
    kernels.set_master(state, reference.fp32_of(numbers << 16 | lows[numbers % 7]))
    for number, field in enumerate((state.exp_avg, state.exp_avg_sq)):
        mixed = numbers * (40503 + 2 * number) >> 3 & (0x7FFF if number else 0xFFFF)
        field.copy_(mixed.to(torch.uint8 if name == "int8" else torch.int16).view(field.dtype))
    if isinstance(state, Int8State):
        for scale in state.scales:
            scale.copy_(2.0 ** (torch.arange(scale.numel()) % 60 - 45))
            scale[::100] = torch.nan
    grad = torch.tensor([1e-3, -2.0, 0.0, -0.0, *EXTREME, torch.nan]).repeat(6000)[: 1 << 16]
    case = Case(state, grad, Layout.of_one(1 << 16, 4), replace(SCALARS, grad_scale=1.0))
    assert differing(kernel_step(backend)(case), kernel_step(PLAIN)(case)) == {}
