"""Divides the transformer's matrices among ranks, as Megatron-LM does (arXiv:1909.08053).

Matrices that produce heads and hidden units are divided along the rows of the weight, matrices that
consume them along the columns. Each half of a block then sums once over the parts in forward (its
addition to the residual stream) and once in backward (the gradient of its input). Every rank holds
norms, embedding, head, experts and their router in full: all parts compute the same from the same
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

import torch
from torch import nn

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.experts import Experts
from offloadtrain.model.transformer import Mlp, Transformer, TransformerBlock
from offloadtrain.parallel.expert_parallel import expert_parallel
from offloadtrain.parallel.mesh import DeviceMesh, Mesh
from offloadtrain.parallel.tensor.styles import divide_linear, shrink
from offloadtrain.runtime.tensor_parts import AS_LARGE_AS_EXPERTS, FUSED_ROWS, keep_part

BY_ROWS, BY_COLUMNS = ("attention.qkv", "mlp.up"), ("attention.out", "mlp.down")
"""Linear layers of a block, by the divided dimension of their weight."""

OF_ATTENTION = slice(1)
"""The attention layers in both; with experts as MLP only these are divided."""


def divided(shape: ModelShape, mesh: Mesh) -> Transformer:
    """Return the transformer on the meta device, with this rank's parts of divided tensors."""
    with torch.device("meta"):  # allocated later, block by block, so there is never a second copy
        model = Transformer(shape)
    if mesh.tensor is not None:
        divide_matrices(model, mesh.tensor)
    if mesh.experts is not None:
        expert_parallel(model, mesh.experts)
    return model


def initializer(model: Transformer, seed: int, mesh: Mesh) -> Callable[[nn.Module], None]:
    """Return a function that fills a module with this rank's part of the model's initial
    weights."""
    in_parts = mesh.tensor is not None or mesh.experts is not None
    return model.initializer(seed, keep_part if in_parts else None)


def divide_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Turn the matrices of every block into DTensors, of which this rank holds a part.

    Args:
        mesh: one axis, with the ranks that hold the parts; heads and hidden units are divided.
    """
    for module in model.blocks:
        block = cast(TransformerBlock, module)
        attention, mlp = block.attention, block.mlp
        heads = (attention.num_heads, attention.kv_heads, attention.kv_heads)
        _fuse(attention.qkv, *(count * attention.head_dim for count in heads))
        if isinstance(mlp, Mlp) and mlp.gated:
            rows = mlp.up.weight.shape[0] // 2
            _fuse(mlp.up, rows, rows)
        for name in chain(*_divided(block)):
            divide_linear(block.get_submodule(name), mesh, outputs=name in BY_ROWS)
        attention.num_heads //= mesh.size()
        attention.kv_heads //= mesh.size()
        attention.part = mesh.get_local_rank()


def _fuse(linear: nn.Module, *rows: int) -> None:
    setattr(linear, FUSED_ROWS, dict.fromkeys(("weight", "bias"), rows))


def _divided(block: TransformerBlock) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of a block's linear layers that are divided by rows, and by columns."""
    which = slice(None) if isinstance(block.mlp, Mlp) else OF_ATTENTION
    return BY_ROWS[which], BY_COLUMNS[which]


def with_fewer_experts(model: Transformer, parts: int) -> None:
    """Reduce experts on the meta device to the sizes that `expert_parallel` leaves."""
    for experts in model.modules() if parts > 1 else ():
        if isinstance(experts, Experts):
            for name, _ in list(experts.named_parameters(recurse=False)):
                shrink(experts, name, 0, parts)
                setattr(getattr(experts, name), AS_LARGE_AS_EXPERTS, True)


def narrowed(model: Transformer, parts: int) -> None:
    """Reduce the matrices of every block, on the meta device, to the sizes that `divide_matrices`
    leaves; needs no other ranks."""
    for block in model.blocks if parts > 1 else ():
        for name in chain(*_divided(cast(TransformerBlock, block))):
            linear, by_rows = cast(nn.Linear, block.get_submodule(name)), name in BY_ROWS
            shrink(linear, "weight", int(not by_rows), parts)
            if by_rows and linear.bias is not None:
                shrink(linear, "bias", 0, parts)
