"""Layers without weights drawn at construction, rotary positions, and random numbers per rank.

Rotary position embedding (RoFormer, arXiv:2104.09864) has the half-split form of Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` without initialization; only `Transformer.init_weights` draws its weights."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised, and torch's global generator unchanged."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without initialization; only `Transformer.init_weights` draws its weights."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised, and torch's global generator unchanged."""


def activated(up: Tensor, *, gated: bool) -> Tensor:
    """Return GELU (tanh form, as in GPT-2) of (…, F), or SwiGLU (arXiv:2002.05202) of (…, 2·F),
    whose first half is the gate."""
    if not gated:
        return F.gelu(up, approximate="tanh")
    gate, value = up.chunk(2, dim=-1)
    return F.silu(gate) * value


# Shape suffixes: B batch, N heads, T time, H head width, P = H/2 pairs.


class RotaryTables(nn.Module):
    """Cosines and sines of every position, fp32 for every dtype of the model.

    They are not part of the state dict. `model.to(dtype)` does not round them, because the angles
    of late positions need more than 8 or 11 bits. After construction on the meta device, `to_empty`
    fills them.
    """

    cos_TP: Tensor
    sin_TP: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self._size = (head_dim, max_seq_len, theta)
        cos_TP, sin_TP = rotary_tables(head_dim, max_seq_len, theta)
        self.register_buffer("cos_TP", cos_TP, persistent=False)
        self.register_buffer("sin_TP", sin_TP, persistent=False)

    def forward(self, seq_len: int, positions_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the first positions, (T, P), or of `positions_BT`, (B, 1, T, P)."""
        if positions_BT is None:
            return self.cos_TP[:seq_len], self.sin_TP[:seq_len]
        return self.cos_TP[positions_BT][:, None], self.sin_TP[positions_BT][:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn`, then recompute the buffers that a dtype conversion or the meta device
        lost."""
        was_meta = self.cos_TP.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        now = self.cos_TP
        if now.dtype != torch.float32 or (was_meta and not now.is_meta):
            self.cos_TP, self.sin_TP = rotary_tables(*self._size, device=now.device)
        return self


def rotary_tables(
    head_dim: int, max_seq_len: int, theta: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position · theta^(-2i/H), (T, P) fp32, angles computed in fp64."""
    pairs_P = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    positions_T = torch.arange(max_seq_len, dtype=torch.float64, device=device)
    angles_TP = torch.outer(positions_T, theta ** (-pairs_P / head_dim))
    return angles_TP.cos().float(), angles_TP.sin().float()


def rotate(x_BNTH: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate pair (i, i + P) of each head by the angle of its position, in fp32; returns the dtype
    of `x`. The tables may differ per sequence, (B, 1, T, P).
    """
    first_BNTP, second_BNTP = x_BNTH.float().chunk(2, dim=-1)
    rotated_BNTH = torch.cat(
        (
            first_BNTP * cos_TP - second_BNTP * sin_TP,
            second_BNTP * cos_TP + first_BNTP * sin_TP,
        ),
        dim=-1,
    )
    return rotated_BNTH.to(x_BNTH.dtype)


_SEEDS = 1 << 62


@contextmanager
def own_draws(part: int | None, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on each part inside the context; None: change nothing.

    Outside the context all parts draw the same numbers. Inside, the generators are seeded with a
    number drawn outside, so that recompute draws the same numbers again.
    """
    if part is None:
        yield
        return
    # On the host, without a wait for the device.
    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + part)
        yield
