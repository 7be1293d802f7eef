"""Casts for models with 16-bit weights: fp32 inputs, and losses.

[Note: Casts]
A model with 16-bit weights gets fp32 inputs: pixels and audio, but also timesteps, labels and
masks, where a 16-bit cast would round 999 to 1000. torch rejects a product of fp32 inputs and
16-bit weights, so a cast is made only there: at the torch modules whose forward rejects mixed
dtypes. Operations that a resident 16-bit model runs without a cast are left alone, so that its
bits are the same. Modules with their own matrices, and the layers of a list, cast their first
input if it is an input of the model: values computed in fp32 on purpose stay fp32.
Loss functions inside the model compute in fp32, as under `torch.autocast`: the three digits of a
16-bit loss are too few to see it decrease. The mode that detects them costs a microsecond per
operation; it is off inside the layers of a list, which compute no losses. A user's checkpoint must
run the same in backward, where the mode is off: losses inside it are computed in their input dtype.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from offloadtrain.config.errors import ModelError
from offloadtrain.engine.autograd.hooks import OfOneModel, Removable, has_ended
from offloadtrain.engine.autograd.saved_tensors import in_checkpoint
from offloadtrain.engine.autograd.selective import engine_code

_REFUSE = (
    *(nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell),
    *(nn.GRUCell, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Modules whose forward raises if the dtypes of input and weights differ."""

_LOSSES = {
    *(F.cross_entropy, F.nll_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.ctc_loss),
    *(F.gaussian_nll_loss, F.poisson_nll_loss, F.cosine_embedding_loss, F.soft_margin_loss),
    *(F.hinge_embedding_loss, F.margin_ranking_loss, F.multi_margin_loss, F.triplet_margin_loss),
    *(F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_similarity),
}


def attach_casts(
    model: nn.Module,
    repeated: Collection[nn.Module],
    dtype: torch.dtype,
    *,
    cast_inputs: bool | None,
) -> list[Removable]:
    """Attach hooks so that a model with weights of `dtype` accepts fp32 inputs and computes fp32
    losses.

    Args:
        repeated: the layers of lists.
        cast_inputs: None casts inputs where they meet a matrix; True also casts all inputs of the
            model's forward; False casts none.
    """
    if dtype is torch.float32:
        return []
    handles = _attach_losses(model, repeated)
    if cast_inputs is False:
        return handles
    if cast_inputs:
        handles.append(model.register_forward_pre_hook(_CastAll(dtype), with_kwargs=True))
    return [*handles, *_attach_matrices(model, repeated, dtype)]


def _attach_matrices(
    model: nn.Module, repeated: Collection[nn.Module], dtype: torch.dtype
) -> list[RemovableHandle]:
    model_inputs, refusing = _Given(dtype), {kind.forward for kind in _REFUSE}
    handles = [model.register_forward_pre_hook(model_inputs, with_kwargs=True)]
    for name, module in model.named_modules():
        hook: Any = None
        if type(module).forward in refusing:
            if dtypes := {p.dtype for p in module.parameters(recurse=False)}:
                hook = _CastRefused(dtype if dtype in dtypes else torch.float32, name)
        elif module in repeated:
            hook = _CastGiven(model_inputs, None)
        elif sizes := _matrix_sizes(module, dtype):
            hook = _CastGiven(model_inputs, sizes)
        if hook is not None:
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def _matrix_sizes(module: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return the sizes of the matrices that the module owns directly."""
    owned = [p for p in module.parameters(recurse=False) if p.dtype is dtype and p.dim() > 1]
    return {size for param in owned for size in param.shape} - {1}


class _CastAll(OfOneModel):
    """Hook of the model: casts every floating-point input to `dtype`."""

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(self._cast, args), tree_map(self._cast, kwargs)

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self._dtype) if _is_floating(leaf) else leaf


class _CastRefused(OfOneModel):
    """Hook of a module that rejects mixed dtypes: if its first floating-point input has another
    dtype than its weights, casts all inputs to the weights' dtype."""

    __slots__ = ("_dtype", "_name")

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        self._dtype = dtype
        self._name = name

    @engine_code
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Fast path: nearly all calls.
        if args and isinstance(args[0], Tensor) and args[0].dtype is self._dtype:
            return None
        first = next(_floating(args, kwargs), None)
        if first is None or first.dtype is self._dtype:
            return None
        # The model's forward may have cast the weights themselves.
        dtypes = {param.dtype for param in module.parameters(recurse=False)}
        if self._dtype not in dtypes:
            raise ModelError(
                f"the model's forward casts the weights of '{self._name}' from {self._dtype} to "
                f"{', '.join(map(str, dtypes))}: keep them in fp32 from the start, "
                f'keep_fp32=["{self._name}.*"], or set precision = "fp32"'
            )

        def cast(leaf: Any) -> Any:
            if not _is_floating(leaf) or leaf.dtype is self._dtype:
                return leaf
            return leaf.to(self._dtype) if leaf is first else _narrowed(leaf, self._dtype)

        return tree_map(cast, args), tree_map(cast, kwargs)


def _narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a mask so that the lowest fp32 number, a usual mask value, stays finite."""
    if dtype.itemsize >= mask.itemsize:
        return mask.to(dtype)
    finite = mask.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return torch.where(mask.isinf(), mask, finite).to(dtype)


class _Given(OfOneModel):
    """Hook of the model: records the memory of its fp32 inputs while they are alive. A recompute
    may use them in backward, and a later tensor may reuse the address of a freed input."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._gone: dict[int, Callable[[], bool]] = {}
        """Address → a function that returns True once the input at this address is freed."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._gone = {address: gone for address, gone in self._gone.items() if not gone()}
        for leaf in tree_leaves((args, kwargs)):
            if _is_floating(leaf) and leaf.dtype is not self.dtype:
                self._gone[_memory(leaf)] = _when_gone(leaf)

    def __contains__(self, tensor: Tensor) -> bool:
        if tensor.dtype is self.dtype:
            return False
        gone = self._gone.get(_memory(tensor))
        return gone is not None and not gone()


class _CastGiven(OfOneModel):
    """Hook of a layer or of a module with matrices: casts its first floating-point input if it is
    an input of the model and, with `sizes`, one of them is the size of dim 1 or the last dim."""

    __slots__ = ("_model_inputs", "_sizes")

    def __init__(self, model_inputs: _Given, sizes: set[int] | None) -> None:
        self._model_inputs = model_inputs
        self._sizes = sizes

    @engine_code
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        first = next(_floating(args, kwargs), None)
        if first is None or first.dim() < 2 or first not in self._model_inputs:
            return None
        if self._sizes is not None and self._sizes.isdisjoint((first.shape[1], first.shape[-1])):
            return None
        cast = first.to(self._model_inputs.dtype)
        args = tuple(cast if value is first else value for value in args)
        return args, {key: cast if value is first else value for key, value in kwargs.items()}


def _floating(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (value for value in chain(args, kwargs.values()) if _is_floating(value))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    # Inside torch.func transforms a tensor has no storage.
    except RuntimeError:
        return id(tensor)


def _when_gone(tensor: Tensor) -> Callable[[], bool]:
    try:
        return StorageWeakRef(tensor.untyped_storage()).expired
    except RuntimeError:
        alive = weakref.ref(tensor)
        return lambda: alive() is None


class _FullLosses(TorchFunctionMode):
    """Casts 16-bit inputs of loss functions to fp32. On while the model's forward runs, except
    inside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self._frame: FrameType | None = None
        """Frame of the model's forward; see [Note: Interrupted forwards] in `hooks.py`."""
        self._is_off = False
        self._was_on: list[bool] = []
        """For each running layer: whether the mode was on when it started."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_off = self._is_off or has_ended(self._frame)
        if func in _LOSSES and not is_off and not in_checkpoint():
            args, kwargs = tree_map_only(Tensor, _full, (args, kwargs))
        return func(*args, **kwargs)

    def remove(self) -> None:
        """Turn the mode off, also if an interrupt has left it on; pop it if no mode is above it."""
        self._was_on.clear()
        self._is_off = True
        self.leave_model(None)

    def enter_model(self, frame: FrameType | None) -> None:
        while isinstance(top := _get_current_function_mode(), _FullLosses):
            if not has_ended(top._frame):
                break
            top.remove()
        self._was_on.clear()
        self._frame, self._is_off = frame, False
        # An interrupt can have left the mode on the stack.
        if self not in _get_current_function_mode_stack():
            self.__enter__()

    def leave_model(self, _: FrameType | None) -> None:
        self._frame = None  # the frame would keep the forward's return values alive
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def enter_layer(self, _: FrameType | None) -> None:
        self._was_on.append(_get_current_function_mode() is self)
        if self._was_on[-1]:
            self.__exit__(None, None, None)

    def leave_layer(self, _: FrameType | None) -> None:
        if self._was_on and self._was_on.pop():
            self.__enter__()


_Method = Callable[[FrameType | None], None]


class _Call(OfOneModel):
    """Hook that calls a method of the mode with the frame that runs the forward."""

    __slots__ = ("_method",)

    def __init__(self, method: _Method) -> None:
        self._method = method

    def __call__(self, *_: Any) -> None:
        self._method(None if torch.compiler.is_dynamo_compiling() else sys._getframe(1))


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 2 else tensor


def _attach_losses(model: nn.Module, repeated: Collection[nn.Module]) -> list[Removable]:
    mode = _FullLosses()
    around: list[tuple[nn.Module, _Method, _Method]]
    around = [(model, mode.enter_model, mode.leave_model)]
    around += [(module, mode.enter_layer, mode.leave_layer) for module in repeated]
    handles: list[Removable] = [mode]
    for module, enter, leave in around:
        # Turned off before the engine's hook, whose operations the mode must not slow down.
        first = module is not model
        handles.append(module.register_forward_pre_hook(_Call(enter), prepend=first))
        handles.append(module.register_forward_hook(_Call(leave), always_call=True))
    return handles
