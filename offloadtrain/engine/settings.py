"""What `offload()` was asked for, resolved."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `offload()` was asked for, resolved.

    Attributes:
        host_memory_limit: bytes that the engine may hold on the host; None: what is available.
        working: "device", or "host": repeated blocks are streamed.
        device_slots: how many streamed blocks are on the device at once.
        resident_blocks: how many repeated blocks stay there all the same; None: as many as
            device_memory_limit leaves room for.
        device_memory_limit: bytes that the engine may hold on the device.
        activation: "keep"; "recompute": repeated modules keep their inputs only; "offload": and
            these on the host.
    """

    device: torch.device
    dtype: torch.dtype
    clip_norm: float | None
    skip_nonfinite: bool
    grad_accum_steps: int
    pin_memory: bool
    state: str
    seed: int
    update: str
    warmup_steps: int
    host_memory_limit: int | None
    working: str
    device_slots: int
    resident_blocks: int | None
    device_memory_limit: int | None
    activation: str

    @property
    def accumulates(self) -> bool:
        return self.grad_accum_steps > 1

    @property
    def updates_early(self) -> bool:
        """In mode "exact": nothing global has to be known before a bucket is updated."""
        free = self.clip_norm is None and not self.skip_nonfinite
        return self.update == "exact" and free

    @property
    def weights_wait(self) -> bool:
        """New weights wait for their upload longer than their gradient's memory is free."""
        return self.update != "exact" or (self.updates_early and self.accumulates)
