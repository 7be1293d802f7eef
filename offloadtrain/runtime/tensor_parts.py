"""This rank's share of a parameter: all of it, or the local part of a DTensor.

Tensor parallelism (`parallelize_module`) replaces parameters by DTensors, whose shape is that of
the full matrix. The engine moves, sums and updates the parts of ranks like full parameters;
checkpoints describe them as ranges of the full parameter.

[Note: Parts of matrices]
A DTensor that `parallelize_module` has made is divided along one dimension. Its part is one range
of the full matrix in memory order if that dimension varies slowest in memory. So a matrix that is
divided by columns is stored column by column (`kept_by_columns`): a checkpoint then describes every
part by one range of elements, like the shards of ranks, and any mesh can read it. A matrix may be
a stack of several (queries, keys and values; gate and value of an MLP): each of them is
divided, and a part has as many ranges. Its module declares this by `fused_rows`, the rows of each.
The matrices of experts, a tensor with three axes, are also divided one by one, each with its
ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from offloadtrain.config.errors import OffloadTrainError

FUSED_ROWS = "fused_rows"
"""Attribute of a module: name of a parameter that stacks several matrices along the divided
dimension → the rows of each."""


EXPERTS = "ep"
"""Mesh axis whose ranks hold different experts."""


AS_LARGE_AS_EXPERTS = "as_large_as_experts"
"""Attribute of a parameter that is laid out without the other ranks."""


class PartError(OffloadTrainError):
    """A part of a parameter cannot be described by a few ranges of the full parameter."""


class Range(NamedTuple):
    """Elements of a part, in the order of its memory: [lo, lo + length) are [at, at + length) of
    the full parameter."""

    lo: int
    at: int
    length: int

    def within(self, lo: int, hi: int) -> Range:
        """Return the intersection with [lo, hi) of the part; it may be empty."""
        first, last = max(self.lo, lo), min(self.lo + self.length, hi)
        return Range(first, self.at + first - self.lo, max(last - first, 0))


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of a parameter.

    Attributes:
        shape, stride: those of the full parameter.
        ranges: in the order of its memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def is_part(self) -> bool:
        """True if other ranks hold the rest of the parameter."""
        return sum(part.length for part in self.ranges) < math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of `shape`: (n,), in the order of its memory."""
        ordered = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
        ordered.as_strided(self.shape, self.stride).copy_(whole)
        return torch.cat([ordered[part.at : part.at + part.length] for part in self.ranges])


def is_distributed(tensor: Tensor) -> bool:
    """Return True if it is a DTensor, without importing the module of DTensors."""
    return hasattr(tensor, "_local_tensor")


def holds_experts(tensor: Any) -> bool:
    """Return True for a DTensor of experts, divided along the axis "ep"; on the meta device also
    for a tensor as large as a part of them, marked `AS_LARGE_AS_EXPERTS`."""
    if not is_distributed(tensor):
        return hasattr(tensor, AS_LARGE_AS_EXPERTS)
    return bool(tensor.device_mesh.mesh_dim_names == (EXPERTS,))


class LocalPart:
    """A DTensor parameter; `data` is this rank's part of it."""

    __slots__ = ("param",)

    def __init__(self, param: Any) -> None:
        self.param = param

    @property
    def data(self) -> Tensor:
        local_tensor: Tensor = self.param._local_tensor
        return local_tensor

    @data.setter
    def data(self, view: Tensor) -> None:
        before = self.data._version
        # The new tensor has another version counter, as for a parameter whose data is set: it does
        # not count the engine's writes into the buffer.
        self.param._local_tensor = view.data
        while self.data._version < before:
            increment_version(self.data)

    def of_gradient(self, grad: Any) -> Tensor:
        """Return this rank's part of a gradient. A partial gradient is summed here, in
        a collective of the mesh: its ranks run the same backward."""
        if grad.placements != self.param.placements:
            grad = grad.redistribute(placements=self.param.placements)
        local_tensor: Tensor = grad._local_tensor
        return local_tensor

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Turn the same object into a DTensor of this dtype on this device."""
        moved = self.data.to(device, dtype)
        made = nn.Parameter(rebuilt(self.param, moved), self.param.requires_grad)
        torch.utils.swap_tensors(self.param, made)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    local_tensor: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local_tensor


def part_as(param: Any, values: Any) -> Tensor:
    """Return this rank's part of values in a parameter's shape, divided like the parameter; if
    they are divided in another way, in a collective of its mesh."""
    if is_distributed(values) and values.placements != param.placements:
        values = values.redistribute(param.device_mesh, param.placements)
    return local(values)


def is_divided(tensor: Any) -> bool:
    """Return True if tensor-parallel ranks hold parts of it; False for experts, which they all
    hold."""
    if not is_distributed(tensor) or holds_experts(tensor):
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def rebuilt(like: Any, part: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """Return a DTensor like `like`, by default with its stride, whose local part is `part`."""
    made: Tensor = type(like).from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=stride or like.stride(),
    )
    return made


def share_of(name: str, param: Any, fused_rows: Sequence[int] = ()) -> Share:
    """Return this rank's share of a DTensor.

    Args:
        fused_rows: the rows of each matrix that it stacks; (): a single matrix.

    Raises:
        PartError: it is divided in another way than in [Note: Parts of matrices].
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
    named = outer in ([], [0] if len(shape) > 2 else [])  # [0]: experts, with separate ranges
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
    """Yield the range of each matrix; `width`: number of elements per row."""
    above, at = 0, 0
    for count in rows:
        each = count // parts
        yield Range(at, (above + rank * each) * width, each * width)
        above, at = above + count, at + each * width


def shares_of(model: nn.Module) -> dict[nn.Parameter, Share]:
    """Return this rank's share of every DTensor parameter of a model.

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
    """Return the rows of each matrix that a parameter stacks, by its (qualified) name."""
    rows: Sequence[int] = getattr(module, FUSED_ROWS, {}).get(name.rpartition(".")[2], ())
    return rows


def kept_by_columns(module: nn.Linear) -> None:
    """Store a DTensor weight that is divided by columns column by column, with equal values."""
    weight: Any = module.weight
    part = local(weight).detach()
    turned = torch.empty_like(part.t(), memory_format=torch.contiguous_format).t()
    if not part.is_meta:
        turned.copy_(part)
    made = rebuilt(weight, turned, stride=(1, weight.shape[0]))
    module.weight = nn.Parameter(made, weight.requires_grad)


def keep_part(module: nn.Module, name: str, whole: Tensor) -> None:
    """Fill a weight of a module with this rank's part of a full weight on the host."""
    weight: Any = getattr(module, name)
    if not is_distributed(weight):
        weight.copy_(whole)
        return
    share = share_of(name, weight, fused_rows_of(module, name))
    part = local(weight)
    part.as_strided((part.numel(),), (1,)).copy_(share.of(whole))
