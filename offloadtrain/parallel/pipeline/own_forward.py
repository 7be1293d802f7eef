"""Checks that the stages of a model with its own forward compute what the undivided model does.

[Note: Code outside of layers]
Every stage runs the forward of the model with other stages' modules left out. Code outside of
layers runs in all stages: a scale or a dropout after the embedding, an activation after the last
layer, a counter of layers that starts at 0. Such a model would train without an error, but wrong.
So the forward runs on the meta device, undivided and in each stage, with hooks on the layers. If a
layer of the undivided model gets exactly the tensor that the previous layer returned, then in its
stage it must get exactly the stage's input, and that input must be what the previous layer returned
in its own stage. Numbers and flags that layers get must be equal. Computation on tensors between
layers is not checked: the same code runs at the same place of each stage, unless it counts layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offloadtrain.config.errors import PipelineError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.partition import Part
from offloadtrain.parallel.pipeline.stage_modules import twin_of

_Seen = list[tuple[Any, int]]
"""Leaves of arguments or outputs; tensors with their version counter, other leaves with 0."""

_REMEDY = (
    "A model's forward runs in every stage, with dropout and other modules without weights: what "
    "it does before or behind its layers belongs behind a test of whether a module of the first "
    "or the last stage is None (if self.embed is not None), or into that module; what depends on "
    "a layer's number, into the layer"
)


class _Calls:
    """Records the arguments and outputs of a model's layers on the meta device."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.order: list[str] = []
        self.got: dict[str, _Seen] = {}
        self.returned: dict[str, _Seen] = {}
        for name, module in model.named_modules():
            if name in layers:
                module.register_forward_pre_hook(partial(self._enters, name), with_kwargs=True)
                module.register_forward_hook(partial(self._leaves, name))

    def _enters(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.order.append(name)
        self.got[name] = _leaves_with_versions((args, kwargs))

    def _leaves(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.returned[name] = _leaves_with_versions(output)


class WholeForward:
    """Arguments and outputs of a model's layers, recorded before the model is cut."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Sequence[Part]],
        inputs: tuple[Tensor, ...],
        config: OffloadConfig,
    ) -> None:
        """
        Args:
            inputs: inputs of the model, on the meta device.

        Raises:
            PipelineError: its forward calls layers in an order that stages cannot follow.
        """
        self._config = config
        self._stages = [[part.name for part in parts if part.repeated] for parts in stages]
        self._layers = [name for names in self._stages for name in names]
        self._calls, _ = self._run(model, inputs, until=self._stages[-1][0])
        called = self._calls.order
        # Layers that are called without hooks (`layer.forward(…)`) are missing here.
        if called != [name for name in self._layers if name in called]:
            raise PipelineError(
                f"its forward calls layers in the order {', '.join(called)}: stages call each of "
                "their layers once, in the order of the list"
            )

    def check(self, stage: nn.Module, index: int, inputs: tuple[Tensor, ...]) -> None:
        """
        Args:
            inputs: inputs of the stage, on the meta device.

        Raises:
            PipelineError: the stage would compute something else.
        """
        layers, stage_inputs = self._stages[index], _leaves_with_versions(inputs)
        is_last = index == len(self._stages) - 1
        calls, output = self._run(stage, inputs, until=layers[0] if is_last else None)
        self._check_numbers(layers, calls)
        if index > 0:
            before = self._stages[index - 1][-1]
            for place, _ in self._passed_on(before, layers[0]):
                if not _is_among(calls.got[layers[0]][place], stage_inputs):
                    raise PipelineError(
                        f"'{layers[0]}' gets something else than the stage is given; in the whole "
                        f"model it gets what '{before}' returns. {_REMEDY}"
                    )
        if not is_last:
            for _, number in self._passed_on(layers[-1], self._stages[index + 1][0]):
                if not _is_among(calls.returned[layers[-1]][number], output):
                    raise PipelineError(
                        f"the stage returns something else than '{layers[-1]}', its last layer; in "
                        f"the whole model '{self._stages[index + 1][0]}' gets that. {_REMEDY}"
                    )

    def _check_numbers(self, layers: Sequence[str], calls: _Calls) -> None:
        for name in layers:
            for (got, _), (expected, _) in zip(
                calls.got.get(name, ()), self._calls.got.get(name, ()), strict=True
            ):
                is_plain = isinstance(expected, bool | int | float | str)
                if is_plain and not (type(got) is type(expected) and got == expected):
                    raise PipelineError(
                        f"'{name}' gets {got!r}, and {expected!r} in the whole model. {_REMEDY}"
                    )

    def _passed_on(self, before: str, layer: str) -> list[tuple[int, int]]:
        """Return pairs (place in the layer's arguments, place in the previous layer's output) of
        tensors that the model's forward passes on unchanged."""
        returned = self._calls.returned.get(before, [])
        pairs = []
        for place, argument in enumerate(self._calls.got.get(layer, ())):
            numbers = [n for n, other in enumerate(returned) if _is_among(argument, [other])]
            pairs += [(place, number) for number in numbers[:1]]
        return pairs

    @torch.no_grad()
    def _run(
        self, model: nn.Module, inputs: tuple[Tensor, ...], until: str | None
    ) -> tuple[_Calls, _Seen]:
        """Run the forward. It may fail after it has entered the layer `until`."""
        meta_model = twin_of(model, self._config, "meta")
        calls = _Calls(meta_model, self._layers)
        try:
            return calls, _leaves_with_versions(meta_model(*inputs))
        except Exception as error:
            # The last stage may read values (a loss), which the meta device does not have.
            if until is None or until not in calls.got:
                raise PipelineError(
                    f"its forward fails on the meta device: {error}. Tensors that it makes belong "
                    "on the device of its inputs"
                ) from error
            return calls, []


def _leaves_with_versions(tree: Any) -> _Seen:
    leaves = tree_leaves(tree)
    return [(leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in leaves]


def _is_among(leaf: tuple[Any, int], leaves: _Seen) -> bool:
    tensor, version = leaf
    return isinstance(tensor, Tensor) and any(
        isinstance(other, Tensor) and version == written and _is_same(tensor, other)
        for other, written in leaves
    )


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return True if both are one tensor, or views of the same elements."""
    if tensor is other:
        return True
    if type(tensor) is not Tensor or type(other) is not Tensor or tensor.shape != other.shape:
        return False
    shares = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    return shares and (tensor.stride(), tensor.storage_offset()) == (
        other.stride(),
        other.storage_offset(),
    )
