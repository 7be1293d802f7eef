"""Random numbers of one rank's own among those that compute the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEEDS = 1 << 62


@contextmanager
def own_draws(part: int | None, device: torch.device) -> Iterator[None]:
    """Draw other random numbers inside on each part than on the others; None: as always.

    Outside all parts draw the same ones. Inside the generators begin anew, at a number that is
    drawn outside, so that a recompute draws the same again.
    """
    if part is None:
        yield
        return
    # On the host: nobody waits for the device.
    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + part)
        yield
