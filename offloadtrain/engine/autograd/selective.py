"""Selective recompute: a layer saves the results of its expensive operations and recomputes the
rest.

[Note: Selective recompute]
With activation = "selective" the second run of a forward ([Note: Recompute] in `recompute.py`)
reuses the results of products and attention from the first run. A dispatch mode around the user's
forward records them, and in the second run returns them in the same order, as torch's
`create_selective_checkpoint_contexts` does. This mode differs in four ways:
* It ignores the engine's operations (loads, casts): their number differs between the runs.
* Views and in-place operations always run again. A saved view of streamed weights would show the
  next block's weights.
* A result that was changed in place later is recomputed: its version has changed, or an
  operation wrote to its memory through another tensor. Writes that torch does not see, by kernels
  that get pointers, are not noticed.
* A saved operation may have drawn random numbers. The second run skips it and sets the generator to
  its state after that operation, so that later operations draw the same numbers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.runtime.tensor_parts import local

Policy = Callable[..., Any]
"""A policy of torch's `create_selective_checkpoint_contexts`: (context, operation, *args, **kwargs)
→ a `CheckpointPolicy`, or True for an operation whose results are saved."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

_EXPENSIVE = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_int_mm", "convolution"),
        *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "mkldnn_rnn_layer"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
        *("_efficient_attention_forward",),
    )
) | {
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "torch_attn::_varlen_attn",
}
"""Schema names of products and attention."""


class PolicyError(OffloadTrainError):
    """A policy returned a decision that is not supported."""


class _Thread(threading.local):
    is_engine = False
    """True while engine code runs on this thread; `Selection` ignores its operations."""
    unpacking = 0
    """Number of nested unpackings of saved tensors on this thread."""


_THREAD = _Thread()


def engine_code(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate an engine method that is called inside a layer's forward: `Selection` ignores it."""

    @wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():  # traces casts, runs no dispatch mode
            return method(*args, **kwargs)
        previous = _THREAD.is_engine
        try:
            _THREAD.is_engine = True
            return method(*args, **kwargs)
        finally:
            _THREAD.is_engine = previous

    return wrapper


@contextmanager
def unpacking() -> Iterator[None]:
    """Mark that a saved tensor is being unpacked: forwards recomputed for it are not part of an
    enclosing forward that differentiates a part of itself."""
    _THREAD.unpacking += 1
    try:
        yield
    finally:
        _THREAD.unpacking -= 1


def default_policy(_: object, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """The policy if the user sets none: save products and attention."""
    schema = getattr(operation, "_schema", None)  # flex attention has none
    return schema is None or schema.name in _EXPENSIVE


class _Generator(NamedTuple):
    """The state of a device's torch generator after an operation that may draw from it."""

    device: torch.device
    state: Tensor

    def restore(self) -> None:
        if self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


class _Result:
    """The saved result of an operation."""

    __slots__ = ("_leaves", "_spec", "_versions", "generator")

    def __init__(self, out: Any, generator: _Generator | None) -> None:
        leaves, self._spec = tree_flatten(out)
        # Detached: autograd will make `out` a part of the graph, which references this object.
        self._leaves = [_detached(leaf) for leaf in leaves]
        self._versions = [getattr(leaf, "_version", None) for leaf in self._leaves]
        self.generator = generator

    @property
    def is_unchanged(self) -> bool:
        return self._versions == [getattr(leaf, "_version", None) for leaf in self._leaves]

    def value(self) -> Any:
        return tree_unflatten(self._leaves, self._spec)


class Selection(TorchDispatchMode):
    """Wraps a forward: the first run records the results that `policy` saves, the second reuses
    them."""

    supports_higher_order_operators = True

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._ran = False
        self._depth = self._level = 0
        """Number of nested runs; `_THREAD.unpacking` when the outermost of them began."""
        self._calls: Counter[Any] = Counter()
        self._results: dict[tuple[Any, int], _Result] = {}
        self._in_memory: dict[int, list[tuple[Any, int]]] = {}
        """Storage → keys of the saved results in it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `Passthrough`

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: a function that the user has compiled, such as flex attention, stays
        compiled."""
        return True

    def __enter__(self) -> Selection:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not self._depth:
            self._level = _THREAD.unpacking
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth:
            return
        self._calls.clear()
        self._in_memory.clear()
        if self._ran:
            self._results.clear()  # unused by the second run; a third run recomputes
        self._ran = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Deeper: the forward differentiates a part of itself, which runs this forward again inside
        # its first run, or other forwards in a user's checkpoint. Those runs neither save nor
        # reuse.
        is_deeper = _THREAD.unpacking > self._level
        if _THREAD.is_engine or is_deeper or _casts_weight(func, args):
            return func(*args, **kwargs)
        if not _is_functional(func):
            if not self._in_memory:
                return func(*args, **kwargs)
            for storage in _memory_of(_written(func, args, kwargs)) & self._in_memory.keys():
                for key in self._in_memory.pop(storage):
                    self._results.pop(key, None)
            return func(*args, **kwargs)
        key = func, self._calls[func]
        self._calls[func] += 1
        if not self._ran:
            out = func(*args, **kwargs)
            if self._keeps(out, func, args, kwargs):
                state = _generator_of(out) if draws(func, args, kwargs) else None
                self._results[key] = _Result(out, state)
                for storage in _memory_of(out):
                    self._in_memory.setdefault(storage, []).append(key)
            return out
        result = self._results.pop(key, None)
        if result is None or not result.is_unchanged:
            return func(*args, **kwargs)
        if result.generator is not None:
            result.generator.restore()
        return result.value()

    def _keeps(self, out: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a result is to be saved; raises PolicyError if the policy asks for
        offload."""
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = out  # older releases of torch have no argument for it
        decision = self._policy(context, func, *args, **kwargs)
        if isinstance(decision, CheckpointPolicy):
            if "OFFLOAD" in decision.name:
                raise PolicyError(
                    f"activation_policy returned {decision.name} for {func}: what 'selective' "
                    "keeps stays on the device. Return a SAVE or a RECOMPUTE, or set activation = "
                    "'offload_saved', which moves all that is saved"
                )
            decision = decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
        # Some operations return memory of their inputs, such as weights, without declaring the
        # alias.
        return bool(decision) and _memory_of(out).isdisjoint(_memory_of((args, kwargs)))


@cache
def _is_functional(func: Any) -> bool:
    """Return True if an operation returns new tensors and uses no generator of the user's."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return str(func) == "flex_attention"
    schema = func._schema
    takes_generator = any(
        str(argument.type) == "Optional[Generator]" for argument in schema.arguments
    )
    aliases = any(returned.alias_info is not None for returned in schema.returns)
    return not (schema.is_mutable or aliases or takes_generator) and bool(schema.returns)


def draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an operation draws random numbers; attention does so only with dropout."""
    schema = getattr(operation, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    if "dropout_p" in names:  # operations of other libraries (flash_attn) have no tags
        values = dict(zip(names, args, strict=False)) | kwargs
        return bool(values.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def _casts_weight(func: Any, args: Any) -> bool:
    """Return True if autocast casts a weight: it does so once per region, so that the two runs
    differ in the number of these casts."""
    is_cast = func is torch.ops.aten._to_copy.default
    return is_cast and args[0].is_leaf and args[0].requires_grad


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation changes in place. Version counters do not show all
    such writes: tensors cut by `unsafe_chunk`, such as the gates of a GRU, and `data` have separate
    counters."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return [values.get(name) for name in names]


def _generator_of(out: Any) -> _Generator | None:
    device = next((tensor.device for tensor in _tensors(out)), None)
    if device is None or device.type == "meta":
        return None
    if device.type == "cpu":
        return _Generator(device, torch.get_rng_state())
    return _Generator(device, torch.get_device_module(device).get_rng_state(device))


def _detached(leaf: Any) -> Any:
    """Return another tensor over the same memory that shares the version counter."""
    if not isinstance(leaf, Tensor):
        return leaf
    # Below autograd, `detach` would create a new counter.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor))


def _memory_of(values: Any) -> set[int]:
    return {
        local(tensor).untyped_storage()._cdata
        for tensor in _tensors(values)
        if tensor.layout is torch.strided
    }
