"""The values that a plan may change keys of a job to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import Any

from offloadtrain.config.job import Config
from offloadtrain.config.offload import STATE_PRECISIONS, OffloadConfig
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.step.layout.formats import FORMATS


def combinations(
    job: Config, ranks: int, free: tuple[str, ...], *, traced: bool
) -> Iterator[dict[str, Any]]:
    """Yield the values of each combination that differ from the job's."""
    choices = choices_of(job, ranks, traced=traced)
    choices = {key: values for key, values in choices.items() if key in free}
    for values in product(*choices.values()):
        keys = {
            key: value
            for key, value in zip(choices, values, strict=True)
            if value != value_of(job, key)
        }
        if keys:
            yield keys


def choices_of(job: Config, ranks: int, *, traced: bool = False) -> dict[str, tuple[Any, ...]]:
    """`traced`: without activations that are kept, unless they are asked for: they take most memory
    of all, and a trace of their own."""
    policies: tuple[str, ...] = ("keep", "recompute", "offload")
    if traced:
        policies = tuple(dict.fromkeys((job.offload.activations.mode, "recompute", "offload")))
    precision, moments = job.offload.precision, update_rule(job.optim).moments
    states = (
        state
        for state, precisions in STATE_PRECISIONS.items()
        if precision in (*precisions, "auto") and FORMATS[state].keeps_moments(moments)
    )
    own_experts = job.hf is None and job.model.num_experts
    of_stage = ranks // (job.ranks.pipeline * job.ranks.tensor)
    return {
        "offload.working": distinct("device", "host", job.offload.weights.tier),
        "offload.activation": policies,
        "offload.state": tuple(states),
        "offload.state_on": distinct(job.offload.state.tier, "host"),
        "offload.sums_on": distinct(job.offload.gradients.sums_tier, "device"),
        "offload.sums_down": distinct(job.offload.gradients.sums_dtype, "working"),
        "ranks.shard": distinct(job.ranks.shard, 0),
        "ranks.expert": distinct(
            job.ranks.expert, gcd(job.model.num_experts, of_stage) if own_experts else 1
        ),
        "train.micro_batch": smaller_batches(job),
    }


def smaller_batches(job: Config) -> tuple[int, ...]:
    """Yield halved microbatches, in doubled number."""
    sizes = [job.train.micro_batch]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def larger_batches(job: Config) -> tuple[int, ...]:
    """Return the doubled microbatch, in half the number, if that is whole."""
    is_even = job.train.grad_accum_steps % 2 == 0
    return (2 * job.train.micro_batch,) if is_even else ()


def microbatches_of(job: Config, micro_batch: int) -> int:
    """Microbatches of this size in a step."""
    return job.train.micro_batch * job.train.grad_accum_steps // micro_batch


def distinct(*values: Any) -> tuple[Any, ...]:
    return tuple(value for at, value in enumerate(values) if value not in values[:at])


def value_of(job: Config, dotted: str) -> Any:
    section, key = dotted.split(".")
    options = getattr(job, section)
    return options.value(key) if isinstance(options, OffloadConfig) else getattr(options, key)
