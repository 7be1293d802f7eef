"""Checks that a model's code can run with parts of its matrices, by running it.

[Note: A trial in parts]
Two copies of the model run with tensors without values: an undivided copy, and one in which divided
linear layers return, and require, the sizes of a part. If the second copy fails, its code needs
something that a part does not have. A module with weights that the plan does not name, and that
gets smaller inputs in the second copy, gets only the heads or hidden units of its part: the
gradients of its weights would not be summed, and the parts would drift apart silently. Divided
layers are replaced by modules without weights: code that reads the weights outside of the layer's
forward fails, and so does code that writes into the output of a divided layer. Only a few of
several equal layers are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from offloadtrain.parallel.tensor.styles import shrink
from offloadtrain.plan.tracing.alike import Run, fake_model, runs_of
from offloadtrain.plan.tracing.patches import empty_caches_of, masks_as_in_training

_ROWS, _TOKENS = 1, 8

Seen = dict[str, list[tuple[int, ...]]]
"""Path of a module → the shapes of its tensor arguments."""


_PATH = "_path_in_whole_model"
"""Attribute of each module of a copy, because a copy may have fewer layers than the model."""


class _Handed(torch.autograd.Function):
    """Returns a view, as DTensors do; autograd refuses in-place writes into it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pragma: no cover: a trial runs forward only
        raise NotImplementedError


class _NoWeights(nn.Module):
    """Replaces a linear layer or experts: checks the input size, returns the right output size."""

    def __init__(self, name: str, inputs: int, made: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.inputs, self.made = name, inputs, made
        # Code reads dtype and device of weights; a matrix product with it fails.
        self.weight = SimpleNamespace(dtype=dtype, device=torch.device("cpu"))

    def forward(self, x: Tensor, *_: Any, **more: Any) -> Tensor:
        if x.shape[-1] != self.inputs:
            raise ValueError(f"'{self.name}' gets {x.shape[-1]} inputs, not {self.inputs}")
        made = x.new_empty(*x.shape[:-1], self.made, requires_grad=True)
        output: Tensor = _Handed.apply(made)  # type: ignore[no-untyped-call]
        return output


def problem_of(
    model: Any,
    linears: Mapping[str, tuple[tuple[int, int], tuple[int, int]]],
    tensors: Mapping[str, int],
    summed: Collection[str],
    parts: int,
) -> str:
    """Return why the model's code cannot run in parts; "" if it can.

    Args:
        linears: path of a divided layer → (inputs, outputs) of the model, and those of a part.
        tensors: parameter of a module that computes with parts → its divided dimension.
        summed: modules whose gradients are summed over the parts.
    """
    full = _tried(model, {path: sizes[0] for path, sizes in linears.items()}, {}, parts)
    if isinstance(full, str):
        if not isinstance(_tried(model, {}, {}, parts), str):
            return f"its code fails without the weights of linear layers ({full})"
        # The code depends on values, which are missing here: only reads of weights can be checked.
        inside = _with_weights(model, [*linears, *summed], tensors)
        unknown = [path for path in inside if path.startswith(_owners(linears))]
        return f"what '{unknown[0]}' gets cannot be tried ({full})" if unknown else ""
    if not tensors and all(sizes[0] == sizes[1] for sizes in linears.values()):
        return ""
    in_parts = _tried(model, {path: sizes[1] for path, sizes in linears.items()}, tensors, parts)
    if isinstance(in_parts, str):
        return f"its code fails in parts ({in_parts})"
    for name in _with_weights(model, [*linears, *summed], tensors):
        if full.get(name) != in_parts.get(name):
            return f"'{name}' gets a part of its input, and its plan sums no gradients of it"
    return ""


def _owners(linears: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]) -> tuple[str, ...]:
    """Return the prefixes of names in modules that contain a divided layer."""
    divided = [path for path, (full, part) in linears.items() if full != part]
    return tuple({f"{path.rpartition('.')[0]}." for path in divided})


def _with_weights(
    model: nn.Module, named: Collection[str], tensors: Mapping[str, int]
) -> list[str]:
    """Return the modules that own parameters which the plan does not name."""
    names = []
    for name, module in model.named_modules():
        keys = [key for key, _ in module.named_parameters(recurse=False)]
        if name not in named and any(f"{name}.{key}" not in tensors for key in keys):
            names.append(name)
    return names


def _tried(
    model: Any,
    linears: Mapping[str, tuple[int, int]],
    tensors: Mapping[str, int],
    parts: int,
) -> Seen | str:
    """Return the arguments' shapes of modules with weights, or the message of a failed forward."""
    runs = runs_of(model)
    inputs = _run(model, linears, tensors, parts, runs)
    if isinstance(inputs, str) and runs:  # the code may count its layers: try with all
        return _run(model, linears, tensors, parts, ())
    return inputs


def _run(
    model: Any,
    linears: Mapping[str, tuple[int, int]],
    tensors: Mapping[str, int],
    parts: int,
    runs: Sequence[Run],
) -> Seen | str:
    mode, recorded = FakeTensorMode(allow_non_fake_inputs=True), Seen()
    for path, module in model.named_modules():
        vars(module)[_PATH] = path
    copied = fake_model(model, mode, runs)
    try:
        with mode, masks_as_in_training(packed=False), _without_log():
            _narrow(copied, linears, tensors, parts)
            for module in copied.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    note = _noting(recorded, vars(module)[_PATH])
                    module.register_forward_pre_hook(note, with_kwargs=True)
            tokens = torch.ones((_ROWS, _TOKENS), dtype=torch.long, device="cpu")
            copied(input_ids=tokens, use_cache=False)
    except Exception as error:  # the model's code may raise anything at sizes of a part
        return f"{error}".partition("\n")[0]
    finally:
        empty_caches_of(mode)
        for module in model.modules():
            del vars(module)[_PATH]
    return recorded


@contextmanager
def _without_log() -> Iterator[None]:
    """Suppress torch's log of failures with fake tensors, which are expected here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _narrow(
    model: Any, linears: Mapping[str, tuple[int, int]], tensors: Mapping[str, int], parts: int
) -> None:
    for at, module in list(model.named_modules()):
        path = vars(module)[_PATH]
        if path in linears:
            dtype = next(module.parameters()).dtype
            model.set_submodule(at, _NoWeights(path, *linears[path], dtype))
            continue
        for key, _ in list(module.named_parameters(recurse=False)):
            if (dim := tensors.get(f"{path}.{key}")) is not None:
                shrink(module, key, dim, parts)


def _noting(recorded: Seen, name: str) -> Any:
    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        recorded[name] = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]

    return note
