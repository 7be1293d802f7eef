"""What `offload` takes: one frozen object, declared once, with every contradiction checked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """The options of `offload`, and the table `[offload]` of a job, key by key.

    Attributes:
        (documented in `offload`)
    """

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "bf16"
    state: Literal["fp32", "split16", "int8"] = "fp32"
    state_on: Literal["host", "device"] = "host"
    seed: int = 0
    update: Literal["exact", "speculative", "delayed"] = "exact"
    warmup_steps: int = 0
    clip_norm: float | None = None
    skip_nonfinite: bool = True
    grad_accum_steps: int = 1
    host_memory_limit: int | None = None
    working: Literal["device", "host"] = "device"
    device_slots: int = 2
    resident_blocks: int | None = None
    device_memory_limit: int | None = None
    activation: Literal["keep", "recompute", "offload"] = "keep"
    zero_stage: int = 0
    reduction: Literal["working", "fp32"] = "working"
    cast_inputs: bool | None = None
    keep_fp32: tuple[str, ...] = ()
    pin_memory: bool = True
