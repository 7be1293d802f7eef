"""Layers whose weights are drawn by `Transformer.init_weights` only, and what MLPs compute between
their matrices."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` whose weights are drawn by `Transformer.init_weights` only."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised, and torch's global generator untouched."""


class Embedding(nn.Embedding):
    """`nn.Embedding` whose weights are drawn by `Transformer.init_weights` only."""

    def reset_parameters(self) -> None:
        """Leave the memory uninitialised, and torch's global generator untouched."""


def activated(up: Tensor, *, gated: bool) -> Tensor:
    """Return GELU (tanh form, as GPT-2) of (…, F), or SwiGLU (arXiv:2002.05202) of (…, 2·F), whose
    first half is the gate."""
    if not gated:
        return F.gelu(up, approximate="tanh")
    gate, value = up.chunk(2, dim=-1)
    return F.silu(gate) * value
