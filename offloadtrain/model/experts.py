"""Mixture of experts: a router chooses MLPs for each token (Switch Transformer one, GShard two).

[Note: Experts]
Every token reaches all experts that it chose: experts have no capacity, and no token is dropped.
Tokens are sorted by expert, so that each expert multiplies one range of rows: in one grouped
product, or in one product per expert if the device has no grouped product.

No operation here adds to one address from two places, neither in forward nor in backward: rows are
permuted, and the experts of a token are summed in the order of its choice. Therefore the same
inputs give the same bits on every run, and also in recompute.

[Note: Experts of other ranks]
With expert parallelism a rank has E / R of the experts, in the order of ranks, and its own tokens.
Rows sorted by expert are also sorted by rank. First all ranks of the group exchange the number of
rows per expert. The host waits for these numbers, because they set the sizes of messages. Then the
rows go to the ranks of their experts. These ranks sort the received rows by expert; the rows of an
expert stay in the order of the ranks that sent them. The results return the same way. The order of
rows, and therefore every bit, depends only on the tokens. All ranks run every layer, forward and
backward, even if a rank receives no rows.

Shape suffixes: N tokens, D d_model, E experts, K experts per token, M = N · K rows of experts, U
outputs of `up`, F ff_width, R ranks with different experts, L = E / R experts of a rank, S rows
that arrive at a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.layers import Linear, activated

_GROUPED_BYTES = 16
"""The size of a row in grouped products is a multiple of this number of bytes."""


class TokenExchange(Protocol):
    """Sends rows to the ranks of their experts; see [Note: Experts of other ranks]."""

    def counts(self, counts_E: Tensor) -> Tensor:
        """Return the number of rows that each rank has for each expert of this rank, (R, L);
        collective.

        Args:
            counts_E: number of rows of this rank for each expert.
        """
        ...

    def rows(self, rows_MD: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows and return the rows that arrive, (S, D), in the order of ranks. Forward and
        backward are collective.

        Args:
            sent, received: number of rows to and from each rank.
        """
        ...


class MixtureOfExperts(nn.Module):
    """A router and its experts."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.chosen = shape.experts_per_token
        self.router = Linear(shape.d_model, shape.num_experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of each token's experts, (B, T, D), and the load-balancing loss
        in fp32: 1 if all experts are chosen equally often, and at most the number of experts.

        The weights of a token are the router's probabilities of its experts. With two or more
        experts per token, they are divided by their sum. With one expert, the probability stays as
        it is, so that the router learns from it.
        """
        x_ND = x_BTD.flatten(0, 1)
        probs_NE = torch.softmax(self.router(x_ND).float(), dim=-1)
        weights_NK, experts_NK = probs_NE.topk(self.chosen, dim=-1)
        if self.chosen > 1:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        order_M = experts_NK.flatten().argsort(stable=True)
        ends_E = _ends(experts_NK.flatten()[order_M], probs_NE.shape[1])
        place_M = _inverse(order_M)
        # All rows use one name: they are large, and each tensor is freed when the next one exists.
        rows_MD = x_ND[:, None].expand(-1, self.chosen, -1).reshape(-1, x_ND.shape[1])
        rows_MD = _permuted(rows_MD, order_M, place_M)
        rows_MD = self.experts(rows_MD, ends_E)
        outputs_NKD = _permuted(rows_MD, place_M, order_M).unflatten(0, (-1, self.chosen))
        mixed_ND = (outputs_NKD * weights_NK[..., None]).sum(1).to(x_BTD.dtype)
        return mixed_ND.view_as(x_BTD), _balance(probs_NE, ends_E, self.chosen)


class Experts(nn.Module):
    """The matrices of all experts: `up` (E, U, D), with SwiGLU the gate above the value, and `down`
    (E, D, F). With `exchange` they are DTensors with local shapes (L, U, D) and (L, D, F)."""

    exchange: TokenExchange | None = None

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gated = shape.mlp == "swiglu"
        outputs = (2 if self.gated else 1) * shape.ff_width
        count = shape.held_experts
        self.up = nn.Parameter(torch.empty(count, outputs, shape.d_model))
        self.down = nn.Parameter(torch.empty(count, shape.d_model, shape.ff_width))

    def forward(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Return (M, D).

        Args:
            rows_MD: sorted by expert.
            ends_E: int32, the row after the last row of each expert.
        """
        if self.exchange is None:
            return self._computed(rows_MD, self.up, self.down, ends_E)
        if rows_MD.is_meta:  # only the shape is needed: no rank has rows to send
            return torch.empty_like(rows_MD)
        counts_RL = self.exchange.counts(_counts(ends_E))
        # Waits for the device, because the host needs the sizes of messages.
        sent = _counts(ends_E).view(len(counts_RL), -1).sum(1).tolist()
        received = counts_RL.sum(1).tolist()
        # All rows use one name, as in `MixtureOfExperts`.
        rows_SD = self.exchange.rows(rows_MD, sent, received)
        numbers_RL = torch.arange(counts_RL.shape[1], device=rows_MD.device).expand_as(counts_RL)
        order_S = numbers_RL.flatten().repeat_interleave(counts_RL.flatten()).argsort(stable=True)
        place_S = _inverse(order_S)
        ends_L = counts_RL.sum(0).cumsum(0).to(torch.int32)
        up, down = cast(Any, self.up).to_local(), cast(Any, self.down).to_local()
        rows_SD = _permuted(rows_SD, order_S, place_S)
        rows_SD = self._computed(rows_SD, up, down, ends_L)
        rows_SD = _permuted(rows_SD, place_S, order_S)
        return self.exchange.rows(rows_SD, received, sent)

    def _computed(self, rows_MD: Tensor, up: Tensor, down: Tensor, ends_E: Tensor) -> Tensor:
        hidden_MF = activated(grouped_linear(rows_MD, up, ends_E), gated=self.gated)
        return grouped_linear(hidden_MF, down, ends_E)


def grouped_linear(rows_MD: Tensor, weight_EUD: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the transposed matrix of its expert, (M, U).

    Args:
        rows_MD: sorted by expert; the dtype of the weights.
        ends_E: int32, the row after the last row of each expert.
    """
    if weight_EUD.is_meta and weight_EUD.dtype is not torch.bfloat16:
        # Only the shape is needed, and torch's grouped product returns it for bf16 only.
        return rows_MD.new_empty(len(rows_MD), weight_EUD.shape[1])
    if has_grouped_products(weight_EUD):
        return F.grouped_mm(rows_MD, weight_EUD.transpose(1, 2), offs=ends_E)
    return cast(Tensor, _ByExpert.apply(rows_MD, weight_EUD, ends_E))  # type: ignore[no-untyped-call]


def has_grouped_products(weight_EUD: Tensor) -> bool:
    """Return True if torch has a grouped product for these weights: torch 2.10 or later, the CPU or
    a GPU of compute capability 8.0 or higher, and matrices whose sides are multiples of 16
    bytes."""
    sides = (side * weight_EUD.itemsize % _GROUPED_BYTES for side in weight_EUD.shape[1:])
    if not hasattr(F, "grouped_mm") or any(sides):
        return False
    device = weight_EUD.device
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


class _ByExpert(torch.autograd.Function):
    """Run `grouped_linear` as one product per expert. Waits for the device to read the ranges."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_EUD: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_MD, weight_EUD)
        ends: list[int] = ends_E.tolist()
        ctx.ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        out_MU = rows_MD.new_empty(len(rows_MD), weight_EUD.shape[1])
        for expert, (lo, hi) in enumerate(ctx.ranges):
            torch.mm(rows_MD[lo:hi], weight_EUD[expert].T, out=out_MU[lo:hi])
        return out_MU

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MU: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_MD, weight_EUD = ctx.saved_tensors
        grad_MD, grad_EUD = torch.empty_like(rows_MD), torch.empty_like(weight_EUD)
        for expert, (lo, hi) in enumerate(ctx.ranges):
            torch.mm(grad_MU[lo:hi], weight_EUD[expert], out=grad_MD[lo:hi])
            # An expert without tokens has zero gradients.
            torch.mm(grad_MU[lo:hi].T, rows_MD[lo:hi], out=grad_EUD[expert])
        return grad_MD, grad_EUD, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        return rows_MD.index_select(0, order_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (place_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, place_M), None, None


def _permuted(rows_MD: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
    """Return `rows_MD[order_M]`; `place_M` is the inverse permutation. The backward of torch's own
    indexing does not know that all rows are distinct: it adds rows, with atomics on a GPU."""
    return cast(Tensor, _Permuted.apply(rows_MD, order_M, place_M))  # type: ignore[no-untyped-call]


def _inverse(order_M: Tensor) -> Tensor:
    """Return the position of each row in another order of the rows, (M,)."""
    place_M = torch.empty_like(order_M)
    return place_M.scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))


def _counts(ends_E: Tensor) -> Tensor:
    return ends_E.diff(prepend=ends_E.new_zeros(1))


def _ends(sorted_M: Tensor, experts: int) -> Tensor:
    """Return the cumulative number of rows over experts, (E,), int32."""
    numbers_E = torch.arange(experts, device=sorted_M.device)
    return torch.searchsorted(sorted_M, numbers_E, right=True, out_int32=True)


def _balance(probs_NE: Tensor, ends_E: Tensor, chosen: int) -> Tensor:
    """Return E · sum over E of (share of the rows) · (mean probability): equations 4 to 6 of Switch
    Transformer (arXiv:2101.03961), with shares of N · K rows as in GShard's top-2."""
    counts_E = _counts(ends_E)
    share_E = counts_E.float() / (probs_NE.shape[0] * chosen)
    return probs_NE.shape[1] * (share_E * probs_NE.mean(0)).sum()
