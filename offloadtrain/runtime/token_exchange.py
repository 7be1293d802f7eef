"""Rows of tokens on their way to the ranks that hold their experts, and back: all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.process_group import Group, all_to_all_single


class AllToAll:
    """Exchanges rows among the ranks of a group, each of which holds other experts."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __deepcopy__(self, _: dict[int, Any]) -> AllToAll:
        """A copy of a model exchanges with the same ranks; groups cannot be copied."""
        return self

    def counts(self, counts_E: Tensor) -> Tensor:
        """Return what every rank tells this one, (ranks, E / ranks).

        Args:
            counts_E: E / ranks numbers for each rank.
        """
        result = torch.empty_like(counts_E)
        # Compute waits for the slowest rank: its router has to be through.
        with HEARTBEAT.collective():
            all_to_all_single(result, counts_E.contiguous(), group=self._group)
        return result.view(self._group.size(), -1)

    def rows(self, rows_MD: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows, in the order of ranks, and return those that arrive, in that order.

        Args:
            rows_MD: (sum of `sent`, D).
            sent, received: rows to and from each rank.
        """
        result = _Exchanged.apply(rows_MD, self._group, sent, received)  # type: ignore[no-untyped-call]
        return cast(Tensor, result)


class _Exchanged(torch.autograd.Function):
    """torch's own is in a private module, and tells no heartbeat who waits for whom."""

    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.back = group, received, sent
        return _exchanged(rows_MD, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad_SD, *ctx.back), None, None, None


def _exchanged(
    rows_MD: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    result = rows_MD.new_empty(sum(received), rows_MD.shape[1])
    # Compute waits for the rows of all ranks. In one order on all of them: a layer is a chain.
    with HEARTBEAT.collective():
        all_to_all_single(result, rows_MD.contiguous(), list(received), list(sent), group=group)
    return result
