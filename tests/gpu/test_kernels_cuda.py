"""The kernels for GPU memory on a GPU: the host's values, to the rounding of fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Fp32State, Scalars, on_device
from offloadtrain.runtime.kernels.scalars import (
    AdagradScalars,
    AdamScalars,
    LionScalars,
    MomentumScalars,
    SgdScalars,
)
from offloadtrain.runtime.kernels.state import STATES
from tests.gpu.precision import DEVICE, HAS_BF16, HAS_GPU
from tests.runtime.kernels import format_cases, test_matrices, test_on_device_narrow

pytestmark = pytest.mark.gpu

NUMEL = 70_016
COMMON: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "step": 3, "grad_scale": 0.5}
ADAMW = AdamScalars(beta1=0.9, beta2=0.95, eps=1e-8, decoupled=True, **COMMON)
RULES: dict[str, tuple[Scalars, int]] = {
    "adamw": (ADAMW, 2),
    "adam": (replace(ADAMW, decoupled=False), 2),
    "lion": (LionScalars(beta1=0.9, beta2=0.99, **COMMON), 1),
    "sgd": (SgdScalars(**COMMON), 0),
    "momentum": (MomentumScalars(momentum=0.9, dampening=0.0, nesterov=True, **COMMON), 1),
    "momentum, off": (MomentumScalars(momentum=0.0, dampening=0.0, nesterov=False, **COMMON), 1),
    "adagrad": (AdagradScalars(lr_decay=0.1, eps=1e-8, **COMMON), 1),
}
"""Scalars, and the number of moments."""


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    scalars, moments = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(NUMEL, generator=generator)
    state = [masters, *(torch.rand(NUMEL, generator=generator) for _ in range(moments))]
    grad = torch.randn(NUMEL, generator=generator).to(torch.bfloat16 if HAS_BF16 else torch.float16)
    there, working = [field.to(DEVICE, copy=True) for field in state], torch.empty_like(grad)
    working_there = working.to(DEVICE, copy=True)
    kernels.update(Fp32State(state), grad, scalars, working=working)
    on_device.update(Fp32State(there), grad.to(DEVICE), working_there, scalars)
    # Without momentum torch leaves the buffer as it is, and the host's kernel fills it.
    compared = 1 if rule == "momentum, off" else len(state)
    for actual, expected in zip(there[:compared], state[:compared], strict=True):
        close(actual, expected)
    close(working_there, working, 2**-7)


@pytest.mark.parametrize("name", ["split16", "int8"])
def test_narrow_state_is_updated_by_compiled_code(name: str) -> None:
    scalars = test_on_device_narrow.scalars()
    assert kernels.compiles(scalars) or not HAS_GPU
    # split16 keeps masters to the last bit: the lowest of 8 bytes may differ everywhere.
    assert test_on_device_narrow.compare(name, scalars, DEVICE) < 0.13
    state = STATES[name](field.to(DEVICE) for field in test_on_device_narrow.made(name))
    grad = torch.ones(test_on_device_narrow.NUMEL, dtype=torch.bfloat16, device=DEVICE)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE) if HAS_GPU else 0
    on_device.update_narrow(state, grad, test_on_device_narrow.LAYOUT, scalars)
    # One kernel: moments in fp32 between two would take 8 bytes per parameter.
    peak = torch.cuda.max_memory_allocated(DEVICE) if HAS_GPU else 0
    assert peak - before < grad.numel()


def test_matrices_on_the_device() -> None:
    layout, rates = test_matrices.LAYOUT, test_matrices.RATES
    host = test_matrices.state_of("fp32")
    there: Any = Fp32State(field.to(DEVICE, copy=True) for field in host)
    grad = format_cases.gradient(test_matrices.NUMEL, torch.float32, 5)
    target = torch.zeros(test_matrices.NUMEL, dtype=torch.bfloat16)
    target_there = target.to(DEVICE, copy=True)
    kernels.blend(host, grad, target, layout, test_matrices.SCALARS)
    on_device.blend(there, grad.to(DEVICE), target_there, layout, test_matrices.SCALARS)
    close(there[1], host[1])
    close(target_there, target, 2**-7)
    working = torch.zeros(test_matrices.NUMEL)
    working_there = working.to(DEVICE, copy=True)
    decay = test_matrices.DECAY
    kernels.subtract(host, target, working, layout, decay=decay, rates=rates)
    on_device.subtract(there, target.to(DEVICE), working_there, layout, decay, rates)
    close(there[0], host[0])
    close(working_there, working)


def test_sums_of_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {4: (300, 70), 0: (1,), 2: (4096, 33)}
    tensors = [
        (number, torch.randn(size, generator=generator).to(torch.float16))
        for number, size in sizes.items()
    ]
    expected = torch.full((5,), 7.0, dtype=torch.float64)
    squares = expected.to(DEVICE, copy=True)
    kernels.sum_squares_each(tensors, expected)
    on_device.sum_squares_each([(number, x.to(DEVICE)) for number, x in tensors], squares)
    close(squares, expected, 1e-14)
    for number, values in tensors:
        layout = kernels.Layout([0], [values.numel()], [number])
        on_device.sum_squares(values.to(DEVICE).view(-1), layout, squares)
    close(squares, expected, 1e-14)
