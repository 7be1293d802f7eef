"""LAMB on the host: AdamW whose rate is scaled for each parameter tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offloadtrain.optim.kernel_rules import Adam, KernelRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.formats import StateFormat

_PIECE = 1 << 18
"""Number of elements whose direction is computed at once, in the cache. It is a multiple of the
norm's segments and of the formats' blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LAMB(Adam):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2), with Adam's bias correction.

    The direction r of a tensor w is Adam's direction plus `weight_decay` times w. The rate is lr
    times the trust ratio min(|w|, max_norm) / |r|, which is 1 if either norm is 0. The step has the
    same bits as a step of AdamW at this rate.

    Attributes:
        lr: step size relative to a tensor's norm, > 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: weight of w in the direction, >= 0.
        max_norm: upper bound of a tensor's norm in the trust ratio, > 0; infinity: no bound.
    """

    eps: float = 1e-6
    weight_decay: float = 1e-2
    max_norm: float = math.inf

    decoupled: ClassVar[bool] = True
    whole_tensors: ClassVar[bool] = True

    def check(self, group: Mapping[str, Any]) -> None:
        super(LAMB, self).check(group)
        if not group["max_norm"] > 0.0:
            raise ValueError(f"max_norm = {group['max_norm']} is not a number above 0")

    def calls_only_kernels(self, format: StateFormat) -> bool:
        """False, because the rate of a tensor is known only after its norms are measured."""
        return False

    def update(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        layout: Layout,
        *,
        group: Mapping[str, Any],
        step: int,
        grad_scale: float,
        seed: int,
        out: tuple[Tensor, ...] | None = None,
    ) -> None:
        """See `UpdateRule.update`. The layout has whole parameters only."""
        fields, end = format.fields(self.moments), 0
        measured = _Measured(self, format, state, min(_PIECE, grad.numel()))
        step_args: dict[str, Any] = {"step": step, "grad_scale": grad_scale, "seed": seed}
        for offset, numel, id, _ in layout.rows():
            lo, hi = offset, offset + numel
            param_state = kernels.cut(fields, state, lo, hi)
            ratio = measured.trust_ratio(param_state, grad[lo:hi], id, group, step_args)
            super(LAMB, self).update(
                format,
                param_state,
                grad[lo:hi],
                None if working is None else working[lo:hi],
                Layout.of_one(numel, id),
                group={**group, "lr": group["lr"] * ratio},
                out=None if out is None else kernels.cut(fields, out, lo, hi),
                **step_args,
            )
            if working is not None:
                working[end:lo].zero_()  # padding between parameters
            end = hi
        if working is not None:
            working[end:].zero_()


class _Measured:
    """Memory for the directions of one piece of a tensor."""

    def __init__(
        self, rule: LAMB, format: StateFormat, state: tuple[Tensor, ...], numel: int
    ) -> None:
        """`numel` is the number of elements of the largest piece."""
        self._rule, self._format, self._fields = rule, format, format.fields(rule.moments)
        self._state = tuple(map(torch.empty_like, kernels.cut(self._fields, state, 0, numel)))
        self._values = torch.empty(3, numel, dtype=torch.float32, device=state[0].device)

    def trust_ratio(
        self,
        state: tuple[Tensor, ...],
        grad: Tensor,
        id: int,
        group: Mapping[str, Any],
        step_args: Mapping[str, Any],
    ) -> float:
        """Return the trust ratio of one parameter, without a change of its state.

        Args:
            step_args: step, grad_scale and seed, see `UpdateRule.update`.
        """
        squares = [0.0, 0.0]
        for lo, hi in kernels.pieces(grad.numel(), size=_PIECE):
            layout = Layout([0], [hi - lo], [id], [lo])
            piece = kernels.cut(self._fields, state, lo, hi)
            master, tried, direction = (row[: hi - lo] for row in self._values)
            self._read(piece, master)
            self._read(self._try(piece, grad[lo:hi], layout, group, step_args), tried)
            torch.mul(master, group["weight_decay"], out=direction).sub_(tried)
            # On a GPU this waits for the update lane. The lane's thread launches nothing else
            # meanwhile.
            for number, values in enumerate((master, direction)):
                squares[number] += kernels.sum_squares(values)
        if not all(squares):
            return 1.0
        return min(math.sqrt(squares[0]), float(group["max_norm"])) / math.sqrt(squares[1])

    def _try(
        self,
        state: tuple[Tensor, ...],
        grad: Tensor,
        layout: Layout,
        group: Mapping[str, Any],
        step_args: Mapping[str, Any],
    ) -> tuple[Tensor, ...]:
        """Return state whose masters are the negative direction of Adam: the result of AdamW at lr
        = 1, without decay, for weights of zero."""
        tried = kernels.cut(self._fields, self._state, 0, grad.numel())
        masters = len(self._format.master)
        torch._foreach_zero_(tried[:masters])  # zeroed memory decodes to zero in every format
        torch._foreach_copy_(tried[masters:], state[masters:])
        trial = {**group, "lr": 1.0, "weight_decay": 0.0}
        KernelRule.update(
            self._rule, self._format, tried, grad, None, layout, group=trial, **step_args
        )
        return tried

    def _read(self, state: tuple[Tensor, ...], target: Tensor) -> None:
        kernels.read_master(self._format, self._rule.moments, state, target)
