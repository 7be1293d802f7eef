"""Fake-tensor results of torch's grouped products, in every dtype.

torch's meta implementation rejects all dtypes but bf16; its kernels also compute in others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GROUPED = torch.ops.aten._grouped_mm
"""A matrix product per group. Groups of an operand are its first dimension, or ranges of its
rows or columns, which end at `offs`."""


def grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return memory for the product: (groups, M, N), or (M, N) if rows or columns are in groups.

    Args:
        a: (groups, M, K), or (M, K) with groups of rows, or of columns if b has rows in groups.
        b: (groups, K, N), or (K, N) with groups of columns, or of rows.
        offs: (groups,).

    Raises:
        RuntimeError: the inner dimensions differ, as torch reports for bf16.
    """
    torch._check(
        a.shape[-1] == b.shape[-2],
        lambda: f"grouped product of {tuple(a.shape)} and {tuple(b.shape)}: sides differ",
    )
    sizes = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        groups = len(a) if a.dim() == 3 or offs is None else len(offs)
        sizes = [groups, *sizes]
    return torch.empty(sizes, dtype=out_dtype or a.dtype, device=a.device)


GROUPED_PRODUCTS = {getattr(_GROUPED, name): grouped_product for name in _GROUPED.overloads()}
"""torch operation → its meta implementation."""


class Described(TorchDispatchMode):
    """Inside a `FakeTensorMode`, gives grouped products results in every dtype."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return GROUPED_PRODUCTS.get(func, func)(*args, **(kwargs or {}))
