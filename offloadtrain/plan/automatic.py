"""What a job leaves to its plan: "auto" of `offload.recompute_blocks` and `offload.state_on`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from offloadtrain.config.job import Config
from offloadtrain.config.offload import StateOn
from offloadtrain.plan.prediction import Prediction

FULL = 0.95
"""The share of the device's memory that is planned full: activations are estimated to 5 %."""


class Planned(Protocol):
    """A plan, as far as it decides."""

    @property
    def has_room(self) -> bool: ...
    @property
    def share_that_fits(self) -> float: ...
    @property
    def prediction(self) -> Prediction: ...


def decided(job: Config, planned: Callable[[Config], Planned]) -> Config:
    """Return the job with both keys decided: the fewest layers recomputed that fit, and then as
    much state on the device. Where both are open, of three numbers of layers the fastest: what is
    kept on the device takes room from state, and which of them is waited for is the step's to say.
    """
    if job.offload.recompute_blocks != "auto":
        return _with_state_that_fits(job, planned)
    on_host = with_state_on(job, 0.0) if job.offload.state_on == "auto" else job
    layers = range(_num_layers(job))
    fewest = bisect_left(layers, True, key=lambda n: planned(_with_recompute(on_host, n)).has_room)
    if job.offload.state_on != "auto":
        return _with_recompute(job, fewest)
    numbers = sorted({fewest, (fewest + len(layers)) // 2, len(layers)})
    tried = [_with_state_that_fits(_with_recompute(job, n), planned) for n in numbers]
    return max(tried, key=lambda one: planned(one).prediction.tokens_per_s)


def with_state_on(job: Config, share: float) -> Config:
    """Return the job with so large a share of the state on the device."""
    state_on: StateOn = {"device": share} if share else "host"
    return replace(job, offload=replace(job.offload, state_on=state_on))


def _with_recompute(job: Config, count: int) -> Config:
    return replace(job, offload=replace(job.offload, recompute_blocks=count))


def _with_state_that_fits(job: Config, planned: Callable[[Config], Planned]) -> Config:
    if job.offload.state_on != "auto":
        return job
    return with_state_on(job, planned(with_state_on(job, 0.0)).share_that_fits)


def _num_layers(job: Config) -> int:
    if job.hf is None:
        return job.model.num_layers
    return sum(part.repeated for part in job.hf.parts or ())
