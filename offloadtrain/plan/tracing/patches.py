"""Patches of code outside of the model for a trace: GPU operations, masks of transformers, and
caches of functions.

[Note: Operations of a GPU]
A torch without CUDA has no fake tensors on a GPU: autograd ends the process at the first. So fake
tensors are on the CPU, and an operation that saves other tensors for backward on a GPU is replaced,
in a trace for a GPU, by one that saves the same. torch computes `rms_norm` on a CPU as a chain of
operations in fp32, and on a GPU as one kernel if input and weight have the same dtype: it reads the
input, and saves the input and a number per row. Dropout on a GPU saves a mask of a byte per
element. Attention with dropout is a chain of operations over all scores on a CPU; the fused kernels
of a GPU draw the dropout themselves and save the same as without it.

[Note: Masks of transformers]
Without a cache, transformers reads the positions of tokens: where they restart, a new document
begins in a packed sequence, which then gets a mask. It cannot read fake tensors, and makes the
mask. Without positions from the caller, each sequence is one document and needs no mask.

[Note: Cached fake tensors]
Models cache tables that depend on sizes only (`functools.lru_cache`): anchors, relative positions.
A trace fills such a cache with a fake tensor, and training in the same process would get it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import once_differentiable

_FORWARD, _BACKWARD = "offloadtrain::rms_norm", "offloadtrain::rms_norm_backward"

torch.library.define(_FORWARD, "(Tensor x, Tensor? weight, int rows) -> (Tensor, Tensor)")
torch.library.define(
    _BACKWARD, "(Tensor grad, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor?)"
)


@torch.library.register_fake(_FORWARD)  # type: ignore[untyped-decorator]
def _normed(x: Tensor, weight: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake(_BACKWARD)  # type: ignore[untyped-decorator]
def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        out, rstd = torch.ops.offloadtrain.rms_norm(x, weight, rows)
        ctx.save_for_backward(x, weight, rstd)
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        return *torch.ops.offloadtrain.rms_norm_backward(grad, x, weight, rstd), None


@contextmanager
def operations_of_device(*, on_cpu: bool) -> Iterator[None]:
    """Make torch's operations save what they save on a GPU, unless `on_cpu`."""
    if on_cpu:
        yield
        return
    chain, attention = F.rms_norm, F.scaled_dot_product_attention

    def normed(
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return chain(x, list(normalized_shape), weight, eps)
        rows = x.shape[: x.dim() - len(normalized_shape)].numel()
        return cast(Tensor, _RmsNorm.apply(x, weight, rows))  # type: ignore[no-untyped-call]

    def dropped(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def attended(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **options: Any,
    ) -> Tensor:
        if query.is_meta:  # otherwise torch would compute all scores
            causal, scale = options.get("is_causal", False), options.get("scale")
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return cast(
                Tensor, fused(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]
            )
        return attention(query, key, value, attn_mask, **options)

    with (
        patch.object(F, "rms_norm", normed),
        patch.object(F, "dropout", dropped),
        patch.object(F, "scaled_dot_product_attention", attended),
    ):
        yield


@contextmanager
def masks_as_in_training(*, packed: bool) -> Iterator[None]:
    """Make transformers, if it is imported, build the masks that it builds for real tensors.

    Args:
        packed: the caller gives positions that restart inside sequences.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or packed:
        yield
        return
    with patch.object(masks, "find_packed_sequence_indices", lambda position_ids: None):
        yield


_LINK = "_lru_list_elem"
"""Type name of the entries of a bounded cache in CPython."""


def empty_caches_of(mode: FakeTensorMode) -> None:
    """Clear every function cache that holds a fake tensor of this mode."""
    # Modules share imported objects: without this table a trace would visit most of them again.
    # It holds references, because the id of a dead object may be reused.
    visited: dict[int, Any] = {}
    # A copy: reading attributes of a module may import other modules.
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if id(value) in visited:
                continue
            visited[id(value)] = value
            # `type(value)`, since `__class__` may run code of a foreign object.
            methods = list(vars(value).values()) if issubclass(type(value), type) else []
            for cache in itertools.chain.from_iterable(map(_caches_of, (value, *methods))):
                if any(
                    type(item) is FakeTensor and item.fake_mode is mode
                    for item in _contents_of(cache)
                ):
                    cache.cache_clear()


def _caches_of(value: Any) -> Sequence[Any]:
    """Return the caches that a function is, or closes over."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if type(value) is functools._lru_cache_wrapper:
        return [value]
    if type(value) is not FunctionType:
        return ()
    caches = []
    for cell in value.__closure__ or ():
        try:
            closed = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if type(closed) is functools._lru_cache_wrapper:
            caches.append(closed)
    return caches


def _contents_of(cache: Any) -> Iterator[Any]:
    """Yield the objects in a cache; containers are unpacked."""
    todo, visited = [cache], {id(cache)}
    # The list grows during the loop.
    for container in todo:
        for inner in gc.get_referents(container):
            if id(inner) in visited:
                continue
            visited.add(id(inner))
            if isinstance(inner, dict | list | tuple | set) or type(inner).__name__ == _LINK:
                todo.append(inner)
            else:
                yield inner
