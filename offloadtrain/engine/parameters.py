"""The class of the parameters that an engine moves: reads wait for the weights.

[Note: Parameters]
Values and gradients of an offloaded parameter are not always where torch expects them. After
`step()` new weights may be in transfer; weights of a streamed block are on the device only while
its forward or backward runs; gradients leave for the host during backward. A module has hooks for
its forward and its state dict. It has none for a function that takes parameters, a moving average,
`copy.deepcopy` or a pickle. So, like torch's lazy parameters, offloaded parameters have a special
class, from `offload()` to `close()`:

  OffloadedParameter   its weights are where compute reads them. Computing with it costs nothing
                       more than with an ordinary parameter
  UnreadyParameter     new weights are in transfer, or the weights are not on the device. Every
                       torch function that reads values first requests them from the engine

The engine switches the class, which costs a tenth of a microsecond. If the weights are in
transfer, compute waits for them and the parameter itself is read. If they are not on the device,
the function reads a copy, through which gradients reach the parameter. Functions that return sizes,
types and gradients read no values and wait for nothing.

Writes increment the parameter's version, including writes into `data`. The masters adopt them at
the next step boundary. A write into a copy is copied to the weights; if the
weights have changed since the copy was made, the write raises an error.

Reads below torch's functions are not detected: C++ extensions, `torch.compile` of code that the
engine does not hook, `torch.func.grad` of a parameter, and views that were taken before. If the
weights are not on the device, these read NaN. Parameters of a custom class, such as
DTensors, keep their class and request nothing: hooks of modules wait for them ([Note: Reads without
a call] in `engine.autograd.forward_hooks`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from offloadtrain.config.errors import ModelError, OffloadTrainError
from offloadtrain.runtime.tensor_parts import is_distributed

_GRAD: Any = Tensor.grad
"""torch's descriptor of the attribute."""

set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]
"""Makes a parameter a view of other memory; bypasses the setter of its class."""

gradient_of: Callable[[nn.Parameter], Tensor | None] = _GRAD.__get__
"""Returns `param.grad` for the engine itself: no observer is called. torch's function is used
directly, as it is called for every gradient."""

past_the_class = torch._C.DisableTorchFunctionSubclass
"""A context in which the engine reads and sets parameters of any class without a wait."""


class ParameterWriteError(OffloadTrainError):
    """A write into a parameter would be lost."""


class Observer(Protocol):
    """The object that offloaded parameters report to."""

    def before_copy(self) -> None:
        """Parameters are about to be copied: make them hold the newest weights."""

    def gradient(self, param: nn.Parameter, frame: FrameType) -> Tensor | None:
        """Return `param.grad` for the code in `frame`."""

    def gradient_is_set(self, param: nn.Parameter, grad: Tensor | None, frame: FrameType) -> bool:
        """The code in `frame` sets `param.grad`; returns True if the gradient was written to its
        memory, False if it must be set as the attribute."""

    def before_data_is_set(self, param: nn.Parameter, values: Tensor, frame: FrameType) -> bool:
        """The code in `frame` is about to make the parameter a view of other memory; returns False
        if it stays unchanged, as it has these values already.

        Raises:
            ParameterWriteError: the masters could not adopt the values from that memory.
        """

    def before_write(self, param: nn.Parameter) -> bool:
        """Make a parameter that was read as a copy a view of its weights in their present tier;
        returns False if that is impossible."""

    def write(self, param: nn.Parameter, weights: Tensor) -> None:
        """Copy `weights`, in the parameter's shape, to the parameter's memory; after
        `before_write`."""

    def version_of(self, param: nn.Parameter) -> object:
        """Return a value that changes with each update of the weights and each write into them."""

    def layout_of(self, param: nn.Parameter) -> Tensor:
        """Return a tensor without memory, of the parameter's shape and strides."""

    def values_of(self, param: nn.Parameter, *, in_graph: bool) -> Tensor | None:
        """Let compute read the newest weights of a parameter.

        Args:
            in_graph: autograd may save the values for a backward.

        Returns:
            A copy of the weights on the device; None: the parameter's memory has them now.
        """


_observers = WeakIdKeyDictionary()
"""Parameter → a weak reference to its observer."""


class OffloadedParameter(nn.Parameter):
    """A parameter that an engine moves. Its copies are ordinary parameters."""

    @property
    def grad(self) -> Tensor | None:
        observer = _observer_of(self)
        return gradient_of(self) if observer is None else observer.gradient(self, sys._getframe(1))

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        observer = _observer_of(self)
        if observer is None or not observer.gradient_is_set(self, grad, sys._getframe(1)):
            with past_the_class():
                _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        # torch's `data` has a separate version counter, so that writes would go unnoticed.
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        # For example `.to()` of a module to its own device; some models call it in each forward.
        if isinstance(values, WeightsCopy) and values.source and values.source.is_copy_of(self):
            return
        with past_the_class():
            if values.dtype == self.dtype and self.is_set_to(values):
                return
        observer = _observer_of(self)
        if observer is not None:
            if not observer.before_data_is_set(self, values, sys._getframe(1)):
                return
        with past_the_class():
            set_data(self, values)
            increment_version(self)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        handle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        hooks: dict[int, Any] = self._post_accumulate_grad_hooks
        # The engine's hook stays last: it takes the gradient away.
        last = list(hooks)[-2]
        hooks[last] = hooks.pop(last)
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # On the host, as in a state dict: a pickle keeps all objects that it has visited alive.
        return self._copied(torch.device("cpu")).__reduce_ex__(protocol)

    def _copied(self, device: torch.device | None = None) -> nn.Parameter:
        """Return a copy: saving a view of a flat buffer would save all of the buffer."""
        if (observer := _observer_of(self)) is not None:
            observer.before_copy()
        with past_the_class():
            values = self.data.to(device or self.device, copy=True)
            return nn.Parameter(values, self.requires_grad)


class UnreadyParameter(OffloadedParameter):
    """An offloaded parameter whose weights compute cannot read yet."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with past_the_class():
            if func in _LAYOUT and (observer := _observer_of(args[0])) is not None:
                return func(observer.layout_of(args[0]), *args[1:], **kwargs)
            module = getattr(func, "__module__", "") or ""
            if module.startswith("torch.autograd") or func in WITHOUT_VALUES:
                return func(*args, **kwargs)
            copies: _Copies = {}
            is_detached = func in _DETACHED or module == nn.init.__name__
            read = partial(_readable, copies, has_gradient=not is_detached)
            as_itself = func in _VIEWS_AS and len(args) == 2 and args[0] is args[1]
            args, kwargs = tree_map_only(UnreadyParameter, read, (args, kwargs))
            # A copy in a graph: a view of it would be one node farther from the parameter's.
            if as_itself and args[0].grad_fn is not None:
                return args[0]
        return _run(func, args, kwargs, list(copies.values()))


class _Source:
    """The parameter that a copy of weights was made of."""

    def __init__(self, param: nn.Parameter, observer: Observer, weights: Tensor) -> None:
        """`weights`: the complete copy."""
        self._param, self._observer, self._weights = param, observer, weights
        self._version = observer.version_of(param)

    def is_copy_of(self, param: nn.Parameter) -> bool:
        """Return True if a parameter still has the copied weights, including writes copied back."""
        return param is self._param and self._observer.version_of(param) == self._version

    def write_back(self) -> bool:
        """Copy writes to the weights themselves; returns False if it is too late."""
        writable = self._observer.before_write(self._param)
        if not writable or self._observer.version_of(self._param) != self._version:
            return False
        self._observer.write(self._param, self._weights)
        self._version = self._observer.version_of(self._param)
        return True


_Copies = dict[nn.Parameter, tuple[Tensor, "_Source | None"]]
"""Parameter → tensor that is read instead, with its source; no source: in a graph."""


class WeightsCopy(Tensor):
    """A view of a copy of weights that are not on the device."""

    source: _Source | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copies: list[tuple[Tensor, _Source | None]] = []

        def plain(view: WeightsCopy) -> Tensor:
            copies.append((view.as_subclass(Tensor), view.source))
            return copies[-1][0]

        with past_the_class():
            args, kwargs = tree_map_only(WeightsCopy, plain, (args, kwargs or {}))
        return _run(func, args, kwargs or {}, copies)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with past_the_class():
            copied: Tensor = memo.setdefault(id(self), self.as_subclass(Tensor).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with past_the_class():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _ThroughCopy(torch.autograd.Function):
    """A copy of a parameter's weights, whose gradient is the parameter's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(param: Tensor, weights: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing is saved; `torch.func` requires this method."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _readable(copies: _Copies, param: nn.Parameter, *, has_gradient: bool) -> Tensor:
    """Return the tensor that a function reads for a parameter: itself, or a copy, which is added
    to `copies`; `has_gradient`: the function has a gradient."""
    if param in copies:
        return copies[param][0]
    observer = _observer_of(param)
    if observer is None:
        param.__class__ = OffloadedParameter
        return param
    in_graph = has_gradient and param.requires_grad and torch.is_grad_enabled()
    weights = observer.values_of(param, in_graph=in_graph)
    if weights is None:
        if type(param) is not UnreadyParameter:
            return param
        # Still unready, or unready again because of another thread. The alias shares memory and
        # version.
        return param.view_as(param) if in_graph else param.detach()
    source = None if in_graph else _Source(param, observer, weights)
    if in_graph:
        weights = _ThroughCopy.apply(param, weights)  # type: ignore[no-untyped-call]
    copies[param] = weights, source
    return weights


def _run(
    func: Any, args: Any, kwargs: dict[str, Any], copies: list[tuple[Tensor, _Source | None]]
) -> Any:
    """Call a function that reads copies of weights, and copy its writes back.

    Raises:
        ParameterWriteError: a write cannot be copied back.
    """
    before = [copy._version for copy, _ in copies]
    result = func(*args, **kwargs)
    for (copy, source), version in zip(copies, before, strict=True):
        if copy._version != version and (source is None or not source.write_back()):
            raise ParameterWriteError(
                f"{getattr(func, '__name__', func)}() writes into a copy of a streamed parameter "
                "that is in a graph, or older than its weights, or in shards: the write is lost. "
                "Call optimizer.synchronize() and write into the parameter itself, or load weights "
                "with model.load_state_dict()"
            )
    if copies and type(result) in (list, tuple):
        return type(result)(_as_view(part, copies) for part in result)
    return _as_view(result, copies)


def _as_view(result: Any, copies: list[tuple[Tensor, _Source | None]]) -> Any:
    """Return a function's result; a view of a copy of weights as a tensor that detects writes."""
    for copy, source in copies:
        if type(result) is Tensor and shares_memory(result, copy):
            result = result.as_subclass(WeightsCopy)
            result.source = source
    return result


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are views of one storage."""
    if not tensor.layout is other.layout is torch.strided:
        return False
    # Inside a torch.func transform, tensors have no storage.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _observer_of(param: Tensor) -> Observer | None:
    reference = _observers.get(param)
    observer: Observer | None = None if reference is None else reference()
    return observer


def take_gradients(params: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Remove each `param.grad` and return it, for the engine itself: no observer is called."""
    get, set_ = _GRAD.__get__, _GRAD.__set__
    grads: list[Tensor | None] = []
    with past_the_class():
        for param in params:
            grads.append(get(param))
            set_(param, None)
    return grads


def observe(params: Iterable[nn.Parameter], observer: Observer) -> None:
    """Make parameters report to `observer`, which is referenced weakly. A parameter of a custom
    class is left unchanged, and does not report."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = OffloadedParameter
        if isinstance(param, OffloadedParameter):
            _observers[param] = weakref.ref(observer)


def release(params: Iterable[nn.Parameter]) -> None:
    """Turn them into ordinary parameters again."""
    for param in params:
        if isinstance(param, OffloadedParameter):
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            _observers.pop(param, None)


def set_ready(params: Iterable[nn.Parameter]) -> None:
    """The weights are where compute reads them."""
    for param in params:
        if type(param) is UnreadyParameter:
            param.__class__ = OffloadedParameter  # type: ignore[assignment]


def set_unready(params: Iterable[nn.Parameter]) -> None:
    """Make reads of these parameters request their weights."""
    for param in params:
        if type(param) is OffloadedParameter:
            param.__class__ = UnreadyParameter


_ATTRIBUTES = (
    "shape dtype device layout requires_grad is_leaf grad grad_fn ndim is_cuda is_cpu is_meta "
    "is_mps is_xpu is_xla is_sparse is_sparse_csr is_mkldnn is_quantized is_nested names name "
    "itemsize nbytes output_nr retains_grad volatile _version _base _grad _backward_hooks "
    "_post_accumulate_grad_hooks"
)
_METHODS = (
    "size dim ndimension numel nelement element_size data_ptr storage_offset "
    "untyped_storage get_device is_floating_point is_complex is_signed is_inference "
    "is_conj is_neg is_shared is_pinned is_same_size has_names type requires_grad_ register_hook "
    "register_post_accumulate_grad_hook retain_grad new_empty new_zeros new_ones new_full "
    "new_tensor __hash__ __len__ _is_view"
)
_FUNCTIONS = (
    "empty_like zeros_like ones_like full_like rand_like randn_like is_floating_point is_complex "
    "numel result_type"
)


def _without_values() -> set[Any]:
    accessors = ("__get__", "__set__", "__delete__")
    functions: set[Any] = {Tensor.data.__set__}  # type: ignore[attr-defined]
    for name in _ATTRIBUTES.split():
        descriptor = getattr(Tensor, name, None)
        functions |= {getattr(descriptor, each) for each in accessors if hasattr(descriptor, each)}
    functions |= {getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)}
    return functions | {getattr(torch, name) for name in _FUNCTIONS.split()}


_DETACHED = {Tensor.detach, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
"""Functions without a gradient; the functions of `nn.init`, which write, are treated alike."""
_LAYOUT = {Tensor.stride, Tensor.is_contiguous, Tensor.dim_order}
"""Functions whose result would be wrong for the memory of absent weights, an expanded NaN."""
_VIEWS_AS = {Tensor.view_as, Tensor.expand_as}
"""With a parameter and itself as arguments, these are used to reach its AccumulateGrad node."""
WITHOUT_VALUES = _without_values()
"""Functions of torch that read no values of their arguments."""


class ParameterGuard:
    """Detects parameters that were written, frozen, replaced or added outside the engine.

    The engine writes through flat buffers, which does not change a parameter's version counter; any
    other write does. The masters adopt values written into trained parameters; frozen parameters
    have no masters that would undo a write. The order of a module's parameters may change, for
    example if a forward registers a parametrization and removes it.

    Attributes:
        overwritten: parameter → its weights before it was written, if weights are a
            field of the masters: until the masters adopt the written values.
    """

    def __init__(self, model: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
        """`groups`: the optimizer's parameter groups."""
        self._model = model
        self._grouped = _members(groups)
        self._named = list(model.named_parameters())
        self._params = [param for _, param in self._named]
        self._trainable = [param.requires_grad for param in self._params]
        self._ids = _parameters(model).keys()
        self._writes = WriteCounts(self._params)
        self.renew()

    def written(self) -> list[nn.Parameter]:
        """Return the parameters that were written outside the engine since the last renewal."""
        with past_the_class():
            return self._writes.since(self._counts)

    def renew(self) -> None:
        """Accept the present values."""
        self.overwritten: dict[nn.Parameter, Tensor] = {}
        with past_the_class():
            self._counts = self._writes.read()

    def is_retrained(self) -> bool:
        """Return True if a parameter was frozen or unfrozen since this object was made."""
        with past_the_class():
            return list(map(_requires_grad, self._params)) != self._trainable

    def is_regrouped(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return True if the groups have other parameters than when this object was made."""
        return _members(groups) != self._grouped

    def check(self) -> None:
        """Raises ModelError for the first parameter that was changed outside the engine, except by
        writing values."""
        current = _parameters(self._model).keys()
        if current == self._ids and not self.is_retrained():
            return
        if len(current) != len(self._named):
            raise ModelError(
                f"the model has {len(current)} parameters, {len(self._named)} when it "
                "was offloaded: "
                "close() the optimizer and offload the changed model"
            )
        for (name, param), was in zip(self._named, self._trainable, strict=True):
            if id(param) not in current:
                raise ModelError(
                    f"parameter '{name}' was replaced by another object after offload(): the "
                    "master weight does not know. Load weights with model.load_state_dict(), or "
                    "change the model before offload()"
                )
            if param.requires_grad != was:
                what = "frozen" if was else "unfrozen"
                raise ModelError(
                    f"parameter '{name}' was {what} between a forward of the model and step(): "
                    "freeze and unfreeze after step() or zero_grad(), before the next forward"
                )


def _members(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in groups]


def _parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the model's parameters by id. Every step calls it; it is faster than
    `model.parameters()`, which has a generator per level and a name for each parameter."""
    # By id: a tensor's hash is a Python function.
    params: dict[int, nn.Parameter | None] = {}
    modules, visited = [model], {id(model)}
    # The list grows during the iteration.
    for module in modules:
        for param in module._parameters.values():
            params[id(param)] = param
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                modules.append(child)
    params.pop(id(None), None)
    return cast(dict[int, nn.Parameter], params)


class WriteCounts:
    """Counts the writes into parameters; for DTensors also the writes into their parts
    (`to_local().copy_(…)`). Without Python loops: every forward and every step read the counts."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params, self._divided = params, [*filter(is_distributed, params)]

    def read(self) -> list[int]:
        """Return the present counts."""
        return [*map(_VERSION, self._params), *map(_PART_VERSION, self._divided)]

    def since(self, counts: Sequence[int]) -> list[nn.Parameter]:
        """Return the parameters that were written after `read` returned `counts`."""
        now = self.read()
        if now == counts:
            return []
        pairs = zip([*self._params, *self._divided], now, counts, strict=True)
        return list({id(param): param for param, new, old in pairs if new != old}.values())


_VERSION, _PART_VERSION = attrgetter("_version"), attrgetter("_local_tensor._version")
_requires_grad = attrgetter("requires_grad")
