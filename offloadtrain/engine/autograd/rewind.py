"""Restore what a forward has changed, for a forward that runs twice.

[Note: Rewound inputs]
A forward may write into its inputs: a key-value cache grows, a dict collects results. Run again in
backward, it would find the changes of its first run. So before the first run the state of every
object that its arguments reach is noted, and restored for the second run. Afterwards the objects
are put back as they were before the second run, so that it leaves no trace. Only references are
noted, no values are copied. A tensor that was changed in place cannot be restored: that raises an
error.

The same holds for what modules keep between calls: their attributes (the last state of a
recurrence) and buffers. Buffers are changed in place (running statistics, power iterations), some
kernels of torch do so unseen by version counters, and the second run may read them. Those that a
forward changes are therefore copied before its first run; the second run gets a copy of that copy.
Which ones these are shows in the first forward in each combination of train and eval modes, in
which all buffers are copied and compared.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from offloadtrain.config.errors import OffloadTrainError

_LEAVES = (
    *(str, bytes, int, float, complex, type(None), Enum, type, nn.Module, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
"""Types that are not looked into: constants, code, and modules, whose state is not an input."""


class RewindError(OffloadTrainError):
    """A forward changed a tensor among its inputs in place and cannot run again."""


class _Kind(NamedTuple):
    """Reads and sets the references in one kind of mutable object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


class Place(NamedTuple):
    """The place of a buffer in a module."""

    buffers: dict[str, Tensor | None]
    name: str


class BufferCopy(NamedTuple):
    """A buffer and its value before a forward."""

    place: Place
    buffer: Tensor
    value: Tensor

    def differs(self) -> bool:
        """Tell whether the buffer was changed in place since; a fake one has no values to
        compare."""
        is_registered = self.place.buffers.get(self.place.name) is self.buffer
        fake = isinstance(self.buffer, FakeTensor)
        return is_registered and not fake and not torch.equal(self.buffer, self.value)


_Modes = tuple[bool, ...]
"""Of the modules that have buffers, whether each is in train mode."""


class BufferChanges:
    """The buffers that the forward of a module changes in place, its own and those inside."""

    def __init__(self) -> None:
        self._changing: dict[_Modes, list[Place]] = {}

    def copies(self, modules: Sequence[nn.Module]) -> tuple[_Modes, list[BufferCopy]]:
        """Copy the buffers that a forward of `modules` is about to change."""
        owners = [module for module in modules if module._buffers]
        modes = tuple(module.training for module in owners)
        places = self._changing.get(modes)
        if places is None:
            places = [Place(owner._buffers, name) for owner in owners for name in owner._buffers]
        buffers = [(place, place.buffers.get(place.name)) for place in places]
        copied = [
            BufferCopy(at, buffer, buffer.detach().clone())
            for at, buffer in buffers
            if buffer is not None
        ]
        return modes, copied

    def changed(self, copies: tuple[_Modes, list[BufferCopy]]) -> list[BufferCopy]:
        """Return the copies whose buffers the following forward has changed."""
        modes, copied = copies
        if modes not in self._changing:
            # Waits for the device, once in each combination of modes.
            copied = [saved for saved in copied if saved.differs()]
            self._changing[modes] = [saved.place for saved in copied]
        return copied


class Rewind:
    """The state of what a forward can change: all mutable objects that its arguments reach, and the
    attributes and buffers of `modules`."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], modules: Iterable[nn.Module] = ()
    ) -> None:
        self.copies: list[BufferCopy] = []
        """Buffers that the first run changes in place, as they were before it."""
        self._noted: list[tuple[Any, _Kind, Any]] = []
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        """Tensors and their versions. Weak: the inputs may be offloaded until backward."""
        # Also keeps the objects alive, so that no id is given out again.
        visited: dict[int, Any] = {}
        todo = [*args, *kwargs.values()]
        while todo:
            obj = todo.pop()
            if isinstance(obj, _LEAVES) or id(obj) in visited:
                continue
            visited[id(obj)] = obj
            if isinstance(obj, Tensor):
                if not obj.is_inference():
                    self._tensors.append((weakref.ref(obj), obj._version))
            elif isinstance(obj, tuple | frozenset):
                todo += obj
            else:
                todo += [vars(obj)] if hasattr(obj, "__dict__") else []
                if (kind := _kind(obj)) is not None:
                    references = kind.read(obj)
                    self._noted.append((obj, kind, references))
                    todo += references
        for module in modules:
            self._noted += [(x, _ATTRIBUTES, x.copy()) for x in (vars(module), module._buffers)]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the arguments reach and that are still alive."""
        return [tensor for ref, _ in self._tensors if (tensor := ref()) is not None]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore inputs, attributes and buffers around the second run.

        Raises:
            RewindError: a tensor was changed in place since the first run began.
        """
        for ref, version in self._tensors:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                raise RewindError(
                    f"a forward that is to run again in backward has got a tensor of shape "
                    f"{tuple(tensor.shape)} that was changed in place since its first run. Make a "
                    "new tensor (x = x + y in place of x += y), or set activation = 'keep'"
                )
        before = [kind.read(obj) for obj, kind, _ in self._noted]
        for (obj, kind, then), now in zip(self._noted, before, strict=True):
            if not _same(now, then):
                kind.write(obj, then)
        for saved in self.copies:
            saved.place.buffers[saved.place.name] = saved.value.clone()
        try:
            yield
        finally:
            for (obj, kind, _), now in zip(self._noted, before, strict=True):
                if not _same(kind.read(obj), now):
                    kind.write(obj, now)


def _same(first: Any, second: Any) -> bool:
    if len(first) != len(second) or not all(map(is_, first, second)):
        return False
    return not isinstance(first, dict) or all(map(is_, first.values(), second.values()))


def _kind(obj: Any) -> _Kind | None:
    if isinstance(obj, list | deque):
        return _SEQUENCE
    if isinstance(obj, set):
        return _SET
    if isinstance(obj, OrderedDict):
        return _ORDERED
    if isinstance(obj, dict):
        return _MAPPING
    return _SLOTS if _slots(obj) else None


def _mapping(base: Any) -> _Kind:
    """Write past the methods of a subclass: a model's output class may refuse writes."""

    def write(target: Any, references: list[Any]) -> None:
        base.clear(target)
        base.update(target, zip(references[::2], references[1::2], strict=True))

    return _Kind(lambda source: list(chain.from_iterable(base.items(source))), write)


def _write_attributes(target: dict[str, Any], references: dict[str, Any]) -> None:
    target.clear()
    target.update(references)


def _write_sequence(target: Any, references: list[Any]) -> None:
    target.clear()
    target.extend(references)


def _write_set(target: set[Any], references: list[Any]) -> None:
    target.clear()
    target.update(references)


def _slots(obj: Any) -> list[str]:
    """Return the names of its slots, private ones as Python mangles them."""
    names = []
    for cls in type(obj).__mro__:
        declared = cls.__dict__.get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _read_slots(obj: Any) -> list[Any]:
    return [getattr(obj, name, _UNSET) for name in _slots(obj)]


def _write_slots(obj: Any, references: list[Any]) -> None:
    for name, value in zip(_slots(obj), references, strict=True):
        if value is not _UNSET:
            object.__setattr__(obj, name, value)
        elif hasattr(obj, name):
            object.__delattr__(obj, name)


_UNSET = object()
_MAPPING, _ORDERED = _mapping(dict), _mapping(OrderedDict)
_SEQUENCE, _SET = _Kind(list, _write_sequence), _Kind(list, _write_set)
_SLOTS = _Kind(_read_slots, _write_slots)
_ATTRIBUTES = _Kind(dict.copy, _write_attributes)
"""Of a module, of which there are many with many: copied and compared without Python's loops."""
