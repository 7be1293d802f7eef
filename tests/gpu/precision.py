"""The device of these tests and what it computes in: a V100 has no bf16.

Without a GPU it is the CPU, under the stand-in for CUDA (`stand_in.py`).
"""

from __future__ import annotations

from functools import partial

import torch

import offloadtrain as ot
from offloadtrain.config.offload import Precision

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
HAS_BF16 = not HAS_GPU or torch.cuda.is_bf16_supported(including_emulation=False)
NAME: Precision = "bf16" if HAS_BF16 else "fp32"
DTYPE = torch.bfloat16 if HAS_BF16 else torch.float32
DTYPES = {"fp16": torch.float16, "fp32": torch.float32} | {NAME: DTYPE}

offload = partial(ot.offload, device=DEVICE.type, precision=NAME)
"""On that device (of a rank, its own) and in that precision, where the call names no other."""
