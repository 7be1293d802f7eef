"""What `offload()` was asked for, resolved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offloadtrain.distributed import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `offload()` was asked for, resolved.

    Attributes:
        host_memory_limit: bytes that the engine may hold on the host; None: what is available.
        state_on: "host"; "device": nothing is offloaded.
        working: "device", or "host": repeated blocks are streamed.
        device_slots: how many streamed blocks are on the device at once.
        resident_blocks: how many repeated blocks stay there all the same; None: as many as
            device_memory_limit leaves room for.
        device_memory_limit: bytes that the engine may hold on the device.
        activation: "keep"; "recompute": repeated modules keep their inputs only; "offload": and
            these on the host.
        zero_stage: what is cut into shards where there are several ranks: 1: optimizer states; 2:
            and gradients; 3: and the weights of repeated blocks.
        reduction: dtype in which gradients are summed over ranks; None: that of the weights.
        ranks: who shares the state.
        cast_inputs: True: every floating-point input of the model becomes `dtype`; False: none;
            None: those that meet a matrix.
        keep_fp32: patterns of names of parameters that keep 32 bits on the device.
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
    state_on: str
    working: str
    device_slots: int
    resident_blocks: int | None
    device_memory_limit: int | None
    activation: str
    zero_stage: int
    reduction: torch.dtype | None
    ranks: Ranks
    cast_inputs: bool | None = None
    keep_fp32: tuple[str, ...] = ()

    @property
    def accumulates(self) -> bool:
        return self.grad_accum_steps > 1

    @property
    def streams(self) -> bool:
        """Whether repeated blocks come to the device for their use: from the host, or from shards
        on the devices."""
        return self.working == "host" or (self.zero_stage == 3 and not self.ranks.alone)

    @property
    def updates_early(self) -> bool:
        """In mode "exact": nothing global has to be known before a bucket is updated."""
        free = self.clip_norm is None and not self.skip_nonfinite
        return self.update == "exact" and free

    @property
    def weights_wait(self) -> bool:
        """New weights wait for their upload longer than their gradient's memory is free."""
        return self.update != "exact" or (self.updates_early and self.accumulates)
