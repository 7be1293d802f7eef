"""What a run that goes on keeps from before, since its bits depend on it and nobody has set it."""

from __future__ import annotations

from dataclasses import dataclass

from offloadtrain.config.offload import Precision
from offloadtrain.train.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Kept:
    """As the checkpoint has it that a run goes on from.

    Attributes:
        precision: of the working weights.
        ranks: that trained.
        threads: of torch on each of them; 0: not recorded.
    """

    precision: Precision
    ranks: int
    threads: int


def kept_of(found: Checkpoint | None) -> Kept | None:
    """None: a new run, that keeps nothing."""
    if found is None:
        return None
    state = found.state
    return Kept(state["precision"], len(state["rng"]), state.get("threads", 0))
