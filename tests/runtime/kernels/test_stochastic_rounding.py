"""The random bits: a function of seed, step, parameter and element, uniform and independent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import AdamScalars, Layout
from offloadtrain.runtime.kernels.codec import random_bits
from tests.runtime.kernels.format_cases import SCALARS, preferred, zero_state
from tests.runtime.kernels.format_cases import random_bits as defined

COUNT = 1 << 16


def drawn(*, seed: int = 1, step: int = 1, parameter: int = 0, count: int = COUNT) -> Tensor:
    """(count,) float64 in [0, 1): the random bits of a parameter's first elements."""
    key = replace(SCALARS, seed=seed, step=step).key(parameter, 0)
    return random_bits(key, torch.arange(count)).double() / 2**32


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


SIX_SIGMA = 6 / math.sqrt(COUNT)


@pytest.mark.parametrize("key", [0, 1, 0x0123456789ABCDEF, 2**64 - 1])
def test_the_generator_is_the_one_defined(key: int) -> None:
    elements = [0, 1, 2, 127, 128, 2**31, 2**32 - 1]
    expected = [defined(key, element) for element in elements]
    assert random_bits(key, torch.tensor(elements)).tolist() == expected


def test_every_bit_is_set_half_of_the_time() -> None:
    key = SCALARS.key(0, 0)
    values = random_bits(key, torch.arange(COUNT))
    for bit in range(32):
        share = float(((values >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 6 * 0.5 / math.sqrt(COUNT), bit


def test_values_are_uniform() -> None:
    counts = torch.histc(drawn(), bins=256, min=0.0, max=1.0)
    expected = COUNT / 256
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 255) < 6 * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    "other",
    [{"step": 2}, {"seed": 2}, {"parameter": 1}, {"step": 2, "seed": 2}, {"parameter": 1000}],
    ids=str,
)
def test_another_key_draws_independent_bits(other: dict[str, int]) -> None:
    a, b = drawn(), drawn(**other)
    assert abs(correlation(a, b)) < SIX_SIGMA
    for shift in (1, 2, 128):  # nor the same sequence from another place
        assert abs(correlation(a[shift:], b[:-shift])) < 1.01 * SIX_SIGMA


def test_neighbours_are_independent() -> None:
    a = drawn()
    for shift in (1, 2, 16, 128, 2048):
        assert abs(correlation(a[shift:], a[:-shift])) < 1.05 * SIX_SIGMA


def test_the_two_moments_draw_independent_bits() -> None:
    values = random_bits(SCALARS.key(0, 0), torch.arange(COUNT))
    low, high = (values & 0xFFFF).double(), (values >> 16).double()
    assert abs(correlation(low, high)) < SIX_SIGMA


def test_elements_beyond_32_bits_have_a_key_of_their_own() -> None:
    assert SCALARS.key(0, 2**32 - 1) == SCALARS.key(0, 0)
    keys = {SCALARS.key(0, window << 32) for window in range(4)}
    assert len(keys) == 4


def test_keys_of_steps_and_parameters_do_not_meet() -> None:
    keys = {
        AdamScalars(0, 0, 0, 0, 0, step, seed=seed).key(parameter, 0)
        for seed in (0, 1, -1, 2**63)
        for step in range(1, 60)
        for parameter in range(60)
    }
    assert len(keys) == 4 * 59 * 60


@pytest.mark.parametrize("name", ["split16", "int8"])
def test_rounding_is_unbiased(name: str) -> None:
    """The mean of what is stored over many draws of one and the same value is that value."""
    numel, draws = 2048, 400
    source = torch.Generator().manual_seed(0)
    grad = torch.empty(numel).uniform_(0.5, 2.0, generator=source)
    total, exact = torch.zeros(2, numel, dtype=torch.float64), torch.zeros(2, numel).double()
    exact[0], exact[1] = 0.1 * grad.double(), 0.05 * grad.double().square()
    for seed in range(draws):
        state = zero_state(name, numel, torch.bfloat16)
        scalars = replace(SCALARS, step=1, seed=seed, grad_scale=1.0)
        with kernels.use(preferred()):
            kernels.update(state, grad, scalars, layout=Layout.of_one(numel))
        values = kernels.to_fp32(state)
        total[0] += values.exp_avg
        total[1] += values.exp_avg_sq
    error = total / draws - exact
    # A code is at most 1/8 (int8) or 1/128 (bf16) of its value away, uniformly.
    place = (1 / 8 if name == "int8" else 1 / 128) * exact
    sigma = place / math.sqrt(12 * draws)
    largest = torch.tensor([0.2, 0.2], dtype=torch.float64)
    floor = largest.unsqueeze(1) * 1e-4
    assert bool((error.abs() < 6.5 * sigma + floor).all())
    assert bool((error.mean(1).abs() < 1e-4 * exact.mean(1) + 6 * sigma.mean(1) / 45).all())


def test_rounding_to_nearest_would_be_biased() -> None:
    value = torch.full((1,), 1.0 + 2.0**-10)
    assert float(value.bfloat16()) != float(value)
    draws = torch.cat([kernels_round(value, seed) for seed in range(4000)])
    assert abs(float(draws.double().mean()) - float(value)) < 6 * 2.0**-7 / math.sqrt(4000)


def kernels_round(value: Tensor, seed: int) -> Tensor:
    """A bf16 exp_avg after a step with beta1 = 0: the gradient itself, rounded."""
    state = zero_state("split16", 1, torch.bfloat16)
    scalars = AdamScalars(1e-3, 0.0, 0.9, 1e-8, 0.0, step=1, seed=seed)
    kernels.update(state, value, scalars, layout=Layout.of_one(1))
    assert isinstance(state, kernels.Split16State)
    return state.exp_avg.float()
