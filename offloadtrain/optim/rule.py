"""The engine's interface to optimizers: the state of an optimizer and the update of one bucket."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.layout.formats import StateFormat


class Rule(Protocol):
    """The interface between every optimizer and the engine. Implementations are frozen dataclasses
    of hyperparameters, and each is an `UpdateRule` or a `MatrixRule`."""

    @property
    def moments(self) -> tuple[str, ...]:
        """State per parameter in addition to the master weight, e.g. ("exp_avg", …)."""

    def defaults(self) -> dict[str, Any]:
        """Return the hyperparameters of a `param_groups` entry."""

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a group's hyperparameters are out of range."""

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        """Set the master weights from (numel,) fp32; moments do not change."""

    def convert(
        self,
        source: StateFormat,
        source_state: tuple[Tensor, ...],
        format: StateFormat,
        state: tuple[Tensor, ...],
    ) -> None:
        """Convert state of another format, rounded to nearest if this format is narrower."""


class UpdateRule(Rule, Protocol):
    """An optimizer that updates a bucket in one operation, on the tier of the state."""

    def calls_only_kernels(self, format: StateFormat) -> bool:
        """Return True if `update` with this format calls only kernels that are captured when
        launched and run without Python's interpreter lock (`kernels.capture`)."""

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
        """Update one bucket; all tensors are (numel,), in host or device memory.

        Args:
            state: the format's fields for `moments`, updated in place.
            grad: working dtype or fp32; consumed if `working` is the same memory.
            working: receives the new master rounded to its dtype; None if the state contains it.
            layout: the elements of each parameter.
            group: the hyperparameters to use.
            step: optimizer step, 1-based.
            grad_scale: multiplied into each gradient first (unscaling times clipping).
            seed: seed of stochastic rounding.
            out: memory with the same fields; if set, receives the new state instead of `state`.
        """


class CodecRule:
    """Base of rules that are frozen dataclasses of hyperparameters. The codec of the format sets
    masters and converts state."""

    __slots__ = ()

    def defaults(self) -> dict[str, Any]:
        """Return the hyperparameters of a `param_groups` entry: the fields of the dataclass."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        """See `Rule.set_master`."""
        kernels.set_master_by_codec(format, state, master)

    def convert(
        self,
        source: StateFormat,
        source_state: tuple[Tensor, ...],
        format: StateFormat,
        state: tuple[Tensor, ...],
    ) -> None:
        """See `Rule.convert`."""
        kernels.convert_by_codec(source, source_state, format, state)


class MatrixRule(CodecRule, ABC):
    """A rule for hidden matrices. Part of its update needs each full matrix on the device. All
    other parameters have another rule.

    Parameter groups assign rules to parameters, see `group_key`. Three operations update a bucket
    of matrices ([Note: Matrices] in `step/program/updates.py`).

    Attributes:
        group_key: the key that is True in groups of matrices of this rule.
        rest: the rule of all other parameters.
    """

    __slots__ = ()

    group_key: ClassVar[str]
    rest: UpdateRule

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """State per element of a matrix in addition to the master weight."""

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if hyperparameters of a group of matrices are out of range."""

    def calls_only_kernels(self, format: StateFormat) -> bool:
        """Return True if `direction` and `apply` with this format call only kernels; see
        `UpdateRule.calls_only_kernels`."""
        return False

    @abstractmethod
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
        """Update the moments on the tier of the state, and write the update direction to `target`.

        Args:
            state, grad, layout, group, step, grad_scale, seed: see `UpdateRule.update`. Masters do
                not change.
            target: (numel,) bf16; the first bytes of `grad`, which is consumed.
        """

    @abstractmethod
    def orthogonalize(self, matrix: Tensor, workspace: Tensor, *, group: Mapping[str, Any]) -> None:
        """Replace a direction with the matrix to subtract, on the device and in place.

        Args:
            matrix: the direction, bf16, dense, with the shape and strides of the parameter.
            workspace: (n,) bf16, see `MatrixSpec.workspace_numel`.
        """

    @abstractmethod
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
        """Decay the masters and subtract the update, on the tier of the state.

        Args:
            state, working, layout, group: see `UpdateRule.update`. Moments do not change.
            update: (numel,) bf16. May begin at the address of `working`, whose elements may be
                larger.
            shapes: shape of each parameter of the layout.
        """


AnyRule = UpdateRule | MatrixRule


def rule_of(rule: AnyRule, group: Mapping[str, Any]) -> AnyRule:
    """Return the rule that updates the parameters of a group."""
    if isinstance(rule, MatrixRule) and not group[rule.group_key]:
        return rule.rest
    return rule


def keeps_whole(rule: AnyRule | None) -> bool:
    """Return True if the rule needs whole parameters, each in the shard of one rank: a
    `MatrixRule`, or an `UpdateRule` with `whole_tensors = True`."""
    return isinstance(rule, MatrixRule) or getattr(rule, "whole_tensors", False)


class ElementwiseRule(CodecRule, ABC):
    """Base of a rule in plain torch: a frozen dataclass of hyperparameters with `moments` and
    `update_fp32`. Works with any state format.

    The rule must be elementwise: a bucket may be cut at any multiple of 128 elements, for staging
    and among ranks, so the update of an element must not depend on other elements. A norm or
    singular values of a matrix are not available here.
    """

    moments: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update_fp32(
        self,
        master: Tensor,
        moments: list[Tensor],
        grad: Tensor,
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        """Update a part of one parameter in place, on a lane's thread.

        Args:
            master, moments, grad: a part of one parameter, (n,) fp32. The gradient is unscaled and
                clipped. The method may overwrite it.
            group: the hyperparameters to use.
            step: optimizer step, 1-based.
        """

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a group's hyperparameters are not finite."""
        for key in self.defaults():
            if isinstance(group[key], float) and not math.isfinite(group[key]):
                raise ValueError(f"{key} = {group[key]} is not a finite number")

    def calls_only_kernels(self, format: StateFormat) -> bool:
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
        """See `UpdateRule.update`."""
        kernels.update_by_codec(
            format,
            self.moments,
            state,
            grad,
            working,
            layout,
            lambda master, moments, g: self.update_fp32(master, moments, g, group, step),
            step=step,
            grad_scale=grad_scale,
            seed=seed,
            out=out,
        )
