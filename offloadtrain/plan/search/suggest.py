"""Changes that make a job fit, and the fastest placement that fits."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from math import gcd
from typing import Any

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.job import Config, problems_of_ranks
from offloadtrain.config.offload import (
    OFFLOAD_SAVED_ABOVE,
    STATE_PRECISIONS,
    OffloadConfig,
)
from offloadtrain.config.sections import optim_contradictions
from offloadtrain.hardware.machine import Machine
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.plan.automatic import fastest_share, with_decisions_of, with_state_on
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.placement import PlanError, resolved
from offloadtrain.plan.plan import Plan, make
from offloadtrain.step.layout.formats import FORMATS

_log = logging.getLogger(__name__)


def combinations(job: Config, ranks: int, free: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield each combination of values for `free` keys, without values equal to the job's."""
    choices = choices_of(job, ranks)
    choices = {key: values for key, values in choices.items() if key in free}
    for values in product(*choices.values()):
        keys = {
            key: value
            for key, value in zip(choices, values, strict=True)
            if value != value_of(job, key)
        }
        if keys:
            yield keys


def choices_of(job: Config, ranks: int) -> dict[str, tuple[Any, ...]]:
    """Return the values to try for each key, including the job's."""
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
        "offload.activation": distinct(
            job.offload.activations.mode, "keep", "recompute", "selective", "offload"
        ),
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
    """Return the microbatch and its halves; their number per step doubles."""
    sizes = [job.train.micro_batch]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def larger_batches(job: Config) -> tuple[int, ...]:
    """Return (doubled microbatch,) if the number of microbatches can be halved, else ()."""
    is_even = job.train.grad_accum_steps % 2 == 0
    return (2 * job.train.micro_batch,) if is_even else ()


def microbatches_of(job: Config, micro_batch: int) -> int:
    """Return the number of microbatches of this size in a step."""
    return job.train.micro_batch * job.train.grad_accum_steps // micro_batch


def distinct(*values: Any) -> tuple[Any, ...]:
    return tuple(value for at, value in enumerate(values) if value not in values[:at])


def value_of(job: Config, dotted: str) -> Any:
    section, key = dotted.split(".")
    options = getattr(job, section)
    return options.value(key) if isinstance(options, OffloadConfig) else getattr(options, key)


SIMULATED = 12
"""Most candidates that are simulated; each takes a fraction of a second."""

PLACES = ("offload.working", "offload.activation")
SUMS = ("offload.sums_on", "offload.sums_down")
OFFLOAD = (*PLACES, "offload.state", "offload.state_on", *SUMS, "ranks.shard", "ranks.expert")
ALL = (*OFFLOAD, "train.micro_batch")

SAME = 0.03
"""Speed difference below a prediction's accuracy, for which fewer changes are preferred."""


@dataclass(frozen=True, slots=True)
class Change:
    """Changed values of keys, and the resulting plan.

    Attributes:
        keys: dotted key → value.
    """

    keys: dict[str, Any]
    plan: Plan

    @property
    def text(self) -> str:
        return text_of(self.keys)


def nearest(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int,
    most: int = 5,
    trace: Trace | None = None,
    *,
    with_fewer_tokens: bool = False,
) -> list[Change]:
    """Return changes that make the job fit, with the fewest keys, fastest first.

    They move weights and block inputs between device and host, change the state format, or use more
    and smaller microbatches with the same tokens per step. If none of these suffices, a step gets
    fewer tokens: as many as fit in one microbatch, which needs no sums; then smaller pieces and
    shorter sequences. If nothing fits, state, weights and gradients go to a drive. If
    that does not fit either, the only change is the one that lacks least: its plan does not fit.

    Args:
        with_fewer_tokens: skip changes with the same tokens per step; none is known to fit.
    """
    changes = () if with_fewer_tokens else _promising(job, name, machine, ranks, trace=trace)
    fitting = [change for change in changes if change.plan.fits]
    fitting = fitting or _single_microbatch_changes(job, name, machine, ranks, trace)
    if not fitting:
        fitting = _smaller_pieces(job, name, machine, ranks, trace)
    if not any(change.plan.fits for change in fitting):
        fitting = _on_disk(job, name, machine, ranks, trace) or fitting
    fitting.sort(key=lambda change: len(change.keys))
    # Leave out supersets of another change.
    fewest = [
        change
        for change in fitting
        if not any(other.keys.items() < change.keys.items() for other in fitting)
    ]
    first = _fastest(fewest[:SIMULATED])[:most]
    less = (_with_less_recompute(job, change, name, machine, ranks, trace) for change in first)
    return _fastest([*{change.text: change for change in less}.values()])


def of_each_placement(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int,
    free: Collection[str] = ALL,
    trace: Trace | None = None,
    *,
    most: int,
) -> list[Change]:
    """Return the placements and state formats that fit, each with the largest microbatch that fits,
    fastest first; among equally fast ones the most exact state first.

    Args:
        free: the keys that may change.
        most: number of fastest changes that are needed; others may be left out unsimulated.
        trace: see `plan.make`.

    Raises:
        OffloadTrainError: the unchanged job cannot be planned.
    """
    largest: dict[tuple[Any, ...], Change] = {}
    as_it_is = Change({}, make(job, name, machine, ranks, trace))
    changes = _promising(job, name, machine, ranks, free, trace, largest_only=True)
    for candidate in (as_it_is, *changes):
        if candidate.plan.fits:
            where = tuple(str(value_of(candidate.plan.job, key)) for key in OFFLOAD)
            largest.setdefault(where, candidate)  # smaller microbatches follow
    candidates = [change for where, change in largest.items() if not _slower(where, largest)]
    ordered = _fastest(_fast_enough(candidates, most))
    best = ordered[0].plan.prediction.tokens_per_s if ordered else 0.0
    near = [
        change for change in ordered if change.plan.prediction.tokens_per_s >= best * (1 - SAME)
    ]
    near.sort(key=lambda change: change.plan.job.offload.gradients.sums_dtype == "working")
    near.sort(key=lambda change: list(STATE_PRECISIONS).index(change.plan.job.offload.state.format))
    return [*near, *ordered[len(near) :]]


QUICKER = (("device", "host", "disk"), ("keep", "selective", "recompute", "offload"))
"""Values of `PLACES`, ordered so that each moves, or computes, no more than the next."""


def _slower(where: tuple[str, ...], largest: Mapping[tuple[str, ...], Change]) -> bool:
    """Return True if a change with less recompute, or nearer weights, fits with as large a
    microbatch, so that this one need not be simulated."""
    places, rest = where[: len(PLACES)], where[len(PLACES) :]
    if not all(place in order for place, order in zip(places, QUICKER, strict=True)):
        return False
    quicker = (
        order[: order.index(place) + 1] for place, order in zip(places, QUICKER, strict=True)
    )
    others = (largest.get((*other, *rest)) for other in product(*quicker) if other != places)
    size = largest[where].plan.job.train.micro_batch
    return any(other and other.plan.job.train.micro_batch >= size for other in others)


def single_changes(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None = None
) -> list[Change]:
    """Return every change of a single key that fits: placements, formats, update modes, and the
    number of microbatches per step."""
    choices = choices_of(job, ranks) | {
        "offload.state_on": distinct("auto", "host"),
        "offload.recompute_blocks": ("auto",) if job.offload.activations.recomputes else (),
        "offload.sums_on": ("auto", "host"),
        "offload.sums_down": ("fp32", "working"),
        "ranks.layers_per_stage": ("auto",) if job.ranks.pipeline > 1 else (),
        # A trace has eager operations only.
        "offload.compile_blocks": (True,) if trace is None and not machine.on_cpu else (),
        "offload.update": ("exact", "speculative", "delayed"),
        "train.micro_batch": (*smaller_batches(job), *larger_batches(job)),
    }
    candidates = (
        _changed(job, {key: value}, name, machine, ranks, trace)
        for key, values in choices.items()
        for value in values
        if value != value_of(job, key)
    )
    return [change for change in candidates if change is not None and change.plan.fits]


def automatic(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None = None
) -> Change:
    """Return the fastest placement of weights and block inputs that fits and keeps all numerics.

    Raises:
        PlanError: no placement fits.
    """
    # For a traced model every other activation policy would need another trace.
    free = PLACES if trace is None else PLACES[:1]
    candidates = _candidates(job, name, machine, ranks, free=free, trace=trace)
    places = [change for change in candidates if change.plan.fits]
    as_it_is = make(job, name, machine, ranks, trace)
    if as_it_is.fits:
        places.append(Change({}, as_it_is))
    if not places:
        raise PlanError(
            f"{job.name} does not fit in any placement: {' '.join(as_it_is.problems)}. Use a "
            'narrower offload.state ("split16", "int8"), a smaller microbatch or a smaller model'
        )
    best = _fastest(places)[0].plan.prediction.tokens_per_s
    near = [change for change in places if change.plan.prediction.tokens_per_s >= best * (1 - SAME)]
    chosen = min(near, key=lambda change: len(change.keys))
    return _with_less_recompute(job, chosen, name, machine, ranks, trace)


def _with_less_recompute(
    job: Config, change: Change, name: str, machine: Machine, ranks: int, trace: Trace | None
) -> Change:
    """Return a change to full recompute with the fewest recomputed layers that fit instead, if that
    is faster; gradient sums that it puts on the device then get the share that is fastest with
    them. Full recompute stays if activations are only estimated from a shape, or if other numbers
    of layers would need further traces."""
    of_all = change.plan.job.offload.activations.recompute_blocks is None
    if not ("offload.activation" in change.keys and of_all and change.plan.fits):
        return change
    if trace is not None or job.hf is not None:
        return change
    is_open = {key: "auto" for key in ("offload.sums_on",) if key in change.keys}
    is_open["offload.recompute_blocks"] = "auto"
    less = _changed(job, change.keys | is_open, name, machine, ranks, trace)
    if less is not None and less.plan.job.offload.activations.recompute_blocks == 0:
        del is_open["offload.recompute_blocks"]
        is_open["offload.activation"] = "keep"  # equals 0 recomputed layers
        less = _changed(job, change.keys | is_open, name, machine, ranks, trace)
    if less is None or not less.plan.fits:
        return change
    if less.plan.prediction.tokens_per_s < change.plan.prediction.tokens_per_s * (1 + SAME):
        return change
    decided = is_open.keys() | change.keys.keys() & {*SUMS}
    return Change(change.keys | {key: value_of(less.plan.job, key) for key in decided}, less.plan)


def settled(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None = None
) -> Config:
    """Return the job with "auto" placement, and the decisions of `plan.automatic`, for this
    machine.

    Raises:
        PlanError: no placement fits.
    """
    if job.device.placement == "auto":
        best = automatic(resolved(job, machine), name, machine, ranks, trace)
        job = _consistent(job, best.keys)
    settings = (
        job.offload.activations.recompute_blocks,
        job.offload.state.tier,
        job.ranks.layers_per_stage,
        job.offload.update,
    )
    if "auto" not in (*settings, job.offload.gradients.sums_tier):
        return job
    plan = make(job, name, machine, ranks, trace)
    job = with_decisions_of(replace(job, ranks=plan.job.ranks), plan.job)
    if job.offload.activations.recompute_blocks == "auto":
        decided = plan.job.offload.activations
        offload = job.offload.replace(
            recompute_blocks=decided.recompute_blocks, partition_activations=decided.partition
        )
        job = replace(job, offload=offload)
    if job.offload.state.tier != "auto":
        return job
    return with_state_on(job, fastest_share(plan.placed, plan.machine) if plan.fits else 0.0)


def planned(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None = None
) -> Plan:
    """Return the plan of the job with "auto" placement resolved. If no placement fits, plan the
    unchanged job, so that the plan can report what makes it fit."""
    if job.device.placement == "auto":
        try:
            return automatic(resolved(job, machine), name, machine, ranks, trace).plan
        except PlanError:
            pass  # if memory is not the reason, `make` raises it again
    return make(job, name, machine, ranks, trace)


def applied(job: Config, keys: dict[str, Any]) -> Config:
    """Return the job with other values for dotted keys."""
    for dotted, value in keys.items():
        section, key = dotted.split(".")
        options = getattr(job, section)
        is_offload = isinstance(options, OffloadConfig)
        changed: Any = options.replace if is_offload else partial(replace, options)
        job = replace(job, **{section: changed(**{key: value})})
    return job


def _fastest(changes: Sequence[Change]) -> list[Change]:
    def order(change: Change) -> tuple[float, int]:
        return -round(change.plan.prediction.tokens_per_s, 6), len(change.keys)

    return sorted(changes, key=order)


def _fast_enough(changes: Sequence[Change], most: int) -> list[Change]:
    """Return the changes that may be among the `most` fastest, or as fast as the fastest."""
    simulated: list[Change] = []
    for change in sorted(changes, key=lambda change: -change.plan.most_tokens_per_s):
        rates = sorted(-other.plan.prediction.tokens_per_s for other in simulated)
        if len(rates) >= most:
            needed = min(-rates[most - 1], -rates[0] * (1 - SAME))
            if change.plan.most_tokens_per_s < needed:
                break
        simulated.append(change)
    return simulated


ON_DISK = ("offload.state_on", "offload.working", "offload.grad_on")
"""Keys that move host data to a drive, the least slow first."""


def _on_disk(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None
) -> list[Change]:
    """Return the fastest change that fits with as little as possible on a drive: state, then
    weights, then gradients. The drive's rates are the machine's, or assumed."""
    free = ("offload.activation", "offload.state", "train.micro_batch")
    for count in range(1, len(ON_DISK) + 1):
        keys: dict[str, Any] = dict.fromkeys(ON_DISK[:count], "disk")
        if _changed(job, dict(keys), name, machine, ranks, trace) is not None:
            moved = _consistent(job, keys)
            for best in of_each_placement(moved, name, machine, ranks, free, trace, most=1):
                return [Change(keys | best.keys, best.plan)]
    return []


def _single_microbatch_changes(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None
) -> list[Change]:
    """Return changes that reduce a step to one microbatch of the largest power of two of sequences
    per rank that fits; empty if none fits."""
    max_per_rank = (job.train.micro_batch * job.train.grad_accum_steps - 1) // ranks

    def changes_that_fit(power: int) -> Iterator[Change]:
        return _one_microbatch(job, ranks << power, name, machine, ranks, trace)

    def none_fits(power: int) -> bool:
        return next(changes_that_fit(power), None) is None  # more changes would need more traces

    powers = range(max_per_rank.bit_length())
    # If the smallest size does not fit, no other size needs to be traced.
    if not powers or none_fits(0):
        return []
    return list(changes_that_fit(bisect_left(powers, True, lo=1, key=none_fits) - 1))


def _one_microbatch(
    job: Config, sequences: int, name: str, machine: Machine, ranks: int, trace: Trace | None
) -> Iterator[Change]:
    """Yield changes that fit with steps of one microbatch of this many sequences."""
    keys: dict[str, Any] = {"train.micro_batch": sequences}
    if job.train.global_batch_tokens:
        keys["train.global_batch_tokens"] = sequences * job.data.seq_len
    changed = applied(job, keys | {"train.grad_accum_steps": 1})
    if not job.train.global_batch_tokens:
        keys["train.grad_accum_steps"] = 1
    for change in _promising(changed, name, machine, ranks, free=OFFLOAD, trace=trace):
        if change.plan.fits:
            yield Change(keys | change.keys, change.plan)


SHORTEST = 128
"""Shortest proposed sequence, in tokens."""


def _smaller_pieces(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None
) -> list[Change]:
    """Return changes to one sequence per rank, a chunked loss, one slot for streamed blocks, and
    the longest sequence that fits; or the single change that lacks least."""
    lengths, length = [job.data.seq_len], job.data.seq_len // 2
    while length >= SHORTEST:
        lengths.append(length)
        length //= 2
    # If the shortest does not fit, no other needs to be traced.
    in_parts = True
    if not (shortest := _one_sequence(job, lengths[-1], name, machine, ranks, trace)):
        in_parts = job.train.chunked_loss  # the model does not support a chunked loss
        shortest = _one_sequence(job, lengths[-1], name, machine, ranks, trace, in_parts=in_parts)
    if not any(two.plan.fits for two in shortest):
        return sorted(shortest, key=lambda two: two.plan.missing_bytes)[:1]
    longer = (
        _one_sequence(job, seq_len, name, machine, ranks, trace, in_parts=in_parts)
        for seq_len in lengths[:-1]
    )
    fitting = (
        [change for change in changes if change.plan.fits] for changes in chain(longer, [shortest])
    )
    return next(changes for changes in fitting if changes)


def _one_sequence(
    job: Config,
    length: int,
    name: str,
    machine: Machine,
    ranks: int,
    trace: Trace | None,
    *,
    in_parts: bool = True,
) -> list[Change]:
    """Return changes to steps of one sequence of this length per rank; `in_parts`: with a chunked
    loss."""
    keys = {
        "train.micro_batch": ranks,
        "train.global_batch_tokens": ranks * length if job.train.global_batch_tokens else 0,
        "train.grad_accum_steps": 1,
        "train.chunked_loss": in_parts if job.makes_logits else job.train.chunked_loss,
        "offload.device_slots": 1,
        "data.seq_len": length,
    }
    changed = {key: value for key, value in keys.items() if value != value_of(job, key)}
    shorter = applied(job, changed)
    if "train.global_batch_tokens" in changed:
        changed.pop("train.grad_accum_steps", None)
    changes = _promising(shorter, name, machine, ranks, free=OFFLOAD, trace=trace)
    return [Change(changed | change.keys, change.plan) for change in changes]


def _promising(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int,
    free: Collection[str] = ALL,
    trace: Trace | None = None,
    *,
    largest_only: bool = False,
) -> Iterator[Change]:
    """Yield the combinations of other values, without those that another combination makes useless.

    Block inputs on the host take more host memory than the state that could move to the device
    instead. So if the device has room for them, a combination with block inputs on the host lacks
    more than the same without, which needs fewer changes: it is left out. If the device has no room
    for block inputs, it has none for all activations, nor for the results of products. If all
    activations fit, storing only the results of products is no faster. Each would need a separate
    trace.

    Args:
        largest_only: also leave out combinations that fit with a larger microbatch.
    """
    recomputes = job.offload.activations.mode == "recompute" and not machine.on_cpu
    if (as_it_is := _planned(job, name, machine, ranks, trace)) is None:
        return
    with_room: list[dict[str, Any]] = [{}] if as_it_is.device_has_room else []
    that_keep: list[dict[str, Any]] = []
    that_fit: list[dict[str, Any]] = [{}] if largest_only and as_it_is.fits else []
    for keys in combinations(job, ranks, free):
        rest = {key: value for key, value in keys.items() if key != "offload.activation"}
        if recomputes and len(rest) < len(keys):
            needed_without_room = keys["offload.activation"] == "offload"
            if needed_without_room == (rest in with_room):
                continue
            if keys["offload.activation"] == "selective" and rest in that_keep:
                continue
        of_any_size = {key: value for key, value in keys.items() if key != "train.micro_batch"}
        change, fits_larger = None, of_any_size in that_fit
        if not fits_larger:
            change = _changed(job, dict(keys), name, machine, ranks, trace)
        if fits_larger or (change and change.plan.device_has_room):
            with_room.append(keys)
            if keys.get("offload.activation") == "keep":
                that_keep.append(rest)
        if change:
            if largest_only and change.plan.fits:
                that_fit.append(of_any_size)
            yield change


def _candidates(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int,
    free: Collection[str] = ALL,
    trace: Trace | None = None,
) -> Iterator[Change]:
    """Yield every combination of other values without contradictions."""
    for keys in combinations(job, ranks, free):
        if change := _changed(job, keys, name, machine, ranks, trace):
            yield change


def _changed(
    job: Config,
    keys: dict[str, Any],
    name: str,
    machine: Machine,
    ranks: int,
    trace: Trace | None,
) -> Change | None:
    """Return the change with its plan; None if it contradicts itself or cannot be planned."""
    if "train.micro_batch" in keys and not job.train.global_batch_tokens:
        keys["train.grad_accum_steps"] = microbatches_of(job, keys["train.micro_batch"])
    changed = _consistent(job, keys)
    if changed.train.grad_accum_steps == 1 and keys.keys() & SUMS:
        return None  # nothing is summed
    of_rule = optim_contradictions(changed.optim, changed.offload)
    if any(map(any, (changed.offload.problems(), of_rule, problems_of_ranks(changed)))):
        return None
    plan = _planned(changed, name, machine, ranks, trace)
    return None if plan is None else Change(keys, plan)


def _planned(
    job: Config, name: str, machine: Machine, ranks: int, trace: Trace | None
) -> Plan | None:
    """Return the plan of a candidate; None if its placement is impossible, or, with a warning, if
    its model does not support it."""
    try:
        return make(job, name, machine, ranks, trace)
    except PlanError:
        return None
    except (OffloadTrainError, ValueError) as error:
        _warn_once(f"not tried: {error}")
        return None


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def _consistent(job: Config, keys: dict[str, Any]) -> Config:
    """Apply changed keys and adapt dependent ones; the tokens of a step stay the same."""
    changed = applied(job, keys)
    train = changed.train
    train = replace(train, grad_accum_steps=microbatches_of(job, train.micro_batch))
    changed = replace(changed, train=train)
    offload = changed.offload
    if offload.weights.tier == "device" and offload.weights.resident_blocks:
        offload = offload.replace(resident_blocks=None)
    if offload.activations.mode not in ("recompute", "selective", "offload"):
        offload = offload.replace(recompute_blocks=None)
    if not offload.activations.recomputes:
        offload = offload.replace(partition_activations=False)
    if offload.activations.mode != "offload_saved":
        offload = offload.replace(offload_saved_above=OFFLOAD_SAVED_ABOVE)
    return replace(changed, offload=offload)


def text_of(keys: Mapping[str, Any]) -> str:
    """Return keys and values in the syntax of `--set`."""
    return " ".join(f"{key}={_text(value)}" for key, value in keys.items())


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}={share}' for key, share in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
