"""Every tensor of a checkpoint accounted for: what is sent, in the order of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from offloadtrain.integrations.foreign.found import (
    MOMENTS,
    ForeignError,
    Found,
    Lazy,
    Wanted,
    some,
)

_WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""What fp32 holds exactly."""


class Ordered:
    """The tensors that a model wants, checked, and not read yet."""

    def __init__(self, found: Found, wanted: Sequence[Wanted]) -> None:
        """
        Raises:
            ForeignError: a tensor is missing, or is in no model of this job, or has another shape.
        """
        self._found, self._wanted = found, wanted
        check_weights(found.weights, wanted)
        trained = {one.name for one in wanted if one.trained}
        missing = [one.name for one in wanted if one.trained and one.name not in found.moments]
        surplus = [name for name in found.moments if name not in trained]
        if missing:
            raise ForeignError(
                f"its optimizer has no state of {some(missing)}, which the job trains"
            )
        if surplus:
            raise ForeignError(
                f"its optimizer has state of {some(surplus)}, not trained by the job"
            )
        for one in wanted:
            first, *others = (self._found.weights[name] for name in self._names(one))
            if others and not all(torch.equal(first.read(), other.read()) for other in others):
                raise ForeignError(
                    f"{some(self._names(one))} are tied in the job, and differ in the checkpoint"
                )
            if one.trained:
                for kind, lazy in found.moments[one.name].items():
                    _check(one.name, f"{kind} of ", lazy, one)

    def _names(self, one: Wanted) -> list[str]:
        return [name for name in (one.name, *one.aliases) if name in self._found.weights]

    @property
    def notes(self) -> list[str]:
        """Return what the user should know about these weights."""
        lazies = (self._found.weights[self._names(one)[0]] for one in self._wanted if one.trained)
        narrow = sorted({str(lazy.dtype) for lazy in lazies if lazy.dtype != torch.float32})
        told = [f"its weights are {', '.join(narrow)}: masters have these values"] if narrow else []
        return [*self._found.notes, *told]

    def tensors(self) -> Iterator[Tensor]:
        """Yield 1-D tensors: of each that is trained the fp32 weight and the moments, else it."""
        for one in self._wanted:
            dtype = torch.float32 if one.trained else getattr(torch, one.dtype)
            weight = self._found.weights[self._names(one)[0]]
            yield weight.read().to(dtype).reshape(-1)
            if one.trained:
                for kind in MOMENTS:
                    yield self._found.moments[one.name][kind].read().float().reshape(-1)


def check_weights(weights: Mapping[str, Lazy], wanted: Sequence[Wanted]) -> None:
    """Check that a checkpoint has the model's tensors, of its shapes, and no other.

    Raises:
        ForeignError: naming the first that differ.
    """
    known = {name for one in wanted for name in (one.name, *one.aliases)}
    missing = [one.name for one in wanted if not weights.keys() & {one.name, *one.aliases}]
    surplus = [name for name in weights if name not in known]
    if missing:
        raise ForeignError(f"it lacks {some(missing)} of the job's model{_instead(surplus)}")
    if surplus:
        raise ForeignError(f"it holds {some(surplus)}, which the job's model does not have")
    for one in wanted:
        for name in weights.keys() & {one.name, *one.aliases}:
            _check(name, "", weights[name], one)


def _instead(surplus: Sequence[str]) -> str:
    return f", and holds {some(surplus)}, which the model does not have" if surplus else ""


def _check(name: str, kind: str, lazy: Lazy, one: Wanted) -> None:
    if lazy.shape != one.shape:
        raise ForeignError(
            f"{kind}'{name}' has the shape {lazy.shape} in the checkpoint, and {one.shape} in the "
            "job's model"
        )
    wide = lazy.dtype not in _WIDENED if one.trained else not _converts(lazy.dtype, one.dtype)
    if wide:
        raise ForeignError(f"{kind}'{name}' is {lazy.dtype}, which is not converted")


def _converts(source: torch.dtype, target: str) -> bool:
    own = getattr(torch, target)
    return source == own or (source.is_floating_point and own.is_floating_point)
