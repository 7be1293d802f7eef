"""Comparison of what processes were given: those of one model must have the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.division import Division
from offloadtrain.optim import AnyRule
from offloadtrain.runtime.process_group import RankError, Ranks

_OF_ONE_HOST = ("pin_memory", "host_memory_limit", "scratch_dir", "scratch_in_memory")
_OF_ONE_STAGE = (
    *_OF_ONE_HOST,
    "device_memory_limit",
    "resident_blocks",
    "recompute_blocks",
    "checkpoint_spill",
)


def check_alike(ranks: Ranks, told: Mapping[str, Any], each: str, remedy: str = "") -> None:
    """Compare what each process tells; a collective.

    Args:
        told: name → a value of JSON's types.
        each: what a process is called.
        remedy: ends the message instead of the first difference.

    Raises:
        RankError: one tells something else than the first.
    """
    for number, other in enumerate(of_each := ranks.gather(told)):
        for what, value in other.items():
            if value != (first := of_each[0][what]):
                raise RankError(
                    f"{each} {number} and {each} 0 differ in {what}: "
                    f"{remedy or _difference(value, first)}"
                )


def check_same_model(
    model: nn.Module,
    groups: list[dict[str, Any]],
    config: OffloadConfig,
    division: Division,
) -> None:
    """Raises RankError unless all ranks have the same model, groups and options, and all parts of
    it the same model and groups."""
    ranks = division.replicas
    names = {param: name for name, param in model.named_parameters()}
    shapes = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for p, n in names.items()]
    grouped = [[names[param] for param in group["params"]] for group in groups]
    options = _options(config, but=_OF_ONE_HOST)
    options["zero_stage"] = str(config.zero_stage_among(ranks.size))
    description = {"model": shapes, "groups": grouped}
    check_alike(ranks.everyone, description | {"options": options}, "rank")
    check_alike(division.parts, description, "part")


def check_same_options(config: OffloadConfig, rule: AnyRule, division: Division) -> None:
    """Raises RankError unless all stages, and all parts of this one, have the same options and
    rule; their parameters differ."""
    for ranks, each, but in (
        (division.stages, "stage", _OF_ONE_STAGE),
        (division.parts, "part", _OF_ONE_HOST),
    ):
        options = _options(config, but=but) | {"rule": type(rule).__name__}
        check_alike(ranks, {"options": options}, each)


def _options(config: OffloadConfig, *, but: Sequence[str]) -> dict[str, str]:
    return {name: str(value) for name, value in config.options().items() if name not in but}


def _difference(value: Any, first: Any) -> str:
    """Describe the first entry that differs."""
    pairs = zip_longest(*(list(x.items()) if isinstance(x, dict) else x for x in (value, first)))
    a, b = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{a} and {b}"
