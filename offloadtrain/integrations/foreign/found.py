"""The tensors of another trainer's checkpoint, and those that a model needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps beside the weights."""


class ForeignError(OffloadTrainError):
    """A checkpoint of another trainer cannot be read, or is of another model."""


class Wanted(NamedTuple):
    """A tensor of the job's model.

    Attributes:
        aliases: its other names; tied weights have some.
        trained: its moments are wanted as well.
        is_param: a parameter; else a buffer.
        dtype: that it is sent in; by torch's name.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    trained: bool
    is_param: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is read when it is wanted.

    Attributes:
        read: returns it whole, on the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Lazy:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True, slots=True)
class Group:
    """The hyperparameters of some parameters."""

    names: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """Model and state of Adam, by the model's own names.

    Attributes:
        weights: every parameter and buffer; of trained ones the fp32 masters, if there are any.
        moments: name → `MOMENTS`.
        step: optimizer steps done.
        notes: what the user should know, a sentence each.
    """

    weights: Mapping[str, Lazy]
    moments: Mapping[str, Mapping[str, Lazy]]
    step: int
    groups: Sequence[Group]
    notes: list[str] = field(default_factory=list)


def some(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more
