"""Frozen parameters and persistent buffers: which of them have changed, without looking at values.

They may be on the device, so that only the host's account of their changes can be read after it has
failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from offloadtrain.train.checkpoint import save

Versions = Mapping[str, tuple[int, int]]
"""Name → what differs once its values have changed."""


class Untrained:
    """The part of a model in a checkpoint that is not optimizer state."""

    def __init__(self, model: nn.Module, optimizer: save.OffloadedState) -> None:
        self._tables: dict[str, tuple[dict[str, Any], str]] = {}
        for name in save.untrained(model, optimizer):
            prefix, _, leaf = name.rpartition(".")
            module = model.get_submodule(prefix)
            table = module._parameters if leaf in module._parameters else module._buffers
            self._tables[name] = table, leaf
        buffers = [name for name, (table, leaf) in self._tables.items() if not _frozen(table[leaf])]
        self._buffers = tuple(buffers)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names with tensors."""
        return ((name, table[leaf]) for name, (table, leaf) in self._tables.items())

    def versions(self) -> Versions:
        return {name: _version(tensor) for name, tensor in self}

    def versions_of_buffers(self) -> Versions:
        """Only of what a forward may change."""
        buffers = ((name, *self._tables[name]) for name in self._buffers)
        return {name: _version(table[leaf]) for name, table, leaf in buffers}

    def replace(self, name: str, value: Tensor) -> None:
        """Make the model hold these values, on the host."""
        table, leaf = self._tables[name]
        value = value.to(table[leaf].dtype).view(table[leaf].shape)
        frozen = _frozen(table[leaf])
        table[leaf] = nn.Parameter(value, requires_grad=False) if frozen else value


def _frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), tensor._version
