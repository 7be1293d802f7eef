"""Muon: momentum and decay on the tier of the state, Newton-Schulz iterations on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from offloadtrain.optim.kernel_rules import AdamW, KeywordsOnly, check_not_negative
from offloadtrain.optim.rule import MatrixRule, UpdateRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.formats import StateFormat

_MOST_STEPS = 100
_PART = 1 << 18
"""Number of elements, a multiple of the formats' blocks."""
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(KeywordsOnly, MatrixRule):
    """Muon (Jordan et al. 2024) as `torch.optim.Muon`: the orthogonalized momentum of a matrix.

    The rule updates hidden matrices: 2-D parameters of the layers in a list, without embeddings.
    The rule `rest` updates all other parameters. A parameter group with `use_muon` True or False
    decides for its parameters; a group without it is divided in two. A group may set the
    hyperparameters of its rule.

    Attributes:
        lr: step size before `adjust_lr_fn`, > 0.
        weight_decay: decoupled, >= 0.
        momentum: weight of the past in the moving average of gradients, in [0, 1].
        nesterov: add the gradient to the average once more.
        ns_coefficients: coefficients of the quintic Newton-Schulz iteration.
        eps: lower bound of the norm by which a matrix is divided.
        ns_steps: number of Newton-Schulz iterations, below 100.
        adjust_lr_fn: "original" (same as None): lr times sqrt(max(1, rows / columns));
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
            raise TypeError(
                f"rest is {self.rest!r:.80}, not the update rule of all other parameters"
            )
        self.check(self.defaults())

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def defaults(self) -> dict[str, Any]:
        """Return the hyperparameters of a group of matrices."""
        options = super(Muon, self).defaults()
        del options["rest"]
        return options

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

    def calls_only_kernels(self, format: StateFormat) -> bool:
        return format.name in kernels.STATES

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
        """Write the momentum, or Nesterov's sum, in bf16; see `MatrixRule.direction`."""
        common = dict(momentum=group["momentum"], nesterov=group["nesterov"], step=step, seed=seed)
        if format.name in kernels.STATES:
            scalars = kernels.BlendScalars(**common, grad_scale=grad_scale)
            kernels.blend(kernels.STATES[format.name](state), grad, target, layout, scalars)
            return
        # A codec decodes the state to fp32 buffers and scales the gradient.
        fields, scaled = format.fields(self.moments), kernels.BlendScalars(**common)
        for part, id, first in _parts(layout):

            def change(
                master: Tensor, moments: list[Tensor], g: Tensor, part: slice = part
            ) -> None:
                values = kernels.Fp32State((master, *moments))
                kernels.blend(values, g, target[part], Layout.of_one(g.numel()), scaled)

            # Ascending order: `target` is at the start of the gradient's memory, so every element
            # is read before it is overwritten.
            kernels.update_by_codec(
                format,
                self.moments,
                kernels.cut(fields, state, part.start, part.stop),
                grad[part],
                None,
                Layout([0], [part.stop - part.start], [id], [first]),
                change,
                step=step,
                grad_scale=grad_scale,
                seed=seed,
            )

    def orthogonalize(self, matrix: Tensor, workspace: Tensor, *, group: Mapping[str, Any]) -> None:
        """Run the operations of `torch.optim.Muon` in preallocated memory; see
        `MatrixRule.orthogonalize`."""
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
        decay = 1 - group["lr"] * group["weight_decay"]
        rates = [group["lr"] * _adjustment(group["adjust_lr_fn"], shape) for shape in shapes]
        if format.name in kernels.STATES:
            kernel_state = kernels.STATES[format.name](state)
            kernels.subtract(kernel_state, update, working, layout, decay=decay, rates=rates)
            return
        rate_of = dict(zip((id for _, _, id, _ in layout.rows()), rates, strict=True))
        fields, end = format.fields(self.moments), update.numel()
        # Descending order, with a copy of each part of `update`: `working` begins at the same
        # address and has larger elements, so each write overwrites only elements that were already
        # read.
        for part, id, _ in reversed(_parts(layout)):
            part_state, part_update = (
                kernels.cut(fields, state, part.start, part.stop),
                update[part].clone(),
            )
            master = torch.empty(
                part_update.numel(), dtype=torch.float32, device=part_update.device
            )
            values = kernels.Fp32State((master, torch.empty_like(master)))
            kernels.read_master(format, self.moments, part_state, master)
            part_layout = Layout.of_one(part_update.numel())
            kernels.subtract(
                values, part_update, None, part_layout, decay=decay, rates=[rate_of[id]]
            )
            self.set_master(format, part_state, master)
            if working is not None:
                working[part.stop : end].zero_()
                working[part] = master
                end = part.start
        if working is not None:
            working[:end].zero_()


def _parts(layout: Layout) -> list[tuple[slice, int, int]]:
    """Return the parts that codecs decode at once: (elements, parameter id, its first element)."""
    return [
        (slice(offset + lo, offset + min(lo + _PART, numel)), id, first + lo)
        for offset, numel, id, first in layout.rows()
        for lo in range(0, numel, _PART)
    ]


def _adjustment(kind: str | None, shape: tuple[int, ...]) -> float:
    """Return the factor of lr for a matrix of this shape."""
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
