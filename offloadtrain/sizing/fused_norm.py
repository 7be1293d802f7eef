"""RMSNorm as a GPU computes it.

torch computes `rms_norm` on a CPU as a chain of operations in fp32, and on a GPU as one kernel, if
input and weight have one dtype: it reads the input, and keeps the input and a number per row. A
trace that stands for a GPU runs operations that only say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_FORWARD, _BACKWARD = "offloadtrain::rms_norm", "offloadtrain::rms_norm_backward"

torch.library.define(_FORWARD, "(Tensor x, Tensor? weight, int rows) -> (Tensor, Tensor)")
torch.library.define(
    _BACKWARD, "(Tensor grad, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor?)"
)


@torch.library.register_fake(_FORWARD)  # type: ignore[untyped-decorator]
def _normed(x: Tensor, weight: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        out, rstd = torch.ops.offloadtrain.rms_norm(x, weight, rows)
        ctx.save_for_backward(x, weight, rstd)
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        return *torch.ops.offloadtrain.rms_norm_backward(grad, x, weight, rstd), None


@contextmanager
def fused_norms(*, on_cpu: bool) -> Iterator[None]:
    """Let torch's RMSNorm be the kernel of a GPU, unless `on_cpu`."""
    if on_cpu:
        yield
        return
    chain = F.rms_norm

    def normed(
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return chain(x, list(normalized_shape), weight, eps)
        rows = x.shape[: x.dim() - len(normalized_shape)].numel()
        return cast(Tensor, _RmsNorm.apply(x, weight, rows))  # type: ignore[no-untyped-call]

    with patch.object(F, "rms_norm", normed):
        yield
