"""The host's kernels of a rule for matrices: torch's bits, in place too, on every backend."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, BlendScalars, State, codec
from tests import torch_kernels
from tests.runtime.kernels.format_cases import clone, gradient, layout_of, special_gradient
from tests.runtime.kernels.kernel_cases import (
    BACKENDS,
    DTYPES,
    different_elements,
    each_backend,
    threaded,
)
from tests.runtime.kernels.test_adam import needs_fma_in_torch

PLAIN = torch_kernels.LISTED
# In place, fp32 memory is worked on in waves of 16,384 elements and more; 70,003 are four of them.
NUMELS = [128, 70_003, 1, 20_000]
LAYOUT, NUMEL = layout_of(NUMELS, gap=1)
RATES, DECAY = [0.02, 0.3, 0.0, 1e-4], 1 - 0.02 * 0.05
SCALARS = BlendScalars(momentum=0.95, nesterov=True, step=3, grad_scale=0.37, seed=11)
each_state = pytest.mark.parametrize("name", ["fp32", "split16"])


def state_of(name: str) -> State:
    """Masters, and an average from earlier steps."""
    master, average = gradient(NUMEL, torch.float32, 2), gradient(NUMEL, torch.float32, 3)
    if name == "fp32":
        return kernels.Fp32State((master, average))
    weight, low = codec.split(master)
    return kernels.Split16State((weight, low, average.bfloat16()))


def front_of(memory: Tensor, dtype: torch.dtype, numel: int = NUMEL) -> Tensor:
    """As many elements of another type that begin where the memory does."""
    return memory.view(torch.uint8).view(dtype)[:numel]


def blended(
    name: str, grad: Tensor, backend: Backend, *, in_place: bool, s: BlendScalars = SCALARS
) -> tuple[State, Tensor]:
    """The state after one call, and the direction."""
    state, grad_copy = state_of(name), grad.clone()
    target = torch.full((NUMEL,), torch.nan, dtype=torch.bfloat16)
    target = front_of(grad_copy, torch.bfloat16) if in_place else target
    with kernels.use(backend):
        kernels.blend(state, grad_copy, target, LAYOUT, s)
    return state, torch.cat([target[lo : lo + n].clone() for lo, n, _, _ in LAYOUT.rows()])


def subtracted(
    name: str, dtype: torch.dtype | None, backend: Backend, *, in_place: bool
) -> tuple[State, Tensor]:
    """The state after one call, and its working weights."""
    state, update = state_of(name), gradient(NUMEL, torch.bfloat16, 4)
    if dtype is None:
        working = None
    elif in_place:
        working = torch.full((NUMEL,), torch.nan, dtype=dtype)
        front_of(working, torch.bfloat16).copy_(update)
        update = front_of(working, torch.bfloat16)
    else:
        working = torch.full((NUMEL,), torch.nan, dtype=dtype)
    with kernels.use(backend):
        kernels.subtract(state, update, working, LAYOUT, decay=DECAY, rates=RATES)
    return state, torch.empty(0) if working is None else working


def assert_equal(actual: tuple[State, Tensor], expected: tuple[State, Tensor]) -> None:
    for x, y in zip((*actual[0], actual[1]), (*expected[0], expected[1]), strict=True):
        if x.dtype is torch.int16:
            assert torch.equal(x, y)
        else:
            assert different_elements(x, y) == 0


@needs_fma_in_torch
def test_the_average_and_the_direction_are_those_of_torchs_lerp() -> None:
    grad = gradient(NUMEL, torch.float32)
    owned = torch.cat([torch.arange(lo, lo + n) for lo, n, _, _ in LAYOUT.rows()])
    for momentum, nesterov in product((0.95, 0.3, 0.0, 1.0), (True, False)):
        s = BlendScalars(momentum=momentum, nesterov=nesterov, step=1)
        state, direction = blended("fp32", grad, BACKENDS[0], in_place=False, s=s)
        _, average = state_of("fp32")
        average.lerp_(grad, 1 - momentum)
        ahead = grad.lerp(average, momentum) if nesterov else average
        assert torch.equal(state[1][owned], average[owned]), s
        assert torch.equal(direction, ahead[owned].bfloat16()), s


@needs_fma_in_torch
def test_masters_are_those_of_torchs_add() -> None:
    state, _ = subtracted("fp32", None, BACKENDS[0], in_place=False)
    (master, _), update = state_of("fp32"), gradient(NUMEL, torch.bfloat16, 4)
    for (lo, n, _, _), rate in zip(LAYOUT.rows(), RATES, strict=True):
        part = slice(lo, lo + n)
        expected = master[part].mul_(DECAY).add_(update[part], alpha=-rate)
        assert torch.equal(state[0][part], expected)


@pytest.mark.slow
@each_backend
@each_state
def test_backends_and_threads_agree_on_averages(name: str, backend: Backend) -> None:
    for dtype in DTYPES:
        grad = gradient(NUMEL, dtype)
        expected = blended(name, grad, PLAIN, in_place=False)
        for used, in_place in product(threaded(backend), (False, True)):
            assert_equal(blended(name, grad, used, in_place=in_place), expected)


@pytest.mark.slow
@each_backend
@each_state
def test_values_that_are_no_numbers_stay_what_they_are(name: str, backend: Backend) -> None:
    for dtype in DTYPES:
        grad = special_gradient(NUMEL, dtype)
        expected = blended(name, grad, PLAIN, in_place=False)
        assert bool(expected[1].isnan().any()) and bool(expected[1].isfinite().any())
        assert_equal(blended(name, grad, backend, in_place=False), expected)


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize(
    ("name", "dtype"), [("split16", None), ("fp32", None), *(("fp32", dtype) for dtype in DTYPES)]
)
def test_backends_and_threads_agree_on_masters(
    name: str, dtype: torch.dtype | None, backend: Backend
) -> None:
    expected = subtracted(name, dtype, PLAIN, in_place=False)
    for used, in_place in product(threaded(backend), (False, True)):
        assert_equal(subtracted(name, dtype, used, in_place=in_place), expected)
    if dtype is not None:
        gaps = torch.ones(NUMEL, dtype=torch.bool)
        for lo, n, _, _ in LAYOUT.rows():
            gaps[lo : lo + n] = False
        assert not expected[1][gaps].any() and bool(gaps.any())


@each_state
def test_what_is_no_parameters_stays(name: str) -> None:
    before, (after, _) = (
        state_of(name),
        blended(name, torch.ones(NUMEL), BACKENDS[0], in_place=True),
    )
    gap = slice(NUMELS[0], LAYOUT.rows()[1][0])
    assert all(torch.equal(x[gap], y[gap]) for x, y in zip(before, after, strict=True))
    assert not torch.equal(before[-1], after[-1])


def test_operands_that_are_refused() -> None:
    state, grad = state_of("fp32"), torch.ones(NUMEL)
    target = torch.zeros(NUMEL, dtype=torch.bfloat16)
    shifted = front_of(grad.view(-1)[64:], torch.bfloat16, NUMEL)
    with pytest.raises(ValueError, match="grad and target overlap"):
        kernels.blend(state, grad, shifted, LAYOUT, SCALARS)
    with pytest.raises(TypeError, match="target must be bfloat16"):
        kernels.blend(state, grad, target.float(), LAYOUT, SCALARS)
    with pytest.raises(ValueError, match="the layout ends at element"):
        kernels.blend(state, grad[:100], target[:100], LAYOUT, SCALARS)
    with pytest.raises(ValueError, match="1 rates for 4 parameters"):
        kernels.subtract(state, target, None, LAYOUT, decay=1.0, rates=[1.0])
    with pytest.raises(TypeError, match="its own working weight"):
        kernels.subtract(
            state_of("split16"), target, target.clone(), LAYOUT, decay=1.0, rates=RATES
        )
    with pytest.raises(TypeError, match="must be Fp32State or Split16State"):
        kernels.blend(kernels.Int8State(state), grad, target, LAYOUT, SCALARS)
    assert torch.equal(clone(state)[1], state_of("fp32")[1])
