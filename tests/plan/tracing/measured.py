"""What torch allocates in a step on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_allocated(step: Callable[[], None]) -> int:
    """Bytes that torch holds at most in a step, beyond what it holds between steps; runs two."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocated = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    return most
