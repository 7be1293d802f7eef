"""Random numbers of one rank's own among those that compute the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEEDS = 1 << 62


@contextmanager
def own_draws(part: int | None, device: torch.device) -> Iterator[None]:
    """Draw different random numbers on each part inside the context; None: change nothing.

    Outside the context all parts draw the same numbers. Inside, the generators are seeded with a
    number that is drawn outside, so that recompute draws the same numbers again.
    """
    if part is None:
        yield
        return
    # On the host, without a wait for the device.
    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + part)
        yield
