"""State that moves to the device once its free memory is known: `state_on = "auto"`.

[Note: Free device memory]
How much memory activations take is known only after a model has trained for a while. So all state
begins on the host. Every `CHECK_STEPS` steps the most memory that torch's allocator has reserved is
compared with the check before. If it has not risen on any rank, the rest of the device, less a
reserve, is free, and gradients, masters and moments of the first blocks of the forward move there
([Note: State where there is room] in `step.layout.state_tiers`), as far as the rank with the least
room allows. The move is a change of the layout ([Note: Changes between steps] in
`engine.relayout`), and the bits stay. Evaluations and longer batches count if they come before it.
A later one that does not fit raises torch's OutOfMemoryError; when its step is dropped, the state
goes back to the host, for good. Not among ranks, whose collectives would wait for the one that has
failed.

The state dict has the share. A run that loads it moves the state at once, if there is room now. A
change of what is trained, or of the microbatches in a step, begins anew.

`device_memory_limit` is a limit of what the engine itself allocates, which is known in advance:
with it state is placed when the model is offloaded, and nothing is measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from offloadtrain.config.offload import OffloadConfig, OptionError, StateOn
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.division import Division
from offloadtrain.engine.engine import Engine
from offloadtrain.optim import AnyRule
from offloadtrain.optim.kernel_rules import KernelRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.device_memory import MemoryUse, failed_allocations, memory_use
from offloadtrain.step.layout.buffer_table import buffer_table, device_bytes
from offloadtrain.step.layout.state_tiers import device_share, filled, with_state_tiers
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier

_log = logging.getLogger(__name__)

CHECK_STEPS = 10
_RESERVE_SHARE, _RESERVE_BYTES = 0.1, 1 << 30
"""Left free on the device, for fragments and batches that take more: the larger of both."""


class Promotion:
    """Moves the state of one model; its methods are called between two steps, by all ranks."""

    def __init__(
        self,
        config: OffloadConfig,
        rules: Sequence[AnyRule],
        device: torch.device,
        division: Division,
        move: Callable[[str, StateOn], None],
    ) -> None:
        """`move`: changes `state_on`; its first argument says why.

        Raises:
            OptionError: the state of this model cannot move.
        """
        self._ranks, self._device, self._move = division.replicas, device, move
        has_limit = config.memory.device_limit is not None
        is_plain = division.size == self._ranks.size and self._ranks.of_experts is self._ranks
        if not has_limit and (config.skip_unused or not is_plain):
            raise OptionError(
                "state_on = 'auto' without device_memory_limit moves all ranks' state at one step, "
                "which does not go with skip_unused, nor with a mesh that divides the model: give "
                "device_memory_limit, or a share such as {'device': 0.3}"
            )
        reason = None if has_limit else _reason_against(config, rules, device)
        if reason is not None:
            _log.warning("state_on = 'auto': the state stays on the host, as %s", reason)
        self._measures = not has_limit and reason is None
        self._undecided: StateOn = "auto"
        self._failures = failed_allocations(device)
        self.begin(None)

    def begin(self, state_on: StateOn | None) -> StateOn:
        """Return the `state_on` of a new layout. None: other parameters are trained, or other
        microbatches summed, and what the device has room for is to be measured again."""
        self._is_decided = state_on is not None or not self._measures
        self._peak = 0
        return state_on or self._undecided

    def after_step(self, engine: Engine) -> None:
        """Move state to the device if its free memory is known."""
        self.after_failure(engine)
        if self._is_decided or engine.counter.tries % CHECK_STEPS:
            return
        use = memory_use(self._device)
        # A graph that is kept for another backward reads weights where they are now.
        blocks = engine.residency.blocks.values()
        is_stable = use.peak <= self._peak and all(block.is_unread for block in blocks)
        self._peak = max(self._peak, use.peak)
        room = self._least_room(use, is_stable=is_stable)
        if room is not None:
            self._is_decided = True
            spec = engine.program.spec
            self._promote(spec, device_share(filled(spec, device_bytes(spec) + room, device_bytes)))

    def resume(self, engine: Engine, share: float) -> None:
        """The state of a run was loaded that had so large a share on the device."""
        if self._is_decided or not share:
            return
        room, spec = self._least_room(memory_use(self._device), is_stable=True), engine.program.spec
        if device_bytes(_with_share(spec, share)) - device_bytes(spec) <= (room or 0):
            self._promote(spec, share)

    def after_failure(self, engine: Engine) -> None:
        """Move the state back to the host if an allocation on the device has failed."""
        failures = failed_allocations(self._device)
        has_failed, self._failures = failures > self._failures, failures
        spec = engine.program.spec
        if has_failed and self._ranks.is_single and spec.has_state_on(Tier.DEVICE):
            _log.warning(
                "an allocation on the device has failed with %g of the optimizer state there "
                "(state_on = 'auto'): the state goes back to the host and stays there",
                device_share(spec),
            )
            self._measures, self._undecided = False, "host"
            self._move("an allocation on the device has failed", "host")

    def _promote(self, spec: StepSpec, share: float) -> None:
        if share and self._is_available(spec, promoted := _with_share(spec, share)):
            more = format_bytes(device_bytes(promoted) - device_bytes(spec))
            _log.info(
                "state_on = 'auto': %g of the optimizer state moves to the device (%s more there)",
                *(share, more),
            )
            self._move("state_on = 'auto'", {"device": share})
        else:
            _log.warning(
                "state_on = 'auto': the optimizer state stays on the host: beside a reserve of %g "
                "(at least %s) the device has no room for a block of it",
                *(_RESERVE_SHARE, format_bytes(_RESERVE_BYTES)),
            )

    def _is_available(self, spec: StepSpec, promoted: StepSpec) -> bool:
        """Allocate and free what comes to the device: a move cannot be undone half-way."""
        before = buffer_table(spec).allocated(Tier.DEVICE)
        rows = buffer_table(promoted).allocated(Tier.DEVICE)
        try:
            [
                torch.empty(row.nbytes, dtype=torch.uint8, device=self._device)
                for key, row in rows.items()
                if key not in before
            ]
        except torch.OutOfMemoryError:
            self._failures = failed_allocations(self._device)
            is_available = False
        else:
            is_available = True
        return bool(self._ranks.all_gather_host([is_available]).all())

    def _least_room(self, use: MemoryUse, *, is_stable: bool) -> int | None:
        """Return the bytes that are free on the device of every rank; None: that is not known."""
        reserve = max(int(_RESERVE_SHARE * use.total), _RESERVE_BYTES)
        room = use.total - use.others - max(use.peak, self._peak) - reserve
        rooms = self._ranks.all_gather_host([room if is_stable else math.nan])
        return None if rooms.isnan().any() else int(rooms.min())


def _with_share(spec: StepSpec, share: float) -> StepSpec:
    config = spec.config.replace(state_on={"device": share})
    return with_state_tiers(replace(spec, config=config), device_bytes)


def _reason_against(
    config: OffloadConfig, rules: Sequence[AnyRule], device: torch.device
) -> str | None:
    """Say why no state can move to the device, or is updated faster on the host."""
    if device.type == "cpu":
        return "the device is the CPU"
    of_kernels = [rule for rule in rules if isinstance(rule, KernelRule)]
    scalars = [rule.scalars(rule.defaults(), step=1, grad_scale=1.0, seed=0) for rule in of_kernels]
    is_narrow = config.state.format != "fp32"
    if is_narrow and not (len(scalars) == len(rules) and all(map(kernels.compiles, scalars))):
        return f"no kernel of the device updates state = '{config.state.format}' by this rule"
    return None
