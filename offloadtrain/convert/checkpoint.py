"""The tensors of another trainer's checkpoint, and those that a model needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadtrain.config.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of Adam besides the weights."""


class ForeignError(InputError):
    """A checkpoint of another trainer cannot be read, or is of another model."""


class ModelTensor(NamedTuple):
    """A tensor of the job's model.

    Attributes:
        aliases: other names of the same tensor, if it is tied.
        trained: the job trains it, so its moments are read too.
        is_param: a parameter, not a buffer.
        dtype: torch's name of the dtype in which the reader sends it.
    """

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    trained: bool
    is_param: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is not read yet.

    Attributes:
        read: returns the full tensor, on the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True, slots=True)
class Group:
    """The hyperparameters of some parameters."""

    names: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Model and state of Adam, by the model's own names.

    Attributes:
        weights: every parameter and buffer; trained ones as fp32 masters, if the checkpoint has
            them.
        moments: parameter → kind of `MOMENTS` → tensor.
        step: number of optimizer steps done.
        notes: sentences for the user.
    """

    weights: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]]
    step: int
    groups: Sequence[Group]
    notes: list[str] = field(default_factory=list)


def quoted(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP, recomputation and torch.compile insert into names."""
_DDP_PREFIX = "module."
"""What DistributedDataParallel puts before all names."""


def unwrapper(names: Iterable[str], targets: Sequence[ModelTensor]) -> Callable[[str], str]:
    """Return a function that removes the parts of a name that wrappers of modules added.

    Args:
        names: all names of the checkpoint: a prefix counts only if all have it.
        targets: the model's tensors; a model whose own names have the prefix keeps it.
    """

    def without_wrappers(name: str) -> str:
        for part in _WRAPPERS:
            name = name.replace(part, "")
        return name

    has_prefix = any(
        name.startswith(_DDP_PREFIX)
        for target in targets
        for name in (target.name, *target.aliases)
    )
    prefixed = all(without_wrappers(name).startswith(_DDP_PREFIX) for name in names)
    prefix = _DDP_PREFIX if prefixed and not has_prefix else ""
    return lambda name: without_wrappers(name).removeprefix(prefix)
