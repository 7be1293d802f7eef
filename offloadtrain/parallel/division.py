"""The division of a model among ranks, as one engine asks for it: [Note: Divisions] in
`engine.division`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from offloadtrain.engine.division import Division
from offloadtrain.optim import AnyRule
from offloadtrain.parallel.checks import check_parts, check_same_weights
from offloadtrain.parallel.norm import DividedNorm
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.runtime.tensor_parts import holds_experts


@dataclass(frozen=True, kw_only=True)
class PartOfModel(Division):
    """One stage of a pipeline, one part of matrices, some of the experts, or all at once."""

    norm: DividedNorm = field(default_factory=lambda: DividedNorm(ALONE))

    def sharers(self, param: Tensor) -> Ranks:
        """Return the ranks that hold the same experts; of all else, all replicas."""
        return self.replicas.of_experts if holds_experts(param) else self.replicas

    def check(self, model: nn.Module, rule: AnyRule, *, is_stage: bool) -> None:
        check_parts(model, rule, self.parts, self.replicas, is_stage=is_stage)

    def check_same_weights(self, names: Sequence[str], checksums: Sequence[float]) -> None:
        check_same_weights(names, checksums, self.parts)
