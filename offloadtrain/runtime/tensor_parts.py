"""What a rank of tensor parallel holds of a parameter, as ranges of the whole one.

[Note: Parts of matrices]
A DTensor that `parallelize_module` has made is divided along one dimension. Its part is one range
of the whole in the order of memory if that dimension varies slowest there. So a matrix that is
divided by columns is kept column by column (`kept_by_columns`): a checkpoint then names every part
by one range of elements, as it does the shards of ranks, and any mesh can read it. A matrix may be
several ones below each other (queries, keys and values; gate and value of an MLP): each of them is
divided, and a part is as many ranges. Its module says so by `fused_rows`, the rows of each. So do
the matrices of experts, a tensor of three axes: each is divided alike, and has its own ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import OffloadTrainError

FUSED_ROWS = "fused_rows"
"""Attribute of a module: name of a parameter that is several ones, one after the other, along the
divided dimension → the rows of each."""


EXPERTS = "ep"
"""Axis of a mesh whose ranks hold different experts."""


AS_LARGE_AS_EXPERTS = "as_large_as_experts"
"""Attribute of a parameter that is laid out without the other ranks."""


class PartError(OffloadTrainError):
    """A part of a parameter that is not a few ranges of the whole."""


class Range(NamedTuple):
    """Elements of a part, in the order of its memory: [lo, lo + length) are [at, at + length) of
    the whole parameter."""

    lo: int
    at: int
    length: int

    def within(self, lo: int, hi: int) -> Range:
        """Return what of it is in [lo, hi) of the part; it may be empty."""
        first, last = max(self.lo, lo), min(self.lo + self.length, hi)
        return Range(first, self.at + first - self.lo, max(last - first, 0))


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank holds of a parameter.

    Attributes:
        shape, stride: of the whole parameter.
        ranges: in the order of its memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def is_part(self) -> bool:
        """Other ranks hold the rest of it."""
        return sum(part.length for part in self.ranges) < math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of `shape`: (n,), in the order of its memory."""
        ordered = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
        ordered.as_strided(self.shape, self.stride).copy_(whole)
        return torch.cat([ordered[part.at : part.at + part.length] for part in self.ranges])


def is_distributed(tensor: Tensor) -> bool:
    """Tell whether it is a DTensor, without importing their module."""
    return hasattr(tensor, "_local_tensor")


def holds_experts(tensor: Any) -> bool:
    """Tell whether it is a DTensor of experts, divided along the axis "ep"; or on the meta device
    a tensor as large as a part of them, marked `AS_LARGE_AS_EXPERTS`."""
    if not is_distributed(tensor):
        return hasattr(tensor, AS_LARGE_AS_EXPERTS)
    return bool(tensor.device_mesh.mesh_dim_names == (EXPERTS,))


def share_of(name: str, param: Any, fused_rows: Sequence[int] = ()) -> Share:
    """Return what this rank holds of a DTensor.

    Args:
        fused_rows: the rows of each matrix that it is made of; (): it is one.

    Raises:
        PartError: it is divided in another way than [Note: Parts of matrices] says.
    """
    shape, stride = tuple(param.shape), tuple(param.stride())
    divided = [
        placement.dim % len(shape) for placement in param.placements if not placement.is_replicate()
    ]
    if not divided:
        return Share(shape, stride, (Range(0, 0, math.prod(shape)),))
    dim, parts = divided[0], param.device_mesh.size()
    rows = tuple(fused_rows) or (shape[dim],)
    outer = [axis for axis, other in enumerate(stride) if other > stride[dim]]
    named = outer in ([], [0] if len(shape) > 2 else [])  # [0]: experts, with ranges of their own
    if len(param.placements) > 1 or not named or any(count % parts for count in rows):
        raise PartError(
            f"'{name}' {list(shape)} is divided into {parts} parts along dimension {dim} of the "
            f"memory order {stride}, so that a part is not a few ranges of it: a checkpoint cannot "
            "name it. Divide a dimension that the parts divide evenly and that varies slowest in "
            "memory (runtime.tensor_parts.kept_by_columns)"
        )
    matrices, rank = math.prod(shape[axis] for axis in outer), param.device_mesh.get_local_rank()
    return Share(shape, stride, tuple(_ranges(rows * matrices, stride[dim], rank, parts)))


def _ranges(rows: Sequence[int], width: int, rank: int, parts: int) -> Iterator[Range]:
    """Yield the range of each matrix; `width`: elements of a row."""
    above, at = 0, 0
    for count in rows:
        each = count // parts
        yield Range(at, (above + rank * each) * width, each * width)
        above, at = above + count, at + each * width


def shares_of(model: nn.Module) -> dict[nn.Parameter, Share]:
    """Return what this rank holds of every DTensor parameter of a model.

    Raises:
        PartError: as `share_of`.
    """
    shares: dict[nn.Parameter, Share] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(prefix, recurse=False):
            if is_distributed(param):
                shares[param] = share_of(name, param, fused_rows_of(module, name))
    return shares


def fused_rows_of(module: nn.Module, name: str) -> Sequence[int]:
    """Return the rows of each matrix that a parameter is made of, by its (qualified) name."""
    rows: Sequence[int] = getattr(module, FUSED_ROWS, {}).get(name.rpartition(".")[2], ())
    return rows


def kept_by_columns(module: nn.Linear) -> None:
    """Keep a DTensor weight that is divided by columns column by column: the same values."""
    weight: Any = module.weight
    local = weight._local_tensor.detach()
    turned = torch.empty_like(local.t(), memory_format=torch.contiguous_format).t()
    if not local.is_meta:
        turned.copy_(local)
    rows, columns = weight.shape
    made = type(weight).from_local(
        turned,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=torch.Size((rows, columns)),
        stride=(1, rows),
    )
    module.weight = nn.Parameter(made, weight.requires_grad)


def keep_part(module: nn.Module, name: str, whole: Tensor) -> None:
    """Fill a weight of a module with this rank's part of a whole one, on the host."""
    weight: Any = getattr(module, name)
    if not is_distributed(weight):
        weight.copy_(whole)
        return
    share = share_of(name, weight, fused_rows_of(module, name))
    local_tensor: Tensor = weight._local_tensor
    local_tensor.as_strided((local_tensor.numel(),), (1,)).copy_(share.of(whole))
