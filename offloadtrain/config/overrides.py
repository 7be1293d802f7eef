"""Side effects of overrides: they replace keys of the job file that contradict them, and report it.

An override that shortens a job or changes its data states an intent. Keys of the file for the long
run or the other data would only make it fail. Overridden keys are never replaced, and
contradictions within the file are refused as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from offloadtrain.config.offload import OPTIONS
from offloadtrain.config.toml import Job, shown

WARMUP_SHARE = 10
"""Share of warm-up steps, as 1/n, in a run shorter than the file's warm-up."""

_Wins = Callable[[Any], bool]


def _is_none_of(values: Collection[object], value: object) -> bool:
    return value not in values


# (overridden key, the values that count, the key of the file that they make meaningless)
_GIVES_WAY: list[tuple[str, _Wins, str]] = [
    ("data.source", bool, "data.train"),
    ("data.source", bool, "data.val"),
    ("data.train", bool, "data.source"),
    ("data.val_fraction", lambda share: share == 0, "train.eval_every"),
    ("train.global_batch_tokens", bool, "train.grad_accum_steps"),
    ("train.grad_accum_steps", bool, "train.global_batch_tokens"),
    ("train.sample_tokens", lambda count: count == 0, "train.sample_prompt"),
]

# Options that have an effect only with certain values of another one.
_GIVES_WAY += [
    (f"offload.{needs.option}", partial(_is_none_of, needs.values), f"offload.{option.name}")
    for option in OPTIONS.values()
    if (needs := option.needs) is not None
]


def settle(job: Job) -> Iterator[str]:
    """Remove from the job's tables the keys that overrides make meaningless; yield a line for
    each."""
    for key, wins, other in _GIVES_WAY:
        value, left = _value(job, key), _of_the_file(job, other)
        if key in job.overridden and wins(value) and left and not _is_default(other, left):
            section, name = other.split(".")
            del job.tables[section][name]
            yield f"{other} = {shown(left)} of the job is overridden by {key} = {shown(value)}"
    # Of a run made shorter, the warm-up becomes as much shorter.
    steps, warmup = _value(job, "train.steps"), _of_the_file(job, "optim.warmup_steps")
    if "train.steps" not in job.overridden or type(steps) is not int or type(warmup) is not int:
        return
    if 0 < steps < warmup:
        fitting = job.tables["optim"]["warmup_steps"] = steps // WARMUP_SHARE
        yield f"optim.warmup_steps {warmup} -> {fitting} (train.steps = {steps})"


def _is_default(key: str, value: object) -> bool:
    """Return whether it is the default of a key of [offload], which contradicts no other key."""
    section, name = key.split(".")
    return section == "offload" and value == OPTIONS[name].default


def _of_the_file(job: Job, key: str) -> Any:
    """Return the key's value if the file sets it and no override does."""
    section = key.split(".")[0]
    return None if {key, section} & job.overridden else _value(job, key)


def _value(job: Job, key: str) -> Any:
    section, name = key.split(".")
    table = job.tables.get(section)
    return table.get(name) if isinstance(table, dict) else None
