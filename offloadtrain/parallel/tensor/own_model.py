"""The transformer in parts of its matrices, as Megatron-LM divides them (arXiv:1909.08053).

Matrices into heads and hidden units are divided by rows of the weight, those out of them by
columns, so that each half of a block sums once over the parts: forward what it adds to the residual
stream, backward the gradient of its input. Norms, embedding and head are whole on every rank: all
parts compute them alike, from the same batch. The same holds for experts and their router.
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
"""Linear layers of a block, by the dimension of their weight that is divided."""

OF_ATTENTION = slice(1)
"""Those of a block whose MLP are experts, which every part computes whole."""


def divided(shape: ModelShape, mesh: Mesh) -> Transformer:
    """Return the transformer on the meta device, of which this rank holds its part."""
    with torch.device("meta"):  # created block by block: there is never a second copy
        model = Transformer(shape)
    if mesh.tensor is not None:
        divide_matrices(model, mesh.tensor)
    if mesh.experts is not None:
        expert_parallel(model, mesh.experts)
    return model


def initializer(model: Transformer, seed: int, mesh: Mesh) -> Callable[[nn.Module], None]:
    """Return what fills a module with this rank's part of the first weights of the whole model."""
    in_parts = mesh.tensor is not None or mesh.experts is not None
    return model.initializer(seed, keep_part if in_parts else None)


def divide_matrices(model: Transformer, mesh: DeviceMesh) -> None:
    """Make the matrices of every block DTensors, of which this rank holds a part.

    Args:
        mesh: its only axis are the ranks that hold the parts; they divide heads and hidden units.
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
    """The same for experts: of the sizes that `expert_parallel` leaves."""
    for experts in model.modules() if parts > 1 else ():
        if isinstance(experts, Experts):
            for name, _ in list(experts.named_parameters(recurse=False)):
                shrink(experts, name, 0, parts)
                setattr(getattr(experts, name), AS_LARGE_AS_EXPERTS, True)


def narrowed(model: Transformer, parts: int) -> None:
    """Make the matrices of every block, on the meta device, as large as a part of them: of the same
    sizes as `divide_matrices`, without any rank but this one."""
    for block in model.blocks if parts > 1 else ():
        for name in chain(*_divided(cast(TransformerBlock, block))):
            linear, by_rows = cast(nn.Linear, block.get_submodule(name)), name in BY_ROWS
            shrink(linear, "weight", int(not by_rows), parts)
            if by_rows and linear.bias is not None:
                shrink(linear, "bias", 0, parts)
