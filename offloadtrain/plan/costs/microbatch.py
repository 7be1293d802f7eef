"""The cost of a microbatch: torch's memory, and the work of each block.

`plan.tracing` computes it with fake tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offloadtrain.config.job import Config


@dataclass(frozen=True, slots=True)
class Activations:
    """Device bytes at the peak of a micro-step.

    Attributes:
        saved: saved activations of all layers but the current one.
        layer: saved activations and temporaries of the current layer.
        logits: logits, their gradient and the loss's rows; outputs of the embedding and of the
            final norm; and the masks or bounds that separate documents.
        gradients: gradients of weights until the engine takes them.
    """

    saved: int
    layer: int
    logits: int
    gradients: int

    @property
    def total(self) -> int:
        return self.saved + self.layer + self.logits + self.gradients

    def owners(self) -> dict[str, int]:
        """Return the parts with their names in a plan, without empty ones."""
        named = {
            "activations": self.saved,
            "one layer at work": self.layer,
            "logits and loss": self.logits,
            "gradients in flight": self.gradients,
        }
        return {owner: size for owner, size in named.items() if size}


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The properties that determine the rate of fused attention.

    Attributes:
        width: channels of all heads together.
        length: keys per query.
        causal: only half of the scores are needed.
    """

    width: int
    length: int
    causal: bool


def _counts() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclass(slots=True)
class Work:
    """Compute and memory traffic of a set of operations.

    Attributes:
        products: geometric mean of a weight's sides → FLOPs of the products with it; for other
            products, the geometric mean of the two smaller sides.
        attention: FLOPs of fused attention, all scores counted.
        nbytes: bytes that all other operations read and write.
        launches: number of operations that move or compute anything.
        recomputed: FLOPs of recomputed products and attention.
    """

    products: dict[float, float] = field(default_factory=_counts)
    attention: dict[AttentionKind, float] = field(default_factory=_counts)
    nbytes: float = 0.0
    launches: float = 0.0
    recomputed: float = 0.0

    @property
    def flops(self) -> float:
        return sum(self.products.values()) + sum(self.attention.values())

    def add(self, other: Work) -> None:
        """Add the work of other operations."""
        for width, flops in other.products.items():
            self.products[width] += flops
        for kind, flops in other.attention.items():
            self.attention[kind] += flops
        self.nbytes += other.nbytes
        self.launches += other.launches
        self.recomputed += other.recomputed


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The work of one block in a microbatch; backward includes recompute."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The cost of a microbatch of a model.

    Attributes:
        blocks: block of the spec → its work. Work outside of all blocks (the loss) counts in the
            last one.
        activations: torch's device memory at its peak.
        block_inputs: bytes of each tensor that `activation` copies to the host.
    """

    blocks: Mapping[str, BlockCost]
    activations: Activations
    block_inputs: tuple[int, ...]

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward, recompute included."""
        return sum(block.forward.flops + block.backward.flops for block in self.blocks.values())

    @property
    def recomputed(self) -> float:
        """FLOPs of forwards that run again in backward."""
        return sum(block.backward.recomputed for block in self.blocks.values())


Trace = Callable[[Config], TracedStep]
"""A rank's part of a job, with resolved precision → the cost of a microbatch."""
