"""Recompute: a block's forward runs again in backward, from its inputs.

[Note: Recompute]
The forward of a repeated module is replaced by a function that runs the user's forward under
torch's non-reentrant checkpoint, which stores only the inputs and restores torch's random state, so
that dropout draws the same mask; for other generators see [Note: Random numbers of the second run].
The second run is no module call, so no hook runs. The replacement itself therefore reports the
beginning and end of the module's forward; in the first forward it does so inside the hooks'
reports. Saved weights stay handles: the engine's hooks are innermost in both runs. Changes that the
first run made to its inputs, and to the state of its modules, are undone for the second run: [Note:
Rewound inputs]. Tensors that it wrote there, such as a key-value cache, live until backward: a
warning says so once.

[Note: What torch's checkpoint gets]
torch's checkpoint takes 10 microseconds for each saved tensor. So it gets a single tensor: an
empty marker, whose unpacking makes it run the forward again. Tensors that the first run saves
become `_Placeholder`s. A second run fills the placeholders in the same order, and saves the marker
after the last one, where torch's checkpoint ends the run. A placeholder returns its tensor to one
node of one backward, so that memory is freed as torch's checkpoint frees it, and another use in the
same backward raises torch's error. Weights get no placeholder: they are handles.

[Note: Random numbers of the second run]
torch's checkpoint restores torch's global generators. A layer may also draw from Python's
`random`, NumPy's global generator, and generators among the attributes of its modules and its
arguments. If the second run drew new numbers, the gradient would belong to another dropout mask or
another depth than the loss. So the states are read before the first run, set for the second run,
and restored after it. The two global states are large. They are read after the first run as well:
if it has not drawn from a generator, the second run will not either.

[Note: Rewound inputs]
A forward may write into its inputs: a key-value cache grows, a dict collects results. A
second run in backward would see the changes of the first run. So before the first run the state of
every object reachable from its arguments is recorded, and restored for the second run. Afterwards
the objects get back their state from before the second run, so that it leaves no trace. Only
references are recorded, no values are copied. A tensor that was changed in place cannot be
restored: that raises an error.

The same holds for the state of modules: their attributes (the last state of a
recurrence) and buffers. Buffers are changed in place (running statistics, power iterations), some
kernels of torch do so without a new version, and the second run may read them. Those that a
forward changes are therefore copied before its first run; the second run gets a copy of that copy.
To detect them, the first forward in each combination of train and eval modes copies and compares
all buffers.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import random
import struct
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import cache, partial
from itertools import chain, islice
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.autograd.hooks import Passthrough, ReplacedForward, Watcher
from offloadtrain.engine.autograd.saved_tensors import Hooks, Kept, PassedOn, PassOn, unpack
from offloadtrain.engine.autograd.selective import Policy, Selection


def _are_same(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return True if two sequences have the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))


class _Kind(NamedTuple):
    """Functions that read, set and compare the state of a kind of mutable object: its references,
    or the numbers of a generator."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    are_same: Callable[[Any, Any], bool] = _are_same


class _GlobalState:
    """Reads the state of a global generator; returns the same object while it has not changed.

    Reading a state takes 20 to 30 microseconds; copying its 624 words and position takes one or
    less. These words change with every draw except the second of a pair of normal numbers, which
    was computed with the first.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        peek: Callable[[Any], object],
    ) -> None:
        """`peek`: last known state → a value that every draw changes, or None if there is none."""
        self._read, self.write, self._peek = read, write, peek
        self._peeked: object = None
        self._state = read()

    def read(self) -> Any:
        # In this order: if another thread draws in between, the next call reads again.
        peeked = self._peek(self._state)
        if peeked is None or peeked != self._peeked:
            self._peeked, self._state = peeked, self._read()
        return self._state


def _words_of_python() -> bytes:
    """Return the position and the 624 words of Python's global generator, in this order, as
    CPython stores them after the object's header."""
    return ctypes.string_at(id(random._inst) + object.__basicsize__, 625 * 4)


def _has_known_layout() -> bool:
    """Return True if this interpreter stores the generator in that layout."""
    if random._inst.__sizeof__() < object.__basicsize__ + 625 * 4:
        return False
    *words, position = random.getstate()[1]
    return struct.pack("=625I", position, *words) == _words_of_python()


_HAS_KNOWN_LAYOUT = _has_known_layout()


def _peek_python(_: object) -> object:
    generator: Any = random._inst
    return (_words_of_python(), generator.gauss_next) if _HAS_KNOWN_LAYOUT else None


def _peek_numpy(numpy: Any, state: dict[str, Any]) -> bytes | None:
    generator = numpy.get_bit_generator()
    if type(generator) is not numpy.MT19937 or state["has_gauss"]:
        return None
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


_PYTHON = _GlobalState(random.getstate, random.setstate, _peek_python)
_GLOBAL = _Kind(_GlobalState.read, lambda source, state: source.write(state), is_)


@cache
def _global_states(numpy: Any) -> list[_GlobalState]:
    if numpy is None:
        return [_PYTHON]
    read, peek = partial(numpy.get_state, legacy=False), partial(_peek_numpy, numpy)
    return [_PYTHON, _GlobalState(read, numpy.set_state, peek)]


@cache
def _generators(numpy: Any) -> dict[type, _Kind]:
    """Return generator type → functions to read and set its state; states are never equal."""

    def kind(read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> _Kind:
        return _Kind(read, write, lambda first, second: False)

    kinds: dict[type, _Kind] = {
        torch.Generator: kind(torch.Generator.get_state, torch.Generator.set_state),
        random.Random: kind(random.Random.getstate, random.Random.setstate),
    }
    if numpy is None:
        return kinds
    return kinds | {
        numpy.RandomState: kind(
            partial(numpy.RandomState.get_state, legacy=False), numpy.RandomState.set_state
        ),
        numpy.Generator: kind(
            lambda source: source.bit_generator.state,
            lambda source, state: setattr(source.bit_generator, "state", state),
        ),
    }


_LEAVES = (
    *(str, bytes, int, float, complex, type(None), Enum, type, nn.Module, torch.Generator),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
"""Types that are not traversed: constants, code, weak references, modules, and tensors."""


class RewindError(OffloadTrainError):
    """A forward changed a tensor among its inputs in place and cannot run again."""


class Place(NamedTuple):
    """The place of a tensor: a module's dict of buffers or of attributes, and a key."""

    buffers: dict[str, Tensor | None]
    name: str


class BufferCopy(NamedTuple):
    """A buffer and its value before a forward."""

    place: Place
    buffer: Tensor
    value: Tensor

    def differs(self) -> bool:
        """Return True if the buffer was changed in place since; False if it was replaced, and for a
        fake tensor, which has no values."""
        is_registered = self.place.buffers.get(self.place.name) is self.buffer
        fake = isinstance(self.buffer, FakeTensor)
        return is_registered and not fake and not torch.equal(self.buffer, self.value)


_Modes = tuple[bool, ...]
"""Train mode of each module that has buffers."""


class BufferChanges:
    """The buffers that the forward of a module and its submodules changes in place."""

    def __init__(self) -> None:
        self._changing: dict[_Modes, list[Place]] = {}

    def copies(self, modules: Sequence[nn.Module]) -> tuple[_Modes, list[BufferCopy]]:
        """Copy the buffers and tensor attributes that a forward of `modules` may change."""
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
            # Waits for the device, once for each combination of modes. All buffers of a changed
            # module count: the first update of a buffer may leave its value as it was.
            owners = {id(saved.place.buffers) for saved in copied if saved.differs()}
            copied = [saved for saved in copied if id(saved.place.buffers) in owners]
            self._changing[modes] = [saved.place for saved in copied]
        return copied


class Rewind:
    """The state that a forward can change: all mutable objects reachable from its arguments, the
    attributes, buffers and parameters of `modules`, and random generators except torch's global
    ones."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], modules: Iterable[nn.Module] = ()
    ) -> None:
        self.copies: list[BufferCopy] = []
        """Buffers that the first run changes in place, with their values before that run."""
        self._noted: list[tuple[Any, _Kind, Any]] = []
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        """Tensors and their versions. Weak: the inputs may be offloaded until backward."""
        # Also keeps the objects alive, so that no id is reused.
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
                of_type = (kind for cls, kind in _CONTAINERS if isinstance(obj, cls))
                if kind := next(of_type, _SLOTS if _slots(obj) else None):
                    references = kind.read(obj)
                    self._noted.append((obj, kind, references))
                    todo += references
        # `torch.func.functional_call` replaces parameters within a forward.
        mappings = [each for m in modules for each in (vars(m), m._buffers, m._parameters)]
        attributes = _Attributes.read(mappings)
        self._noted.append((mappings, _ATTRIBUTES, attributes))
        numpy = sys.modules.get("numpy.random")  # not imported: has not drawn
        kinds, values = _generators(numpy), (*args, *kwargs.values(), *attributes.values)
        # Usually there is none; this check needs no Python loop.
        if not kinds.keys().isdisjoint(map(type, values)):
            generators = [(obj, kinds[type(obj)]) for obj in values if type(obj) in kinds]
            self._noted += [(obj, kind, kind.read(obj)) for obj, kind in generators]
        self._global = [(state, _GLOBAL, state.read()) for state in _global_states(numpy)]
        """The global generators that the first run may draw from."""

    def tensors(self) -> list[Tensor]:
        """Return the live tensors that are reachable from the arguments."""
        return [tensor for ref, _ in self._tensors if (tensor := ref()) is not None]

    def forget_unused(self) -> None:
        """The first run is over: drop the global generators that it has not drawn from."""
        self._global = [entry for entry in self._global if entry[0].read() is not entry[2]]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore inputs, attributes, buffers and generators around the second run.

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
        noted = [*self._noted, *self._global]
        before = [kind.read(obj) for obj, kind, _ in noted]
        try:
            for (obj, kind, then), now in zip(noted, before, strict=True):
                if not kind.are_same(now, then):
                    kind.write(obj, then)
            for saved in self.copies:
                saved.place.buffers[saved.place.name] = saved.value.clone()
            yield
        finally:
            for (obj, kind, _), now in zip(noted, before, strict=True):
                if not kind.are_same(kind.read(obj), now):
                    kind.write(obj, now)


class _Attributes(NamedTuple):
    """The items of several mappings in flat lists: a layer has some two hundred
    attributes, and Python loops over them would take most of a recompute's time."""

    sizes: list[int]
    names: list[str]
    values: list[object]

    @classmethod
    def read(cls, mappings: Sequence[dict[str, Any]]) -> _Attributes:
        values = chain.from_iterable(map(dict.values, mappings))
        return cls([*map(len, mappings)], [*chain.from_iterable(mappings)], [*values])

    def write(self, mappings: Sequence[dict[str, Any]]) -> None:
        items = zip(self.names, self.values, strict=True)
        for mapping, size in zip(mappings, self.sizes, strict=True):
            before = dict(islice(items, size))
            if [*mapping] != [*before] or not all(map(is_, mapping.values(), before.values())):
                _clear_and_update(mapping, before)

    def is_same(self, now: _Attributes) -> bool:
        """Return True if `now` has the same objects under the same names."""
        are_named_alike = self.sizes == now.sizes and self.names == now.names
        return are_named_alike and all(map(is_, self.values, now.values))


def _mapping(base: Any) -> _Kind:
    """Return a kind that bypasses the methods of a subclass: a model's output class may forbid
    writes."""

    def write(target: Any, references: list[Any]) -> None:
        base.clear(target)
        base.update(target, zip(references[::2], references[1::2], strict=True))

    return _Kind(lambda source: list(chain.from_iterable(base.items(source))), write)


def _write_sequence(target: Any, references: list[Any]) -> None:
    target.clear()
    target.extend(references)


def _clear_and_update(target: Any, references: Any) -> None:
    target.clear()
    target.update(references)


def _slots(obj: Any) -> list[str]:
    """Return the names of the object's slots, private names as Python mangles them."""
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
_SLOTS = _Kind(_read_slots, _write_slots)
_CONTAINERS: tuple[tuple[type | types.UnionType, _Kind], ...] = (
    (list | deque, _Kind(list, _write_sequence)),
    (set, _Kind(list, _clear_and_update)),
    (OrderedDict, _mapping(OrderedDict)),
    (dict, _mapping(dict)),
)
"""Type → kind, subclasses first."""
_ATTRIBUTES = _Kind(
    _Attributes.read, lambda mappings, before: before.write(mappings), _Attributes.is_same
)


_log = logging.getLogger(__name__)


class RecomputeError(OffloadTrainError):
    """A forward cannot run again, or its second run differs from its first."""


class _Placeholder:
    """Replaces a tensor that the first run saves: see [Note: What torch's checkpoint gets].

    Attributes:
        metadata: shape, dtype and device, which must be equal in both runs.
        tensors: graph task → the tensor that the second run in this backward has saved, with its
            version.
    """

    __slots__ = ("__weakref__", "_marker", "metadata", "tensors")

    def __init__(self, tensor: Tensor, marker: PassedOn) -> None:
        self._marker = marker
        self.metadata = _metadata(tensor)
        self.tensors: dict[int, Kept] = {}

    def unpack(self) -> Tensor:
        task = torch._C._current_graph_task_id()
        # -1: no backward; the user inspects a node's saved tensors, now or after an update.
        if task == -1 or task not in self.tensors:
            self._marker.unpack()
        # Only the node that unpacks it needs it. The second run may have changed it since.
        return unpack(self.tensors.pop(task))


def _metadata(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


_MARKER = torch.empty(0, device="cpu")
"""The only tensor that torch's checkpoint saves and unpacks."""


class _Runs:
    """A forward: the first call runs it, later calls run it again from the state before.

    Attributes:
        failed: exception of the first call, which returns instead of raising: some releases of
            torch (2.9) leave checkpoint's hooks active if the forward inside it raises.
    """

    def __init__(self, name: str, run: Callable[..., Any], inputs: Rewind) -> None:
        self._name = name
        self._saved: list[weakref.ref[_Placeholder]] = []
        self._missing: list[weakref.ref[_Placeholder]] = []
        """Placeholders that the last second run has not filled yet, in reverse order."""
        self._run = run
        self._inputs = inputs
        self._ran = False
        self._modes = 0
        self.failed: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ran:
            was_tracked = self._modes > torch._C._len_torch_dispatch_stack()
            tracked = Passthrough if was_tracked else nullcontext
            with self._inputs.again(), tracked():
                output = self._run(self._pack_again, *args, **kwargs)
            if self._missing:
                count = len(self._saved)
                raise self._differs(f"{count} tensors", count - len(self._missing))
            return output
        self._ran = True
        self._modes = torch._C._len_torch_dispatch_stack()
        try:
            return self._run(self._pack_first, *args, **kwargs)
        except BaseException as error:
            self.failed = error

    def _pack_first(self, outer: Hooks) -> PassOn:
        """Return the function that packs what the first run saves; `outer`: torch's hooks."""
        # Not an attribute: the marker references objects of torch's checkpoint, which reference
        # `self`.
        marker = PassedOn(outer, _MARKER)

        def pack(tensor: Tensor, _: object) -> _Placeholder:
            placeholder = _Placeholder(tensor, marker)
            self._saved.append(weakref.ref(placeholder))
            return placeholder

        return pack

    def _pack_again(self, outer: Hooks) -> PassOn:
        """Return the function that packs what a second run saves, for the current backward."""
        # In a backward inside the first run the list is still incomplete.
        self._missing = missing = self._saved[::-1]
        task = torch._C._current_graph_task_id()

        def pack(tensor: Tensor, _: object) -> Kept:
            detached = tensor.detach() if tensor.requires_grad else tensor
            saved = detached, detached._version
            # None: its node was freed.
            if missing and (placeholder := missing.pop()()) is not None:
                if placeholder.metadata != (metadata := _metadata(tensor)):
                    raise self._differs(placeholder.metadata, metadata)
                placeholder.tensors[task] = saved
            if not missing:
                outer[0](_MARKER)  # ends the run: torch waits for no further tensor
            return saved

        return pack

    def _differs(self, first: object, second: object) -> RecomputeError:
        return RecomputeError(
            f"'{self._name}', whose forward runs again in backward, saved {first} in its first "
            f"run, and {second} in its second: the gradients would be those of another forward. "
            "Make it compute the same in both runs, or set activation = 'keep'"
        )


class Written:
    """Warns once per model about the bytes that a layer writes into its inputs."""

    def __init__(self) -> None:
        self._looked = False

    def look(self, before: Rewind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs after the first forward of the first layer."""
        if self._looked:
            return
        self._looked = True
        known = {id(tensor) for tensor in before.tensors()}
        new = [tensor for tensor in Rewind(args, kwargs).tensors() if id(tensor) not in known]
        if new:
            _log.warning(
                "a layer has written %s into its inputs, which is held until backward though its "
                "activations are not: if that is a key-value cache, call the model with "
                "use_cache=False",
                format_bytes(sum(tensor.nbytes for tensor in new)),
            )


class Recomputed(ReplacedForward):
    """Replaces a forward that is recomputed in backward."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        watcher: Callable[[], Watcher | None],
        written: Written,
        policy: Policy | None = None,
    ) -> None:
        """`name`: name of the module, for errors. `policy`: decides which results are saved; see
        [Note: Selective recompute]."""
        # torch's checkpoint imports the compiler, which takes seconds. During the first forward, an
        # error that this import catches internally would keep the forward's frames alive, with
        # their hidden states and logits, until Python collects garbage.
        importlib.import_module("torch._dynamo")

        super().__init__(module)
        self._name = name
        self._written = written
        self._watcher = watcher
        self._policy = policy
        self._changes = BufferChanges()
        self._modules: list[nn.Module] = []
        """The module and its submodules at the last call of `_find_modules`."""
        self._children: list[nn.Module | None] = []
        """Their children at that time."""

    def _find_modules(self) -> list[nn.Module]:
        """Return the module and its submodules. Searching in each run would take longer than
        checking that no module was added or removed since the last run."""
        children = [*chain.from_iterable([m._modules.values() for m in self._modules])]
        if not self._modules or not _are_same(children, self._children):
            self._modules = list(self._module.modules())
            self._children = [*chain.from_iterable([m._modules.values() for m in self._modules])]
        return self._modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        if self._module._compiled_call_impl is not None:
            raise RecomputeError(
                f"a {type(self._module).__name__} that runs again in backward was compiled by "
                "module.compile(), of which torch's checkpoint would leave nothing: leave that "
                "out, and give offload(compile_blocks=True), or set module.forward = "
                "torch.compile(module.forward) before it"
            )
        modules = self._find_modules()
        inputs = Rewind(args, kwargs, modules)
        selection = None if self._policy is None else Selection(self._policy)
        run = _Runs(self._name, partial(self._run, selection or nullcontext()), inputs)
        copies = self._changes.copies(modules)
        output = checkpoint(run, *args, use_reentrant=False, **kwargs)
        if run.failed is not None:
            try:
                raise run.failed
            finally:
                run.failed = None  # its traceback references this frame: a cycle
        inputs.forget_unused()
        inputs.copies = self._changes.changed(copies)
        self._written.look(inputs, args, kwargs)
        return output

    def _run(
        self,
        selected: AbstractContextManager[object],
        begin: Callable[[Hooks], PassOn],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        watcher = self._watcher()
        # In backward this makes compute wait for the block's weights and pins its slot.
        leave = None if watcher is None else watcher.enter_again(self._module, begin)
        try:
            with selected:
                return self._original(*args, **kwargs)
        finally:
            if leave is not None:
                leave()
