"""Muon: momentum and decay where the state is, Newton-Schulz on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from offloadtrain.optim.adam import AdamW
from offloadtrain.optim.kernel_rule import KeywordsOnly, check_not_negative
from offloadtrain.optim.rule import MatrixRule, UpdateRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.formats import FP32, StateFormat

_MOST_STEPS = 100
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(KeywordsOnly, MatrixRule):
    """Muon (Jordan et al. 2024) as `torch.optim.Muon`: the orthogonalized momentum of a matrix.

    It updates hidden matrices: 2-D parameters of the layers of a list, without embeddings. All
    other parameters have the rule `rest`. A parameter group with `use_muon` True or False decides
    for its parameters; one without it is divided in two. A group may set the hyperparameters of
    its rule.

    Attributes:
        lr: step size, before `adjust_lr_fn`, > 0.
        weight_decay: decoupled, >= 0.
        momentum: weight of the past in the moving average of gradients, in [0, 1].
        nesterov: whether the gradient is added to the average once more.
        ns_coefficients: of the quintic Newton-Schulz iteration.
        eps: least norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations, below 100.
        adjust_lr_fn: "original" (None is the same): lr times sqrt(max(1, rows / columns));
            "match_rms_adamw": lr times 0.2 * sqrt(max(rows, columns)), for an lr of AdamW's size.
        rest: the rule of all other parameters.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    rest: UpdateRule = field(default_factory=AdamW)

    group_key: ClassVar[str] = "use_muon"

    def __post_init__(self) -> None:
        updates = callable(getattr(self.rest, "update", None))
        if isinstance(self.rest, MatrixRule | type) or not updates:
            raise TypeError(f"rest is {self.rest!r:.80}: the rule of all that is no hidden matrix")
        self.check(self.defaults())

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a group of matrices."""
        own = super(Muon, self).defaults()
        del own["rest"]
        return own

    def check(self, group: Mapping[str, Any]) -> None:
        check_not_negative(group, ("lr", "weight_decay", "momentum", "eps"))
        if group["momentum"] > 1.0:
            raise ValueError(f"momentum = {group['momentum']} is not in [0, 1]")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients = {group['ns_coefficients']} are not three numbers")
        if not 0 <= group["ns_steps"] < _MOST_STEPS:
            raise ValueError(f"ns_steps = {group['ns_steps']} is not in [0, {_MOST_STEPS})")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(
                f"adjust_lr_fn = {group['adjust_lr_fn']!r} is not one of "
                f"{', '.join(map(repr, _ADJUSTMENTS))}"
            )

    def direction(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        target: Tensor,
        layout: Layout,
        *,
        group: Mapping[str, Any],
        step: int,
        grad_scale: float,
        seed: int,
    ) -> None:
        """See `MatrixRule.direction`: the momentum, and nesterov's sum, in bf16."""
        fields, momentum, scratch = format.fields(self.moments), group["momentum"], _scratch(grad)

        def change(part: slice, _: Tensor, moments: list[Tensor], g: Tensor) -> None:
            buffer = moments[0].lerp_(g, 1 - momentum)
            target[part] = g.lerp_(buffer, momentum) if group["nesterov"] else buffer

        for offset, numel, id, first in layout.rows():
            # In ascending order, and each part of `grad` is copied first: `target` lies in the
            # front of its memory, so that what is written was read before.
            for part in _parts(offset, numel, scratch.numel()):
                if format is FP32:
                    g = scratch[: part.stop - part.start].copy_(grad[part]).mul_(grad_scale)
                    change(part, state[0][part], [state[1][part]], g)
                    continue
                kernels.update_by_codec(
                    format,
                    self.moments,
                    kernels.cut(fields, state, part.start, part.stop),
                    grad[part],
                    None,
                    Layout([0], [part.stop - part.start], [id], [first + part.start - offset]),
                    partial(change, part),
                    step=step,
                    grad_scale=grad_scale,
                    seed=seed,
                )

    def orthogonalize(self, matrix: Tensor, workspace: Tensor, *, group: Mapping[str, Any]) -> None:
        """See `MatrixRule.orthogonalize`: the operations of `torch.optim.Muon`, in given memory."""
        a, b, c = group["ns_coefficients"]
        wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
        rows, numel = wide.shape[0], wide.numel()
        squares = (workspace[numel + i * rows * rows :][: rows * rows] for i in range(2))
        gram, polynomial = (square.view(rows, rows) for square in squares)
        first = workspace[:numel].view(wide.shape)
        second = matrix.as_strided((numel,), (1,)).view(wide.shape)
        wide.div_(wide.norm().clamp(min=group["eps"]))
        x = wide
        for number in range(group["ns_steps"]):
            target = second if number % 2 else first
            torch.mm(x, x.T, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.addmm(x, polynomial, x, beta=a, out=target)
            x = target
        if x is second:
            x = first.copy_(second)
        if x is first:
            wide.copy_(first)

    def apply(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        update: Tensor,
        working: Tensor | None,
        layout: Layout,
        shapes: Sequence[tuple[int, ...]],
        *,
        group: Mapping[str, Any],
    ) -> None:
        """See `MatrixRule.apply`."""
        end, scratch = 0 if working is None else working.numel(), _scratch(update)
        # Backwards, and each piece of `update` is copied first: larger elements of `working` that
        # begin in the same place then overwrite only what was read before.
        for (offset, numel, _, _), shape in reversed([*zip(layout.rows(), shapes, strict=True)]):
            if working is not None:
                working[offset + numel : end].zero_()
            end = offset
            rate = group["lr"] * _adjustment(group["adjust_lr_fn"], shape)
            for part in reversed(_parts(offset, numel, scratch.numel())):
                taken = scratch[: part.stop - part.start].copy_(update[part])
                master = self._stepped(format, state, part, taken, group, rate)
                if working is not None:
                    working[part] = master
        if working is not None:
            working[:end].zero_()

    def _stepped(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        part: slice,
        update: Tensor,
        group: Mapping[str, Any],
        rate: float,
    ) -> Tensor:
        """Change the masters of a part; returns them as (n,) fp32."""
        kept = kernels.cut(format.fields(self.moments), state, part.start, part.stop)
        values = kept
        if format is not FP32:
            values = tuple(torch.empty_like(update) for _ in FP32.fields(self.moments))
            self.convert(format, kept, FP32, values)
        master = values[0].mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)
        if format is not FP32:
            self.set_master(format, kept, master)
        return master


def _scratch(like: Tensor) -> Tensor:
    """Return fp32 memory for a part of a matrix: on the CPU as large as torch computes without its
    threads, which cost more than they bring, and as the cache holds."""
    return torch.empty(1 << 22 if like.is_cuda else 1 << 15, device=like.device)


def _parts(offset: int, numel: int, size: int) -> list[slice]:
    end = offset + numel
    return [slice(lo, min(lo + size, end)) for lo in range(offset, end, size)]


def _adjustment(kind: str | None, shape: tuple[int, ...]) -> float:
    """The factor of lr for a matrix of this shape."""
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
