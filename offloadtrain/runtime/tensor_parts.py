"""What this rank holds of a parameter: all of it, or the local part of a DTensor.

Tensor parallelism (`parallelize_module`) replaces parameters by DTensors, whose shape is that of
the whole matrix. The engine moves, sums and updates the parts of ranks as it does whole parameters;
checkpoints name them as ranges of the whole.

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
from torch.autograd.graph import increment_version

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


class LocalPart:
    """A DTensor parameter, whose `data` is what this rank holds of it."""

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
        # Counts writes of its own, as a parameter does whose data is set: not the engine's, into
        # the buffer that is viewed.
        self.param._local_tensor = view.data
        while self.data._version < before:
            increment_version(self.data)

    def of_gradient(self, grad: Any) -> Tensor:
        """Return this rank's part of a gradient. One that is still to be summed is summed here, in
        a collective of the mesh: its ranks run the same backward."""
        if grad.placements != self.param.placements:
            grad = grad.redistribute(placements=self.param.placements)
        local_tensor: Tensor = grad._local_tensor
        return local_tensor

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make it a DTensor of this dtype on this device, the same object."""
        moved = self.data.to(device, dtype)
        made = nn.Parameter(rebuilt(self.param, moved), self.param.requires_grad)
        torch.utils.swap_tensors(self.param, made)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    local_tensor: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local_tensor


def part_as(param: Any, values: Any) -> Tensor:
    """Return this rank's part of values of a parameter's shape, divided as the parameter is; where
    they are divided otherwise, in a collective of its mesh."""
    if is_distributed(values) and values.placements != param.placements:
        values = values.redistribute(param.device_mesh, param.placements)
    return local(values)


def is_divided(tensor: Any) -> bool:
    """Tell whether ranks of tensor parallel hold parts of it: they all hold the same experts."""
    if not is_distributed(tensor) or holds_experts(tensor):
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def rebuilt(like: Any, part: Tensor, stride: tuple[int, ...] | None = None) -> Tensor:
    """Return a DTensor as `like`, by default with its stride, whose local part is `part`."""
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
    part = local(weight).detach()
    turned = torch.empty_like(part.t(), memory_format=torch.contiguous_format).t()
    if not part.is_meta:
        turned.copy_(part)
    made = rebuilt(weight, turned, stride=(1, weight.shape[0]))
    module.weight = nn.Parameter(made, weight.requires_grad)


def keep_part(module: nn.Module, name: str, whole: Tensor) -> None:
    """Fill a weight of a module with this rank's part of a whole one, on the host."""
    weight: Any = getattr(module, name)
    if not is_distributed(weight):
        weight.copy_(whole)
        return
    share = share_of(name, weight, fused_rows_of(module, name))
    part = local(weight)
    part.as_strided((part.numel(),), (1,)).copy_(share.of(whole))
