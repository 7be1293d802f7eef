"""What the card that is there computes in: a V100 has no bf16."""

from __future__ import annotations

from functools import partial

import torch

import offloadtrain as ot

HAS_BF16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
NAME, DTYPE = ("bf16", torch.bfloat16) if HAS_BF16 else ("fp32", torch.float32)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32} | {NAME: DTYPE}

offload = partial(ot.offload, device="cuda", precision=NAME)
"""In that precision, where the call names no other."""
