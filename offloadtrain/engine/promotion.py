"""State that moves to the device once its free memory is known: `state_on = "auto"`.

[Note: Free device memory]
The memory that activations take is known only after a model has trained for a while. So all state
starts on the host. Every `CHECK_STEPS` steps the peak memory that torch's allocator has reserved is
compared with that of the previous check. If it has not risen on any rank, the rest of the device,
less a reserve, is free, and gradients, masters and moments of the first blocks of the forward move
there ([Note: State where there is room] in `step.layout.state_tiers`), as many as the rank with the
least free memory can hold. The move is a change of the layout ([Note: Changes between steps] in
`engine.relayout`) and changes no bits. Evaluations and longer batches count if they come before it.
A later batch that does not fit raises torch's OutOfMemoryError; when its step is dropped, the state
goes back to the host, for good, unless the host has no room by then. With several ranks it does not
go back: their collectives would wait for the rank that has failed.

A step is dropped between two others, or while the error is handled. A `zero_grad()` between a
forward and its backward moves nothing, as the graph reads the weights in place.

The state dict contains the share. A run that loads it moves the state at once, if there is room. A
change of the trained parameters, or of the number of microbatches, starts the measurement again.

`device_memory_limit` limits the memory that the engine itself allocates, which is known in advance:
with it state is placed when the model is offloaded, and nothing is measured.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.offload import OffloadConfig, OptionError, StateOn
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.division import Division
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.relayout import check_room
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.optim import AnyRule
from offloadtrain.optim.kernel_rules import KernelRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.device_memory import MemoryUse, failed_allocations, memory_use
from offloadtrain.step.layout.buffer_table import arena_rows, buffer_table, device_bytes
from offloadtrain.step.layout.buffers import span_bytes
from offloadtrain.step.layout.state_tiers import (
    device_share,
    filled,
    first_on_device,
    with_state_tiers,
)
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier

_log = logging.getLogger(__name__)

CHECK_STEPS = 10
_RESERVE_SHARE, _RESERVE_BYTES = 0.1, 1 << 30
"""Left free on the device, for fragmentation and larger batches: the larger of both."""


class Promotion:
    """Decides the tier of a model's state. The methods that return a new `state_on`, or
    None for no move, are called between two steps, by all ranks."""

    def __init__(
        self,
        config: OffloadConfig,
        rules: Sequence[AnyRule],
        device: torch.device,
        division: Division,
    ) -> None:
        """Raises OptionError if the state of this model cannot move."""
        self._ranks, self._device = division.replicas, device
        is_auto = config.state.tier == "auto"
        measures = is_auto and config.memory.device_limit is None
        is_plain = division.size == self._ranks.size and self._ranks.of_experts is self._ranks
        self.can_move = is_plain and not config.skip_unused
        """The layout of this model can change at a step that all ranks agree on."""
        if measures and not self.can_move:
            raise OptionError(
                "state_on = 'auto' without device_memory_limit moves all ranks' state at one step, "
                "which does not go with skip_unused, nor with a mesh that divides the model: give "
                "device_memory_limit, or a share such as {'device': 0.3}"
            )
        if measures and (reason := _reason_against(config, rules, device)):
            self._log(logging.WARNING, f"the optimizer state stays on the host, as {reason}")
            measures = False
        self._measures = measures
        self._may_go_back = is_auto and division.size == 1 and not config.skip_unused
        self.is_active = measures or self._may_go_back
        """True if state may move at all."""
        self._undecided = config.state.tier
        self._failures = 0
        self.begin(None)

    def begin(self, state_on: StateOn | None) -> StateOn:
        """Return the `state_on` of a new layout. None: the trained parameters or the number of
        microbatches changed, so the free memory of the device is measured again, as with "auto"."""
        self._is_decided = state_on not in (None, "auto") or not self._measures
        self._peak = 0
        return state_on or self._undecided

    def after_step(self, engine: Engine) -> StateOn | None:
        """Move state to the device if its free memory is known."""
        if self._is_decided or engine.counter.tries % CHECK_STEPS:
            return self.after_drop(engine)
        use = memory_use(self._device)
        is_stable = use.peak <= self._peak and _is_unread(engine)
        self._peak = max(self._peak, use.peak)
        if (room := self._least_room(use, is_stable=is_stable)) is None:
            return None
        self._is_decided = True
        spec = engine.program.spec
        share = device_share(filled(spec, device_bytes(spec) + room, device_bytes))
        return self._promoted(spec, share)

    def after_load(self, engine: Engine, share: float) -> StateOn | None:
        """State of a run was loaded that had this share on the device: move as much there."""
        if self._is_decided or not share:
            return None
        room, spec = self._least_room(memory_use(self._device), is_stable=True), engine.program.spec
        needed = device_bytes(_with_share(spec, share)) - device_bytes(spec)
        return self._promoted(spec, share) if room is not None and needed <= room else None

    def after_drop(self, engine: Engine) -> StateOn | None:
        """Move the state back to the host if an allocation on the device has failed since state
        moved there."""
        if not (self._may_go_back and engine.reports.state_on_device):
            return None
        is_handled = isinstance(sys.exception(), torch.OutOfMemoryError)
        has_failed = failed_allocations(self._device) > self._failures
        if not has_failed or not (is_handled or _is_unread(engine)):
            return None
        self._failures, spec = failed_allocations(self._device), engine.program.spec
        on_host = replace(first_on_device(spec, 0), second_copies=frozenset())
        text, moves = "the state goes back to the host and stays there", True
        try:
            check_room(on_host, available_bytes() + span_bytes(arena_rows(spec)))
        except HostMemoryError as error:
            text, moves = f"the state stays there, as the host has no room: {error}", False
        self._log(
            logging.WARNING,
            f"an allocation on the device has failed with {engine.reports.state_on_device:g} of "
            f"the optimizer state there: {text}",
        )
        if moves:
            self._measures, self._undecided = False, "host"
        return "host" if moves else None

    def _promoted(self, spec: StepSpec, share: float) -> StateOn | None:
        if share and self._is_available(spec, promoted := _with_share(spec, share)):
            more = format_bytes(device_bytes(promoted) - device_bytes(spec))
            text = f"{share:g} of the optimizer state moves to the device ({more} more there)"
            self._log(logging.INFO, text)
            self._failures = failed_allocations(self._device)
            return {"device": share}
        self._log(
            logging.WARNING,
            "the optimizer state stays on the host: beside a reserve of "
            f"{100 * _RESERVE_SHARE:g} % (at least {format_bytes(_RESERVE_BYTES)}) the device has "
            "no room for a block of it",
        )
        return None

    def _is_available(self, spec: StepSpec, promoted: StepSpec) -> bool:
        """Allocate and free the memory that the device needs: a move cannot be undone half-way."""
        before = buffer_table(spec).allocated(Tier.DEVICE)
        rows = buffer_table(promoted).allocated(Tier.DEVICE)
        try:
            [
                torch.empty(row.nbytes, dtype=torch.uint8, device=self._device)
                for key, row in rows.items()
                if key not in before
            ]
        except torch.OutOfMemoryError:
            is_available = False
        else:
            is_available = True
        return bool(self._ranks.all_gather_host([is_available]).all())

    def _least_room(self, use: MemoryUse, *, is_stable: bool) -> int | None:
        """Return the bytes that are free on the device of every rank; None: unknown."""
        used_bytes = use.others + max(use.peak, self._peak) + reserve_bytes(use.total)
        room = use.total - used_bytes
        rooms = self._ranks.all_gather_host([room if is_stable else math.nan])
        return None if rooms.isnan().any() else int(rooms.min())

    def _log(self, level: int, text: str) -> None:
        if self._ranks.rank == 0:
            _log.log(level, "state_on = 'auto': %s", text)


def reserve_bytes(total: int) -> int:
    """Return the bytes to leave free on a device with `total` bytes."""
    return max(int(_RESERVE_SHARE * total), _RESERVE_BYTES)


def _is_unread(engine: Engine) -> bool:
    """Return True if no graph that may still run backward reads weights in place."""
    return all(block.is_unread for block in engine.residency.blocks.values())


def _with_share(spec: StepSpec, share: float) -> StepSpec:
    config = spec.config.replace(state_on={"device": share})
    return with_state_tiers(replace(spec, config=config), device_bytes)


def _reason_against(
    config: OffloadConfig, rules: Sequence[AnyRule], device: torch.device
) -> str | None:
    """Return why no state can move to the device, or is updated faster on the host; else None."""
    if device.type == "cpu":
        return "the device is the CPU"
    of_kernels = [rule for rule in rules if isinstance(rule, KernelRule)]
    scalars = [rule.scalars(rule.defaults(), step=1, grad_scale=1.0, seed=0) for rule in of_kernels]
    is_narrow = config.state.format != "fp32"
    if is_narrow and not (len(scalars) == len(rules) and all(map(kernels.compiles, scalars))):
        return f"no kernel of the device updates state = '{config.state.format}' by this rule"
    return None
