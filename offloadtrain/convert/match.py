"""Match the tensors of a checkpoint with those of the job's model, without any left over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from offloadtrain.convert.checkpoint import (
    MOMENTS,
    ForeignCheckpoint,
    ForeignError,
    LazyTensor,
    ModelTensor,
    quoted,
)

_WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose values fp32 represents exactly."""


class MatchedTensors:
    """The tensors of a checkpoint in the order of the model, checked and not read yet."""

    def __init__(self, checkpoint: ForeignCheckpoint, wanted: Sequence[ModelTensor]) -> None:
        """
        Raises:
            ForeignError: a tensor is missing, or is in no model of this job, or has another shape.
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
        """Return sentences for the user."""
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
        """Yield 1-D tensors: the fp32 weight and moments of a trained parameter, or the tensor."""
        for target in self._wanted:
            dtype = torch.float32 if target.trained else getattr(torch, target.dtype)
            weight = self._checkpoint.weights[self._names(target)[0]]
            yield weight.read().to(dtype).reshape(-1)
            if target.trained:
                for kind in MOMENTS:
                    yield self._checkpoint.moments[target.name][kind].read().float().reshape(-1)


def check_weights(weights: Mapping[str, LazyTensor], wanted: Sequence[ModelTensor]) -> None:
    """Check that a checkpoint has the model's tensors, of its shapes, and no other.

    Raises:
        ForeignError: naming the first that differ.
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
