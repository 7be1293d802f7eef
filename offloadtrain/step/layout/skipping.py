"""Experts that a step skips while they are unused: their parameters, and their number.

[Note: Unused experts]
`skip_unused` names parameters. Each is an expert; or, stacked, it contains one expert per index of
its first axis: a tensor of three or more axes, and a matrix next to such a tensor in the same
module with as many rows (the biases of stacked experts). They are in separate buckets. An
expert is used if its parameter got a gradient, or if its slice of a stacked gradient is
not all zeros, in any microbatch on any rank. Compute marks the used experts before gradients are
gathered (`Kind.MARK`), and `step()` reads the marks with the norm. So the operations of a step do
not depend on its data: the update of a bucket is one launch, which skips parts of its memory.

Ranks that share experts agree on the marks: tokens of other ranks may have reached them. So do
ranks with parts of the same experts, as a part of a gradient may be zeros while another part is
not.

Whether an expert is used is known when the last microbatch has run on every rank. These buckets
are therefore updated in step() in every update mode. A second copy of the state would have to be
filled for unused experts, too, which is the traffic that skipping saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

STACKED_AXES = 3
"""A tensor with at least this number of axes contains an expert per index of the first axis."""


def skips(name: str, patterns: Sequence[str]) -> bool:
    """Return whether `skip_unused` names this parameter."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def experts_in(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return parameter → number of experts in it, from the names and sizes of all parameters that
    are named in a block."""
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
