"""torch's dtypes by the names that torch-free code uses."""

from __future__ import annotations

import torch

from offloadtrain.config.offload import PRECISIONS as NAMES
from offloadtrain.step.layout.formats import ITEMSIZE

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}

PRECISIONS = {precision: DTYPES[name] for precision, name in NAMES.items()}
"""Precision → dtype of working weights and gradients."""


def name_of(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")
