"""Decides the options that a job leaves to its plan with "auto": `ranks.layers_per_stage`,
`offload.recompute_blocks`, `offload.state_on`, `offload.sums_on` and `offload.update`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from offloadtrain.config.job import Config, problems_of_ranks
from offloadtrain.config.offload import StateOn, SumsOn, UpdateMode
from offloadtrain.config.sections import optim_contradictions
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.times import Prediction, predict
from offloadtrain.step.layout.buffer_table import device_bytes
from offloadtrain.step.layout.state_tiers import device_share, filled, first_on_device
from offloadtrain.step.layout.tiers import Tier

FULL = 0.95
"""Share of the device's memory that a plan may fill: activations are estimated to 5 %."""

GAIN = 0.03
"""Least gain of a step for which sums move to the device and updates become speculative, equal to
a prediction's accuracy: both take memory, and sums there prevent an emergency checkpoint."""


class Planned(Protocol):
    """The parts of a plan that decisions depend on."""

    @property
    def has_room(self) -> bool: ...
    @property
    def share_that_fits(self) -> float: ...
    @property
    def prediction(self) -> Prediction: ...
    @property
    def fits(self) -> bool: ...
    @property
    def job(self) -> Config: ...
    def sums_that_fit(self, full: float) -> int: ...
    def divisions(self) -> Sequence[tuple[int, ...]]: ...


def decided(job: Config, planned: Callable[[Config], Planned]) -> Config:
    """Return the job with all open keys decided: the layers of each stage, then the fewest
    recomputed layers that fit, then as much state on the device as fits. If recompute and state are
    both open, the fastest of three numbers of recomputed layers is used: saved activations take
    device memory from state, and only a simulated step tells which is waited for. If open, all this
    is repeated for several shares of the gradient sums on the device, and for exact and speculative
    updates.
    """
    if job.offload.update == "auto":
        return _with_faster_update(job, planned)
    if job.offload.gradients.sums_tier == "auto":
        return _with_faster_sums(job, planned)
    if job.ranks.layers_per_stage == "auto":
        job = _with_balanced_stages(job, planned)
    if job.offload.activations.recompute_blocks != "auto":
        return _with_state_that_fits(job, planned)
    on_host = with_state_on(job, 0.0) if job.offload.state.tier == "auto" else job
    layers = range(_num_layers(job))
    fewest = bisect_left(layers, True, key=lambda n: planned(_with_recompute(on_host, n)).has_room)
    if job.offload.state.tier != "auto":
        return _with_recompute(job, fewest)
    numbers = sorted({fewest, (fewest + len(layers)) // 2, len(layers)})
    tried = [_with_state_that_fits(_with_recompute(job, n), planned) for n in numbers]
    return max(tried, key=lambda candidate: planned(candidate).prediction.tokens_per_s)


def _with_faster_update(job: Config, planned: Callable[[Config], Planned]) -> Config:
    """Return the job in mode "speculative" if a step with right predictions gains enough. If more
    than half of them are wrong, that mode stops predicting and updates as "exact" does."""
    exact = decided(with_update(job, "exact"), planned)
    guessing = with_update(job, "speculative")
    of_rule = optim_contradictions(job.optim, guessing.offload)
    if any(map(any, (guessing.offload.problems(), of_rule, problems_of_ranks(guessing)))):
        return exact
    speculative = decided(guessing, planned)
    if not planned(speculative).fits:
        return exact
    fast, slow = (planned(candidate).prediction.tokens_per_s for candidate in (speculative, exact))
    return speculative if fast >= slow * (1 + GAIN) else exact


def with_update(job: Config, mode: UpdateMode) -> Config:
    return replace(job, offload=job.offload.replace(update=mode))


def _with_faster_sums(job: Config, planned: Callable[[Config], Planned]) -> Config:
    """Return the job with the largest share of gradient sums on the device that fits. If recompute
    or state compete for the memory, use the fastest of three shares: the least with which
    everything else fits on the host, the largest, and their mean."""
    on_host = decided(with_sums_on(job, 0.0), planned)
    if job.train.grad_accum_steps == 1:
        return on_host
    is_needed = not planned(on_host).fits
    least = _with_least_on_device(job)
    most = planned(with_sums_on(least, 0.0)).sums_that_fit(1.0 if is_needed else FULL)
    needed = range(most) if is_needed else ()
    fewest = bisect_left(needed, True, key=lambda n: planned(with_sums_on(least, n / 100)).fits)
    shares = [most] if least == job else [fewest, (fewest + most) // 2, most]
    tried = [decided(with_sums_on(job, n / 100), planned) for n in sorted({*shares} - {0})]
    usable = [plan for plan in map(planned, tried) if (plan.fits if is_needed else plan.has_room)]
    if not usable:
        return on_host
    fastest = max(usable, key=lambda plan: plan.prediction.tokens_per_s)
    least_rate = 0.0 if is_needed else planned(on_host).prediction.tokens_per_s * (1 + GAIN)
    return fastest.job if fastest.prediction.tokens_per_s >= least_rate else on_host


def with_sums_on(job: Config, share: float) -> Config:
    """Return the job with this share of the gradient sums on the device; sums on the host are
    fp32."""
    down = job.offload.gradients.sums_dtype if share else "fp32"
    sums_on: SumsOn = {"device": share}
    if share in (0.0, 1.0):
        sums_on = "device" if share else "host"
    return replace(job, offload=job.offload.replace(sums_on=sums_on, sums_down=down))


def _with_least_on_device(job: Config) -> Config:
    """Return the job with its open options set to the values that take the least device memory."""
    if job.ranks.layers_per_stage == "auto":
        job = replace(job, ranks=replace(job.ranks, layers_per_stage=()))
    least = with_state_on(job, 0.0) if job.offload.state.tier == "auto" else job
    is_open = job.offload.activations.recompute_blocks == "auto"
    return _with_recompute(least, _num_layers(job)) if is_open else least


def with_decisions_of(job: Config, plan_job: Config) -> Config:
    """Return the job with its plan's decisions on gradient sums and update mode."""
    sums = plan_job.offload.gradients
    offload = job.offload.replace(
        sums_on=sums.sums_tier, sums_down=sums.sums_dtype, update=plan_job.offload.update
    )
    return replace(job, offload=offload)


def _with_balanced_stages(job: Config, planned: Callable[[Config], Planned]) -> Config:
    """Return the job with stages of about equal duration, as far as they fit, with other open
    options at the values that take the least memory."""

    def with_layers(config: Config, each: tuple[int, ...]) -> Config:
        return replace(config, ranks=replace(config.ranks, layers_per_stage=each))

    least = _with_least_on_device(job)
    tried = planned(least).divisions()
    fitting = (each for each in reversed(tried) if planned(with_layers(least, each)).fits)
    return with_layers(job, next(fitting, tried[-1]))


def with_state_on(job: Config, share: float) -> Config:
    """Return the job with this share of the state on the device."""
    state_on: StateOn = {"device": share} if share else "host"
    return replace(job, offload=job.offload.replace(state_on=state_on))


def _with_recompute(job: Config, count: int) -> Config:
    # Without a recomputed layer there is no layer input to partition.
    divides = job.offload.activations.partition and count > 0
    offload = job.offload.replace(recompute_blocks=count, partition_activations=divides)
    return replace(job, offload=offload)


def _with_state_that_fits(job: Config, planned: Callable[[Config], Planned]) -> Config:
    if job.offload.state.tier != "auto":
        return job
    return with_state_on(job, planned(with_state_on(job, 0.0)).share_that_fits)


def _num_layers(job: Config) -> int:
    if job.hf is None:
        return job.model.num_layers
    return sum(part.repeated for part in job.hf.parts or ())


SAME = 0.002
"""Relative gain of a simulated step below which more device memory is not worth it."""


def largest_share(placed: Placement, room: int) -> float:
    """Return the largest share of the state that fits on the device.

    Args:
        placed: placement with all state on the host.
        room: device bytes available to the engine.
    """
    limit = placed.config.offload.memory.device_limit
    limit = room if limit is None else min(limit, room)
    return device_share(filled(placed.spec, limit, device_bytes))


def fastest_share(placed: Placement, machine: Machine) -> float:
    """Return the smallest device share of state with which a step is as fast as in `placed`."""
    count = len(placed.spec.buckets_on(Tier.DEVICE))

    def seconds(number: int) -> float:
        spec = first_on_device(placed.spec, number)
        return predict(replace(placed, spec=spec), machine).seconds

    enough_s = seconds(count) * (1 + SAME)
    # If the device updates slower than the host, as with narrow formats, it gets no state.
    if seconds(0) <= enough_s:
        return 0.0
    fast = bisect_left(range(count + 1), True, key=lambda n: seconds(n) <= enough_s)
    return device_share(first_on_device(placed.spec, fast))
