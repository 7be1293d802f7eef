"""The tensors of another trainer's checkpoint, matched with those of the job's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadtrain.config.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of Adam's state, in addition to the weights."""


class ForeignError(InputError):
    """A checkpoint of another trainer cannot be read, or is of another model."""


class ModelTensor(NamedTuple):
    """A tensor of the job's model.

    Attributes:
        aliases: other names of the tensor, if it is tied.
        trained: the job trains it, so its moments are read as well.
        is_param: True for a parameter, False for a buffer.
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
    """A tensor that was not read yet.

    Attributes:
        read: returns the full tensor on the host.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


@dataclass(frozen=True, slots=True)
class Group:
    """Hyperparameters of a group of parameters."""

    names: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Model and state of Adam, by the names in the model.

    Attributes:
        weights: every parameter and buffer; trained ones as fp32 masters if the checkpoint has
            them.
        moments: parameter → kind in `MOMENTS` → tensor.
        step: number of completed optimizer steps.
        notes: sentences for the user.
    """

    weights: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]]
    step: int
    groups: Sequence[Group]
    notes: list[str] = field(default_factory=list)


def quoted(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names, and the number of further ones."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts that FSDP, recompute and torch.compile insert into names."""
_DDP_PREFIX = "module."
"""Prefix that DistributedDataParallel adds to all names."""


def unwrapper(names: Iterable[str], targets: Sequence[ModelTensor]) -> Callable[[str], str]:
    """Return a function that removes the parts of a name that wrapper modules have added.

    Args:
        names: all names in the checkpoint; a prefix is removed only if all have it.
        targets: the model's tensors; a model whose names have the prefix keeps it.
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


_WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that fp32 represents exactly."""


class MatchedTensors:
    """The tensors of a checkpoint in the model's order: checked, but not read yet."""

    def __init__(self, checkpoint: ForeignCheckpoint, wanted: Sequence[ModelTensor]) -> None:
        """
        Raises:
            ForeignError: a tensor is missing, is not in the job's model, or has another shape.
        """
        self._checkpoint, self._wanted = checkpoint, wanted
        check_weights(checkpoint.weights, wanted)
        trained = {t.name for t in wanted if t.trained}
        missing = [t.name for t in wanted if t.trained and t.name not in checkpoint.moments]
        surplus = [name for name in checkpoint.moments if name not in trained]
        if missing:
            raise ForeignError(
                f"its optimizer has no state of {quoted(missing)}, which the job trains"
            )
        if surplus:
            raise ForeignError(
                f"its optimizer has state of {quoted(surplus)}, not trained by the job"
            )
        for target in wanted:
            first, *tied = (self._checkpoint.weights[name] for name in self._names(target))
            if tied and not all(torch.equal(first.read(), other.read()) for other in tied):
                names = quoted(self._names(target))
                raise ForeignError(f"{names} are tied in the job, and differ in the checkpoint")
            if target.trained:
                for kind, lazy in checkpoint.moments[target.name].items():
                    _check(target.name, f"{kind} of ", lazy, target)

    def _names(self, target: ModelTensor) -> list[str]:
        return [name for name in (target.name, *target.aliases) if name in self._checkpoint.weights]

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        lazies = (
            self._checkpoint.weights[self._names(target)[0]]
            for target in self._wanted
            if target.trained
        )
        narrow = sorted({str(lazy.dtype) for lazy in lazies if lazy.dtype != torch.float32})
        remarks = (
            [f"its weights are {', '.join(narrow)}: masters have these values"] if narrow else []
        )
        return [*self._checkpoint.notes, *remarks]

    def tensors(self) -> Iterator[Tensor]:
        """Yield 1-D tensors: fp32 weight and moments of a trained parameter, else the tensor."""
        for target in self._wanted:
            dtype = torch.float32 if target.trained else getattr(torch, target.dtype)
            weight = self._checkpoint.weights[self._names(target)[0]]
            yield weight.read().to(dtype).reshape(-1)
            if target.trained:
                for kind in MOMENTS:
                    yield self._checkpoint.moments[target.name][kind].read().float().reshape(-1)


def check_weights(weights: Mapping[str, LazyTensor], wanted: Sequence[ModelTensor]) -> None:
    """Check that a checkpoint has exactly the model's tensors, with the same shapes.

    Raises:
        ForeignError: it does not; the message names the first differences.
    """
    known = {name for t in wanted for name in (t.name, *t.aliases)}
    missing = [t.name for t in wanted if not weights.keys() & {t.name, *t.aliases}]
    surplus = [name for name in weights if name not in known]
    if missing:
        raise ForeignError(f"it lacks {quoted(missing)} of the job's model{_instead(surplus)}")
    if surplus:
        raise ForeignError(f"it holds {quoted(surplus)}, which the job's model does not have")
    for target in wanted:
        for name in weights.keys() & {target.name, *target.aliases}:
            _check(name, "", weights[name], target)


def _instead(surplus: Sequence[str]) -> str:
    return f", and holds {quoted(surplus)}, which the model does not have" if surplus else ""


def _check(name: str, kind: str, lazy: LazyTensor, target: ModelTensor) -> None:
    if lazy.shape != target.shape:
        raise ForeignError(
            f"{kind}'{name}' has the shape {lazy.shape} in the checkpoint, and {target.shape} in "
            "the job's model"
        )
    wide = lazy.dtype not in _WIDENED if target.trained else not _converts(lazy.dtype, target.dtype)
    if wide:
        raise ForeignError(f"{kind}'{name}' is {lazy.dtype}, which is not converted")


def _converts(source: torch.dtype, target: str) -> bool:
    dtype = getattr(torch, target)
    return source == dtype or (source.is_floating_point and dtype.is_floating_point)
