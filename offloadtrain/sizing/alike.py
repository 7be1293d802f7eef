"""Find identical layers of a model, so that a trace of a few of them stands for all.

[Note: Layers that are alike]
Two layers are alike if they have equal classes, equal shapes and dtypes of their tensors, and equal
plain attributes, and refer to the same other objects. A whole number that counts the layers is a
layer's index and may differ. A list of the model or its configuration with an entry per layer
belongs to the layers' descriptions: a layer with a sliding window is not like a layer without.

A run is a pattern of layers (one, or an attention layer and a Mamba layer) that comes several times
in a row. The first four and the last three of them are traced. This module cannot tell whether a
forward depends on the index: `extend` compares the traces of the layers next to the gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine.partition import partition

TRACED, BEFORE = 7, 4
"""Units of a run that are traced, and how many of them are before those that are skipped."""
_LONGEST_UNIT = 8

Signature = dict[str, object]


@dataclass(frozen=True, slots=True)
class Run:
    """Layers of a list that repeat a pattern.

    Attributes:
        container: the list's qualified name.
        names: of all its layers.
        start: the first layer of the run.
        period: layers of a unit, the pattern.
        units: how often it comes.
    """

    container: str
    names: tuple[str, ...]
    start: int
    period: int
    units: int

    @property
    def skipped(self) -> range:
        """The layers that are not traced."""
        first = self.start + BEFORE * self.period
        return range(first, first + (self.units - TRACED) * self.period)


def runs_of(model: nn.Module, recomputed: Collection[nn.Module] = ()) -> tuple[Run, ...]:
    """Return the longest run of each list of layers, if it makes the trace shorter; in order.

    A list whose first layers are recomputed is treated as two lists: recomputed and other layers.
    """
    runs: list[Run] = []
    for container, layers in _lists(model):
        names = tuple(f"{container}.{at}" if container else str(at) for at in range(len(layers)))
        kinds = _kinds(model, layers)
        again = sum(layer in recomputed for layer in layers)
        for first, end in ((0, again), (again, len(layers))):
            run = _longest(Run(container, names, first, 1, 0), kinds[:end])
            runs += [run] if run.units > TRACED else []
    return tuple(runs)


def _lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the name and the layers of each list whose children all are blocks."""
    blocks = {part.module for part in partition(model) if part.repeated}
    for name, module in model.named_modules():
        layers = list(module.children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        if listed and len(layers) > TRACED and len(set(layers)) == len(module):
            if blocks.issuperset(layers):
                yield name, layers


def _longest(none: Run, kinds: Sequence[int]) -> Run:
    """Return the run that leaves out the most layers; `none`, of no units, if none leaves out any.
    It begins where that one does, or later."""
    best = none
    for period in range(1, _LONGEST_UNIT + 1):
        for start in range(none.start, len(kinds)):
            # How often the pattern that begins there comes.
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            run = replace(none, start=start, period=period, units=(end - start) // period)
            if len(run.skipped) > len(best.skipped):
                best = run
    return best


def _kinds(model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """Return a number per layer: equal for layers that are alike."""
    owners = Counter(param for _, param in _owned(model, layers))
    signatures = [dict(_attributes(layer)) for layer in layers]
    for at, layer in enumerate(layers):
        if any(owners[param] > 1 for param in layer.parameters()):
            signatures[at]["tied"] = str(at)
    _leave_out_indices(signatures)
    for key, entries in _listed(model, len(layers)):
        for signature, entry in zip(signatures, entries, strict=True):
            signature[key] = _plain(entry)
    distinct: list[Signature] = []
    for signature in signatures:
        if signature not in distinct:
            distinct.append(signature)
    return [distinct.index(signature) for signature in signatures]


def _owned(
    model: nn.Module, layers: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield every layer, and every module outside the layers, with each of its parameters."""
    inside = {module for layer in layers for module in layer.modules()}
    for layer in layers:
        yield from ((layer, param) for param in layer.parameters())
    for module in model.modules():
        if module not in inside:
            yield from ((module, param) for param in module.parameters(recurse=False))


def _attributes(layer: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in layer.named_modules():
        yield f"{name}:", type(module)
        for key, value in vars(module).items():
            if key != "_modules":
                yield f"{name}.{key}", _plain(value)


def _plain(value: Any) -> object:
    """Return a key for comparing values; objects that are not plain are compared by identity."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | type):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return value.__func__, type(value.__self__)
    if isinstance(value, partial):
        return value.func, _plain(value.args), _plain(value.keywords)
    if isinstance(value, Mapping):  # a hook's key is a number that is never given again
        named = all(isinstance(key, str) for key in value)
        return tuple((key if named else "", _plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(_plain(item) for item in value)
    return id(value)


def _leave_out_indices(signatures: Sequence[Signature]) -> None:
    """Drop the whole numbers that count the layers, of all that have them."""
    for key in set().union(*signatures):
        entries = [
            (at, signature[key]) for at, signature in enumerate(signatures) if key in signature
        ]
        numbers = [(at, value) for at, value in entries if type(value) is int]
        if len(numbers) == len(entries) > 1 and len({value - at for at, value in numbers}) == 1:
            for at, _ in entries:
                del signatures[at][key]


def _listed(model: nn.Module, count: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the lists in modules and their configurations that have one entry per layer."""
    owners = {
        id(owner): owner for module in model.modules() for owner in (module, *_configs(module))
    }
    for number, owner in enumerate(owners.values()):
        for key, value in vars(owner).items():
            if isinstance(value, list | tuple) and len(value) == count:
                yield f"{number}.{key}", value


def _configs(module: nn.Module) -> Iterator[Any]:
    config = vars(module).get("config")
    if hasattr(config, "__dict__"):
        yield config
        yield from (
            value for value in vars(config).values() if type(value).__name__.endswith("Config")
        )
