"""Competitors of our kernels: torch's fused AdamW, and DeepSpeed's CPU Adam if installed.

A whole path starts from 16-bit gradients and ends with 16-bit weights, with clipping: cast,
multiply, step, cast. DeepSpeed's ZeRO-2 casts the gradients on the GPU (`stage_1_and_2.py`): its
path on the host starts from fp32.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offloadtrain.cli.bench.rounds import Case
from offloadtrain.runtime.kernels import AdamScalars, Fp32State

TORCH_STEP, TORCH_PATH = "torch fused, step alone", "torch fused, whole path"
DEEPSPEED_STEP, DEEPSPEED_PATH = "DeepSpeed, step alone", "DeepSpeed, whole path"
DEEPSPEED_ZERO2 = "DeepSpeed, ZeRO-2's path"
BYTES_PER_PARAM = {TORCH_STEP: 28, DEEPSPEED_STEP: 28, DEEPSPEED_ZERO2: 42}
"""Memory traffic per parameter; a whole path has FULL_PATH_BYTES."""

FULL_PATH_BYTES = 48


def torch_cases(
    state: Fp32State, grad: Tensor, working: Tensor, wide: Tensor, scalars: AdamScalars
) -> dict[str, Case]:
    """torch.optim.AdamW(fused=True), called as the optimizer calls it.

    Args:
        wide: (n,) fp32, for its gradients.
    """
    step = torch.tensor(float(scalars.step))

    def fused() -> None:
        torch._fused_adamw_(
            [state.master],
            [wide],
            [state.exp_avg],
            [state.exp_avg_sq],
            [],
            [step],
            lr=scalars.lr,
            beta1=scalars.beta1,
            beta2=scalars.beta2,
            weight_decay=scalars.weight_decay,
            eps=scalars.eps,
            amsgrad=False,
            maximize=False,
        )

    return {TORCH_STEP: fused, TORCH_PATH: _path(fused, state, grad, working, wide, scalars)}


def deepspeed_cases(
    state: Fp32State, grad: Tensor, working: Tensor, wide: Tensor, scalars: AdamScalars
) -> dict[str, Case]:
    """DeepSpeedCPUAdam; empty, with one line on stderr, if it cannot be loaded or built."""
    param = torch.nn.Parameter(state.master)
    param.grad = wide
    try:
        adam = _quietly(lambda: _deepspeed_adam(param, scalars))
    except Exception as error:  # its compiler run may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
            return {}
        print(f"DeepSpeed is installed but does not work: {error}", file=sys.stderr)
        return {}
    path = _path(adam.step, state, grad, working, wide, scalars)
    zero2 = _from_fp32(adam.step, state, working, wide, scalars)
    return {DEEPSPEED_STEP: adam.step, DEEPSPEED_PATH: path, DEEPSPEED_ZERO2: zero2}


def deepspeed_version() -> str | None:
    """Return the loaded version, None if none was."""
    return getattr(sys.modules.get("deepspeed"), "__version__", None)


def _path(
    step: Callable[[], object],
    state: Fp32State,
    grad: Tensor,
    working: Tensor,
    wide: Tensor,
    scalars: AdamScalars,
) -> Case:
    rest = _from_fp32(step, state, working, wide, scalars)

    def path() -> None:
        wide.copy_(grad)
        rest()

    return path


def _from_fp32(
    step: Callable[[], object],
    state: Fp32State,
    working: Tensor,
    wide: Tensor,
    scalars: AdamScalars,
) -> Case:
    def path() -> None:
        wide.mul_(scalars.grad_scale)
        step()
        working.copy_(state.master)

    return path


def _deepspeed_adam(param: torch.nn.Parameter, scalars: AdamScalars) -> Any:
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        [param],
        lr=scalars.lr,
        betas=(scalars.beta1, scalars.beta2),
        eps=scalars.eps,
        weight_decay=scalars.weight_decay,
        adamw_mode=True,
    )
    adam.step()
    return adam


def _quietly(make: Callable[[], Any]) -> Any:
    """Redirect stdout, which is for data: its import and its compiler print there."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            return make()
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
