"""The division of a model among ranks, as one engine asks for it: [Note: Divisions] in
`engine.division`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.division import Division
from offloadtrain.optim import AnyRule
from offloadtrain.parallel.checks import check_parts, check_same_weights
from offloadtrain.parallel.norm import DividedNorm
from offloadtrain.parallel.unused_experts import UnusedExperts, check_skips
from offloadtrain.runtime.process_group import ALONE


@dataclass(frozen=True, kw_only=True)
class PartOfModel(Division):
    """One stage of a pipeline, one part of matrices, some of the experts, or all at once."""

    norm: DividedNorm = field(default_factory=lambda: DividedNorm(ALONE))
    skipping: UnusedExperts = field(default_factory=UnusedExperts)

    def check(
        self, model: nn.Module, rule: AnyRule, config: OffloadConfig, *, is_stage: bool
    ) -> None:
        check_parts(model, rule, self.parts, self.replicas, is_stage=is_stage)
        check_skips(model, config, rule, whole=not is_stage)

    def check_same_weights(self, names: Sequence[str], checksums: Sequence[float]) -> None:
        check_same_weights(names, checksums, self.parts)
