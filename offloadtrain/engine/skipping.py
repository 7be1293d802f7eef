"""Buckets whose update leaves out what a step has not used (`skip_unused`): the engine's view.

An entry is a parameter, or a slice of one. How entries are marked, and what the update and the
upload leave out, is decided by `Division.skipping`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from offloadtrain.optim import UpdateRule
from offloadtrain.runtime.lanes import Buffer, Operation
from offloadtrain.runtime.lanes.base import LaneTotals
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import Share, local
from offloadtrain.step.layout.skipping import experts_in, skips
from offloadtrain.step.program.operations import Launch


class Usage(Protocol):
    """The entries of one bucket, and which of them got a gradient in this step. `slot` is one of
    the bucket's."""

    def mark(self, op: Launch, delivered: Sequence[tuple[Any, Tensor]]) -> Operation:
        """Return the function of a `MARK`; called once for each, on the training thread."""

    def update(
        self, op: Launch, bucket: Any, rule: UpdateRule, group: Mapping[str, Any], seed: int
    ) -> Operation:
        """Return the function of an `ADAM`."""

    def upload(self, op: Launch, totals: LaneTotals) -> Operation:
        """Return the function of a `WEIGHTS_UP`; takes the bytes that stay out of `totals`."""

    def advance(self) -> None:
        """Count a step that is decided and not skipped."""

    def steps_of(self, slot: Any) -> Tensor:
        """View the steps of a parameter: (), or (entries,)."""

    def steps_by_entry(self, slot: Any, share: Share) -> list[int]:
        """Return the steps of all entries of a parameter, those of other ranks included."""

    def load_steps(self, slot: Any, share: Share, steps: float | Sequence[float] | Tensor) -> None:
        """Set the steps of a parameter's entries; one number stands for all."""


class Skipping(Protocol):
    """Makes the `Usage` of each bucket."""

    def usage_of(self, slots: Sequence[Any], counts: Sequence[int]) -> Usage:
        """Make the usage of a bucket; `counts`: entries in each parameter."""

    def agree(self, of_buckets: Sequence[tuple[Any, Buffer]], among: Sequence[Ranks]) -> None:
        """Exchange the marks of buckets among ranks."""


def entries_in(model: nn.Module, patterns: Sequence[str]) -> dict[str, int]:
    """Return each trained parameter that a pattern names → the number of entries in it, or in this
    rank's part of it: see [Note: Unused experts] in `step.layout.skipping`."""
    if not patterns:
        return {}
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel())
    return experts_in({n: tuple(local(p).shape) for n, p in named if skips(n, patterns)})
