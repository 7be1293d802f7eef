"""Stochastic rounding as seen from outside: unbiased, independent, a function of its key alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Layout
from offloadtrain.runtime.kernels.codec import random_bits
from tests import torch_kernels
from tests.runtime.kernels import format_reference as reference
from tests.runtime.kernels.format_cases import NARROW, ids_of, zero_state
from tests.runtime.kernels.format_reference import Case, Step, kernel_step
from tests.runtime.kernels.kernel_cases import BACKENDS

COUNT = 1 << 15
SIGMAS = 5.0
KERNEL = kernel_step(BACKENDS[0])
# beta1 = 0: the first moment is the gradient itself. No decay: the master moves by lr alone.
SCALARS = AdamScalars(lr=1e-3, beta1=0.0, beta2=0.75, eps=1e-8, weight_decay=0.0, step=1, seed=21)
each_state = pytest.mark.parametrize(("name", "dtype"), NARROW, ids=ids_of)


def constant_case(name: str, dtype: torch.dtype, scalars: AdamScalars, id: int = 0) -> Case:
    """One gradient for all but the first of each block, which is the block's largest by far."""
    grad = torch.full((COUNT,), 1.00437)
    grad[::128] = 37.5
    state = zero_state(name, COUNT, dtype)
    kernels.set_master(state, torch.ones(COUNT))
    return Case(state, grad, Layout.of_one(COUNT, id), scalars)


def rounded_up(name: str, dtype: torch.dtype, id: int = 0, **scalars: int) -> dict[str, Tensor]:
    """Of each rounded field, (n,) 1.0 where the greater of the two neighbours was taken."""
    case = constant_case(name, dtype, replace(SCALARS, **scalars), id)
    wide, result = torch_kernels.to_fp32(KERNEL(case)), {}
    fields = ("master", "exp_avg", "exp_avg_sq") if name == "int8" else ("exp_avg", "exp_avg_sq")
    for field in fields:
        values = getattr(wide, field).view(-1, 128)[:, 1:].reshape(-1)
        assert values.unique().numel() <= 2, field
        result[field] = (values > values.min()).double()
    return result


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent draws give."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * math.sqrt(a.numel())


@each_state
def test_fields_of_an_element_are_independent(name: str, dtype: torch.dtype) -> None:
    ups = list(rounded_up(name, dtype).values())
    assert all(0.01 < float(x.mean()) < 0.99 for x in ups)
    for i, a in enumerate(ups):
        for b in ups[:i]:
            assert abs(correlation(a, b)) < SIGMAS


@each_state
def test_another_key_is_independent(name: str, dtype: torch.dtype) -> None:
    ups = rounded_up(name, dtype)
    for other in ({"step": 2}, {"seed": 22}, {"id": 1}, {"id": 2**33}):
        other_ups = rounded_up(name, dtype, **other)
        for field, a in ups.items():
            b = other_ups[field]
            if field == "master" and other == {"step": 2}:
                continue  # another bias correction, another master
            assert not torch.equal(a, b), other
            assert abs(correlation(a, b)) < SIGMAS, other
            for shift in (1, 127, 16 * 127):
                assert abs(correlation(a[shift:], b[:-shift])) < SIGMAS, other


@each_state
def test_neighbours_are_independent(name: str, dtype: torch.dtype) -> None:
    for a in rounded_up(name, dtype).values():
        for shift in (1, 2, 3, 4, 8, 16, 32, 64, 127, 8 * 127):
            assert abs(correlation(a[shift:], a[:-shift])) < SIGMAS, shift


def key_of(seed: int, step: int, parameter: int, element: int) -> int:
    return replace(SCALARS, seed=seed, step=step).key(parameter, element)


def test_keys() -> None:
    base = key_of(1, 1, 1, 5)
    assert 0 <= base < 1 << 64
    assert key_of(1, 1, 1, 2**32 - 1) == base == key_of(2**64 + 1, 1, 1, 0)
    neighbours = [(2, 1, 1, 5), (1, 2, 1, 5), (1, 1, 2, 5), (1, 1, 1, 2**32), (1, 1, 0, 2**32)]
    swapped = [(1, 2, 3, 0), (2, 1, 3, 0), (3, 2, 1, 0), (1, 3, 2, 0), (0, 2, 2, 0), (2, 2, 0, 0)]
    keys = {key_of(*x) for x in neighbours + swapped}
    assert len(keys | {base}) == len(neighbours + swapped) + 1
    windows = {key_of(1, 1, p, w << 32) for p in range(50) for w in range(50)}
    assert len(windows) == 2500


def test_the_generator_is_the_one_defined() -> None:
    for key in (0, 1, 0x0123456789ABCDEF, 2**64 - 1):
        expected = reference.random_bits(key, 1 << 12)
        assert torch.equal(random_bits(key, torch.arange(1 << 12)), expected), key


def test_windows_beyond_2_to_the_32_draw_other_bits() -> None:
    a, b = (reference.random_bits(key_of(1, 1, 0, x), 1 << 16) for x in (0, 2**32))
    assert abs(correlation(a.double(), b.double())) < SIGMAS
    assert int((a == b).sum()) <= 1


# ---- bias --------------------------------------------------------------------------------------


def varied_case(name: str, dtype: torch.dtype, numel: int = 2048) -> Case:
    """Gradients over two decades and both signs, masters likewise."""
    source = torch.Generator().manual_seed(3)
    sizes = 10 ** torch.empty(2, numel).uniform_(-2, 0, generator=source)
    grad, master = sizes * torch.randn(2, numel, generator=source)
    state = zero_state(name, numel, dtype)
    kernels.set_master(state, master)
    return Case(state, grad.clone(), Layout.of_one(numel), SCALARS)


def steps_of(case: Case, field: str) -> Tensor:
    """(n,) the distance of the two values that an element may be rounded to."""
    exact = getattr(reference.wide_after(case), field).double()
    if field == "master":
        return reference.master_step(case.state, exact)
    return reference.moment_step(case.state, field, exact, case.layout)


def bias(step: Step, case: Case, draws: int = 200) -> dict[str, float]:
    """Of each field the mean rounding error over seeds, see `sigmas`."""
    exact = reference.wide_after(case)
    totals = {field: torch.zeros(case.grad.numel()).double() for field in exact.names()}
    for seed in range(draws):
        result = torch_kernels.to_fp32(
            step(replace(case, scalars=replace(case.scalars, seed=seed)))
        )
        for field, total in totals.items():
            total += getattr(result, field).double() - getattr(exact, field).double()
    return {
        field: sigmas(total, steps_of(case, field), getattr(exact, field), draws)
        for field, total in totals.items()
    }


def sigmas(total: Tensor, steps: Tensor, exact: Tensor, draws: int) -> float:
    """The greatest of three means in standard deviations: the worst element's, all elements',
    and all elements' away from zero.

    One draw deviates by at most half the distance of its two values. 12 random bits alone leave a
    bias of 2^-12 of it, for which twice that is allowed.
    """
    if not bool((steps > 0).all()):  # a field that is held exactly
        return math.inf if bool(total.any()) else 0.0
    each = total / draws / steps
    all_of = torch.stack([each.mean(), (each * exact.sign()).mean()])
    deviation, allowed = 0.5 / math.sqrt(draws), 2.0**-11
    worst = (float(each.abs().max()) - allowed) / deviation
    mean = (float(all_of.abs().max()) - allowed) / (deviation / math.sqrt(total.numel()))
    return max(worst, mean)


@each_state
def test_rounding_is_unbiased(name: str, dtype: torch.dtype) -> None:
    result = bias(KERNEL, varied_case(name, dtype))
    assert max(result.values()) < SIGMAS, result


@each_state
def test_rounding_to_nearest_is_told_apart(name: str, dtype: torch.dtype) -> None:
    result = bias(reference.nearest_step, varied_case(name, dtype))
    fields = ("master", "exp_avg", "exp_avg_sq") if name == "int8" else ("exp_avg", "exp_avg_sq")
    assert all(result[field] > SIGMAS for field in fields), result


@each_state
def test_rounding_is_unbiased_over_steps(name: str, dtype: torch.dtype) -> None:
    """The step's number alone makes the bits differ, as in training."""
    case = varied_case(name, dtype)
    total = torch.zeros(case.grad.numel()).double()
    draws = 200
    for step in range(1, draws + 1):  # beta1 = 0: no step changes the exact first moment
        result = KERNEL(replace(case, scalars=replace(case.scalars, step=step)))
        total += torch_kernels.to_fp32(result).exp_avg.double() - case.grad.double()
    assert sigmas(total, steps_of(case, "exp_avg"), case.grad, draws) < SIGMAS
