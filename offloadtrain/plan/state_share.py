"""The share of the state that a job keeps on the device if `offload.state_on` is "auto"."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.times import predict
from offloadtrain.step.layout.buffer_table import device_bytes
from offloadtrain.step.layout.state_tiers import device_share, filled, first_on_device
from offloadtrain.step.layout.tiers import Tier

SAME = 0.002
"""A difference of the simulated step that is not worth any memory."""


def most(placed: Placement, room: int) -> float:
    """Return the largest share that fits.

    Args:
        placed: with all of the state on the host.
        room: device bytes for all that the engine holds.
    """
    limit = placed.config.offload.memory.device_limit
    limit = room if limit is None else min(limit, room)
    return device_share(filled(placed.spec, limit, device_bytes))


def enough(placed: Placement, machine: Machine) -> float:
    """Return the smallest share with which a step is as fast as with the placement's own."""
    count = len(placed.spec.buckets_on(Tier.DEVICE))

    def seconds(number: int) -> float:
        spec = first_on_device(placed.spec, number)
        return predict(replace(placed, spec=spec), machine).seconds

    enough_s = seconds(count) * (1 + SAME)
    # Where the device updates slower than the host, as it does narrow formats, none is taken.
    if seconds(0) <= enough_s:
        return 0.0
    fast = bisect_left(range(count + 1), True, key=lambda n: seconds(n) <= enough_s)
    return device_share(first_on_device(placed.spec, fast))
