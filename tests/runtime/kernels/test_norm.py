"""The norm: one definition, [Note: The norm], to the bit on every backend."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, on_device
from tests.runtime.kernels.kernel_cases import DTYPES, LENGTHS, each_backend, random_state, threaded

SEGMENT = 2048


def reference(values: Tensor) -> float:
    """The definition, written as such."""
    squares = values.double().square()
    squares = torch.nn.functional.pad(squares, (0, -values.numel() % SEGMENT)).view(-1, SEGMENT)
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    total = 0.0
    for value in squares.flatten().tolist():
        total += value
    return total


def gradient(numel: int, dtype: torch.dtype) -> Tensor:
    return random_state(numel, dtype, None, seed=numel).grad


def squares_of(flat: Tensor, layout: kernels.Layout) -> list[float]:
    squares = torch.full((layout.last_id + 1,), -1.0, dtype=torch.float64)
    kernels.sum_squares_many(flat, layout, squares)
    return squares.tolist()


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares(dtype: torch.dtype, backend: Backend) -> None:
    with kernels.use(backend):
        for numel in LENGTHS:
            values = gradient(numel, dtype)
            assert kernels.sum_squares(values) == reference(values), numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_adds_in_its_own_order(dtype: torch.dtype) -> None:
    """Its norm agrees with the definition to 1e-14; shown with torch's kernels of the CPU."""
    gradients = [(number, gradient(numel, dtype)) for number, numel in enumerate(LENGTHS)]
    expected = [reference(values) for _, values in gradients]
    squares = torch.full((len(gradients),), -1.0, dtype=torch.float64)
    on_device.sum_squares_each(gradients, squares)
    assert squares.tolist() == pytest.approx(expected, rel=2e-14)
    assert squares.sum().sqrt().item() == pytest.approx(math.sqrt(math.fsum(expected)), rel=1e-14)
    for number, values in gradients:
        layout = kernels.Layout([0], [values.numel()], [number])
        on_device.sum_squares(values, layout, squares)
    assert squares.tolist() == pytest.approx(expected, rel=2e-14)


@each_backend
def test_parameters_of_one_bucket(backend: Backend) -> None:
    flat = gradient(300_007, torch.bfloat16)
    numels = [1, 4096, 2049, 0, 100_003, 31, 150_000]
    offsets = [0, 128, 4992, 7168, 7168, 119_936, 130_048]
    numbers = [3, 0, 6, 2, 5, 1, 4]  # the order of the model is not that of the bucket
    layout = kernels.Layout(offsets, numels, numbers)
    sums = {
        number: reference(flat[offset : offset + numel])
        for number, offset, numel in zip(numbers, offsets, numels, strict=True)
    }
    expected = [sums[number] for number in range(7)]
    for chosen in threaded(backend):
        with kernels.use(chosen):
            assert squares_of(flat, layout) == expected, chosen


@each_backend
def test_one_bad_value_shows(backend: Backend) -> None:
    for dtype, bad in product(DTYPES, (math.inf, -math.inf, math.nan)):
        values = gradient(5001, dtype)
        values[5000] = bad
        with kernels.use(backend):
            assert not math.isfinite(kernels.sum_squares(values)), (dtype, bad)


@each_backend
def test_the_largest_fp32_values_do_not_overflow(backend: Backend) -> None:
    values = torch.full((4099,), torch.finfo(torch.float32).max)
    with kernels.use(backend):
        assert kernels.sum_squares(values) == reference(values) < math.inf


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_last_microbatch_is_squared_as_it_is_added(
    dtype: torch.dtype, backend: Backend
) -> None:
    numels = [1, 4097, 0, 70_001]
    layout = kernels.Layout([0, 128, 4352, 4352], numels, range(4))
    total, grad = gradient(80_000, torch.float32), gradient(80_000, dtype)
    for first in (False, True):
        for chosen in threaded(backend):
            fused, apart = total.clone(), total.clone()
            with kernels.use(chosen):
                squares = torch.zeros(4, dtype=torch.float64)
                kernels.accumulate_squares(fused, grad, first, layout, squares)
                kernels.accumulate(apart, grad, first)
                assert squares.tolist() == squares_of(apart, layout), chosen
            for offset, numel, _, _ in layout.rows():
                piece = slice(offset, offset + numel)
                assert torch.equal(fused[piece], apart[piece])
            assert torch.equal(fused[74_353:], total[74_353:])


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_that_lie_apart(dtype: torch.dtype, backend: Backend) -> None:
    """As autograd leaves them: the bits of one flat buffer, and no other element written; also of
    so few elements that one thread takes them all."""
    ids = [3, 0, 5, 1, 4]
    for chosen, last in product(threaded(backend), (100_003, 50_003)):
        values = [gradient(numel, dtype) for numel in (1, 4096, 2049, last, 31)]
        squares = torch.full((6,), -1.0, dtype=torch.float64)
        with kernels.use(chosen):
            kernels.sum_squares_each(list(zip(ids, values, strict=True)), squares)
        expected = {id: reference(item) for id, item in zip(ids, values, strict=True)} | {2: -1.0}
        assert squares.tolist() == [expected[id] for id in range(6)], chosen


def test_what_lies_apart_is_checked() -> None:
    squares, values = torch.zeros(2, dtype=torch.float64), gradient(64, torch.bfloat16)
    with pytest.raises(ValueError, match="2 elements, none at 2"):
        kernels.sum_squares_each([(2, values)], squares)
    with pytest.raises(TypeError, match=r"values must be torch\.bfloat16"):
        kernels.sum_squares_each([(0, values), (1, values.float())], squares)
