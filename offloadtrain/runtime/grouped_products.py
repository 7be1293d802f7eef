"""The result of torch's grouped products over fake tensors, in every dtype.

torch's own description of them refuses all but bf16; its kernels compute in other dtypes, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GROUPED = torch.ops.aten._grouped_mm
"""A product per group. A matrix has its groups in a dimension in front, or they are ranges of its
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
        RuntimeError: the sides differ, as torch says of those of bf16.
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
"""What torch calls → what describes it."""


class Described(TorchDispatchMode):
    """While entered within a `FakeTensorMode`, grouped products have results in every dtype."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return GROUPED_PRODUCTS.get(func, func)(*args, **(kwargs or {}))
