"""Experts that a step skips where they are unused: which parameters they are, and how many.

[Note: Unused experts]
`skip_unused` names parameters. Each is an expert of its own; or, stacked, it holds one per index of
its first axis: a tensor of three and more axes, and a matrix beside such a tensor in the same
module that has as many rows (the biases of stacked experts). They are in buckets of their own. An
expert is used if a parameter of its own got a gradient, or if its slice of a stacked gradient is
not all zeros, in any microbatch on any rank. Compute marks the used ones before gradients are
gathered (`Kind.MARK`), and `step()` reads the marks with the norm. So the operations of a step do
not depend on its data: the update of a bucket is one launch, which leaves out parts of its memory.

Those ranks agree that share the experts: tokens of others have come to them. So do those that hold
parts of the same experts, as a part of a gradient may be zeros where another one is not.

Whether an expert is used is known when the last microbatch has come on every rank. These buckets
are therefore updated in step() in every update mode. A second copy of the state would have to be
filled for unused experts, too, which is the traffic that is to be saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

STACKED_AXES = 3
"""A tensor of so many axes holds an expert per index of the first."""


def skips(name: str, patterns: Sequence[str]) -> bool:
    """Return whether `skip_unused` names this parameter."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def experts_in(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return parameter → the number of experts in it, from the names and sizes of all that are
    named in a block."""
    stacked = {_module(n): shape[0] for n, shape in sizes.items() if len(shape) >= STACKED_AXES}
    return {
        name: shape[0]
        if len(shape) >= STACKED_AXES
        or (len(shape) == 2 and stacked.get(_module(name)) == shape[0])
        else 1
        for name, shape in sizes.items()
    }


def _module(name: str) -> str:
    return name.rpartition(".")[0]
