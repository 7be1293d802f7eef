"""The interface between an engine and a model that is divided among ranks.

[Note: Divisions]
Usually the ranks that share an engine's state hold the same complete model. A package that
divides models makes a `Division` for each engine and overrides what differs. The engine asks for
four things, and is independent of the ways to divide a model:
* which ranks share a bucket: `replicas` and `sharers`;
* how the norm is summed: `norm`, a `NormExchange`, if other engines have other parameters;
* where a micro-step ends: `in_order`, and `OffloadOptimizer.split` for steps that end in several
  calls;
* which rows are added to the table of buffers, and how they are updated: `weight_versions`,
  `gradient_sums`, `update_policy` and `skipping`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.optim import AnyRule, UpdateRule
from offloadtrain.runtime.lanes import Buffer, Operation
from offloadtrain.runtime.lanes.base import LaneTotals
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.runtime.tensor_parts import Share, holds_experts, local
from offloadtrain.step.layout.skipping import experts_in, skips
from offloadtrain.step.layout.step_spec import UpdatePolicy
from offloadtrain.step.program.operations import Launch


@dataclass(frozen=True, slots=True)
class Measured:
    """The sums of squares of a step's gradient, equal on all ranks.

    Attributes:
        of_parameter: sum of squares per parameter, of gradients summed over ranks and loss-scaled.
        nonfinite: parameter whose sum is not finite → the ranks whose shards contain the values.
        intents: (ranks, n) fp64 on the host: what each rank is about to do.
    """

    of_parameter: Sequence[float]
    nonfinite: dict[str, tuple[int, ...]]
    intents: Tensor


class NormMember(Protocol):
    """The part of an engine that a `NormExchange` uses: implemented by `norm.NormMeasure`."""

    @property
    def names(self) -> list[str]: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def counts(self) -> list[float]: ...
    @property
    def divided(self) -> Collection[int]: ...
    def measure_local(self, intent: Sequence[float]) -> Measured: ...
    def intent_of_part(self, intent: Sequence[float]) -> list[float]: ...
    def check_ranks(self, ranks: Ranks, rows: Tensor, step_count: float) -> None: ...


class NormExchange(Protocol):
    """Adds the sums of squares of an engine's parameters to those of the rest of the model."""

    def join(self, member: NormMember) -> None:
        """Add an engine of this process."""

    def send(self, member: NormMember, intent: Sequence[float]) -> Callable[[], Measured]:
        """Measure the engine's parameters and send the sums to the other ranks.

        Args:
            intent: values that must be equal on every process, see `norm.NormMeasure.send`.

        Returns:
            A function that waits for the other ranks and returns the sums of the complete model.
        """

    def compare(self, member: NormMember, intent: Sequence[float]) -> None:
        """Compare what may have changed since the norm was measured; raises RankError."""


class Usage(Protocol):
    """The entries of a bucket, and which of them received a gradient in this step; an entry is a
    parameter, or a slice of one. The update skips the other entries (`skip_unused`). `slot` is a
    slot of the bucket."""

    def mark(self, op: Launch, delivered: Sequence[tuple[Any, Tensor]]) -> Operation:
        """Return the function of a `MARK`; called once per launch, on the training thread."""

    def update(
        self, op: Launch, bucket: Any, rule: UpdateRule, group: Mapping[str, Any], seed: int
    ) -> Operation:
        """Return the function of an `ADAM`."""

    def upload(self, op: Launch, totals: LaneTotals) -> Operation:
        """Return the function of a `WEIGHTS_UP`; subtracts the bytes of skipped entries from
        `totals`."""

    def advance(self) -> None:
        """Count a step that is decided and not skipped."""

    def steps_of(self, slot: Any) -> Tensor:
        """View the step counts of a parameter: (), or (entries,)."""

    def steps_by_entry(self, slot: Any, share: Share) -> list[int]:
        """Return the step counts of all entries of a parameter, including those of other ranks."""

    def load_steps(self, slot: Any, share: Share, steps: float | Sequence[float] | Tensor) -> None:
        """Set the step counts of a parameter's entries; a single number applies to all."""


class Skipping(Protocol):
    """Makes the `Usage` of each bucket."""

    def usage_of(self, slots: Sequence[Any], counts: Sequence[int]) -> Usage:
        """Make the usage of a bucket; `counts`: entries in each parameter."""

    def agree(self, of_buckets: Sequence[tuple[Any, Buffer]], among: Sequence[Ranks]) -> None:
        """Exchange the marks of buckets among ranks."""


def entries_in(model: nn.Module, patterns: Sequence[str]) -> dict[str, int]:
    """Return trained parameter that a pattern matches → number of entries in it, or in this
    rank's part of it: see [Note: Unused experts] in `step.layout.skipping`."""
    if not patterns:
        return {}
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel())
    return experts_in({n: tuple(local(p).shape) for n, p in named if skips(n, patterns)})


class SplitSteps(Protocol):
    """Ends the steps of an optimizer in several calls: see `OffloadOptimizer.split`."""

    def sample_timeline(self) -> None:
        """Record the lanes from the next decision on, until the one after it."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """The part of a model that an engine trains; by default the complete model, equal on all ranks.

    Attributes:
        replicas: the ranks that hold the same part of the model and share its state.
        stages: the ranks that hold the other pipeline stages, for the same batch.
        parts: the ranks that hold the other parts of its DTensors, and have the same inputs.
        first: index of its first parameter in the complete model, which seeds stochastic
            rounding.
        weight_versions: number of versions of its working weights.
        gradient_sums: number of sums of its gradients; two if a step is decided after gradients of
            the next step have begun to arrive.
        update_policy: as in `StepSpec`.
        skipping: makes the usage of buckets that `skip_unused` names; None: no such bucket.
        in_order: backwards run in the order of their forwards, oldest first.
    """

    replicas: Ranks = ALONE
    stages: Ranks = ALONE
    parts: Ranks = ALONE
    norm: NormExchange | None = None
    first: int = 0
    weight_versions: int = 1
    gradient_sums: int = 1
    update_policy: UpdatePolicy | None = None
    skipping: Skipping | None = None
    in_order: bool = False

    @property
    def size(self) -> int:
        """Number of ranks of the complete model."""
        return self.replicas.everyone.size * self.stages.size * self.parts.size

    def sharers(self, param: Tensor) -> Ranks:
        """Return the ranks of `replicas` that share the state of a parameter."""
        return self.replicas.of_experts if holds_experts(param) else self.replicas

    def check(
        self, model: nn.Module, rule: AnyRule, config: OffloadConfig, *, is_stage: bool
    ) -> None:
        """Raises ModelError for a model that is divided in another way; `is_stage`: the model is
        one of several stages."""

    def check_same_weights(self, names: Sequence[str], checksums: Sequence[float]) -> None:
        """Compare the first values of parameters that all `parts` hold in full; raises
        RankError."""
