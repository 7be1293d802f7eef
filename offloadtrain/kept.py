"""What a run that goes on keeps from before, since its bits depend on it and nobody has set it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from offloadtrain import checkpoint
from offloadtrain.config import Precision
from offloadtrain.manifest import STATE


@dataclass(frozen=True, slots=True)
class Kept:
    """As the newest checkpoint has it.

    Attributes:
        precision: of the working weights.
        ranks: that trained.
        threads: of torch on each of them; 0: not recorded.
    """

    precision: Precision
    ranks: int
    threads: int


def kept_from(checkpoints: Path) -> Kept | None:
    """Read it before anything is built; None where no checkpoint can be read.

    Whether a checkpoint is good is not decided here: all of a run's have the same precision, and a
    damaged one is told about when the run takes over the newest good one.
    """
    for path in checkpoint.find(checkpoints):
        try:
            state = json.loads((path / STATE).read_bytes())
            return Kept(state["precision"], len(state["rng"]), state.get("threads", 0))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
