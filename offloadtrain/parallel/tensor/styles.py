"""Hooks for modules of tensor parallelism: the parts of inputs, weights and outputs on each rank.

A module keeps its own forward. Hooks around it declare which part of a tensor is on this rank, so
that autograd sums over the parts where necessary: in forward the contributions to an output, in
backward the contributions to the gradient of an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.parallel.mesh import DeviceMesh
from offloadtrain.runtime.tensor_parts import is_distributed, keep_part

# DTensor takes a second to import, so only functions that need it import it.


def divided_dim(linear: nn.Module, *, outputs: bool) -> int:
    """Return the dimension of a linear layer's weight for its outputs, or for its inputs.

    GPT-2's `Conv1D` is a linear layer whose weight is (inputs, outputs).
    """
    return int(outputs != isinstance(linear, nn.Linear))


def divide_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """Turn a parameter into a DTensor along a one-dimensional mesh. This rank keeps its part of its
    own values; nothing is sent. The memory has the order of [Note: Parts of matrices].

    Args:
        dim: the divided dimension; None: each rank keeps the complete parameter.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    param, placed = getattr(module, name), Replicate() if dim is None else Shard(dim)
    sizes, stride = list(param.shape), param.stride()
    if dim is not None:
        sizes[dim] //= mesh.size()
        stride = _slowest(param.shape, dim)
    part = torch.empty_strided(
        *(sizes, stride if dim is None else _slowest(sizes, dim)),
        dtype=param.dtype,
        device=param.device,
    )
    made = DTensor.from_local(
        *(part, mesh, [placed]), run_check=False, shape=param.shape, stride=stride
    )
    setattr(module, name, nn.Parameter(made, param.requires_grad))
    if not part.is_meta:
        with torch.no_grad():
            keep_part(module, name, param)


def shrink(module: nn.Module, name: str, dim: int, parts: int) -> None:
    """Reduce a parameter without values to the size of a part; needs no other ranks."""
    param: Tensor = getattr(module, name)
    sizes = list(param.shape)
    sizes[dim] //= parts
    setattr(module, name, nn.Parameter(param.new_empty(sizes)))


def _slowest(sizes: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return strides for `sizes` with `dim` as the slowest dimension. In tensors with more than two
    dimensions the first dimension, which counts experts, remains the slowest."""
    first = [0] if len(sizes) > 2 and dim else []
    order = [*first, dim, *(axis for axis in range(len(sizes)) if axis not in (*first, dim))]
    stride, step = [0] * len(sizes), 1
    for axis in reversed(order):
        stride[axis], step = step, step * sizes[axis]
    return tuple(stride)


def divide_linear(
    linear: nn.Module, mesh: DeviceMesh, *, outputs: bool, whole: bool = False
) -> None:
    """Turn the parameters of a linear layer into DTensors along a one-dimensional mesh. Each rank
    keeps its part of its own values; nothing is sent.

    Args:
        outputs: divide the outputs; False: divide the inputs, and sum outputs over the parts.
        whole: neighbouring layers are not divided: gather the outputs, or cut the inputs.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    divide_parameter(linear, "weight", mesh, divided_dim(linear, outputs=outputs))
    if linear.bias is not None:
        divide_parameter(linear, "bias", mesh, 0 if outputs else None)
    of_part, of_all = (Shard(-1),), (Replicate(),)
    input_placements = of_all if outputs or whole else of_part
    wanted_placements = of_all if outputs else of_part
    passed_on = of_part if outputs and not whole else of_all

    def into(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Backward waits for the other parts here: all of them read the full input.
        x = DTensor.from_local(args[0], mesh, input_placements, run_check=False)
        return x.redistribute(placements=wanted_placements), *args[1:]

    def out_of(_: nn.Module, args: object, output: Any) -> Tensor:
        # Waits for the other parts if outputs are summed over them or gathered.
        result: Tensor = output.redistribute(placements=passed_on).to_local()
        return result

    linear.register_forward_pre_hook(into)
    linear.register_forward_hook(out_of)


def stand_alone(linear: Any, parts: int, outputs: bool, whole: bool) -> None:
    """Prepare a linear layer without values for parameters of a part's size; needs no other ranks.
    With `whole`, hooks repeat outputs to their full size, or cut the inputs."""

    def into(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0].chunk(parts, -1)[0], *args[1:]

    def out_of(_: nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.cat([output] * parts, dim=-1)

    if outputs and hasattr(linear, "nf"):  # `Conv1D` shapes its outputs by it
        linear.nf //= parts
    if whole and outputs:
        linear.register_forward_hook(out_of)
    elif whole:
        linear.register_forward_pre_hook(into)


def norm_each_head(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Run a norm over the last dimension with inputs that are divided along the heads: the
    gradients of its weights are summed over the parts."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    # The divided dimension assumed here has no effect: the norm is over the last dimension.
    parallelize_module(norm, mesh, SequenceParallel(use_local_output=True), src_data_rank=None)


def run_with_parts(module: nn.Module) -> None:
    """Run a module's forward with plain tensors of this rank's parts in place of its DTensors."""
    saved: dict[str, Any] = {}

    def into(_: nn.Module, args: object) -> None:
        saved.update(module._parameters)
        for name, param in saved.items():
            if is_distributed(param):
                module._parameters[name] = param.to_local()

    def out_of(*_: object) -> None:
        module._parameters.update(saved)
        saved.clear()

    module.register_forward_pre_hook(into)
    module.register_forward_hook(out_of, always_call=True)


def sum_over_parts(module: nn.Module, mesh: DeviceMesh, *, inputs: bool) -> None:
    """Sum a module's output over the parts, each of which has computed a summand.

    Args:
        inputs: also sum the gradients of its inputs in backward.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def into(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        summed = {key: _summed_backward(value, mesh) for key, value in kwargs.items()}
        return tuple(_summed_backward(value, mesh) for value in args), summed

    def out_of(_: nn.Module, args: object, output: Any) -> Tensor:
        # Waits for the summands of the other parts.
        summands = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        total: Tensor = summands.redistribute(placements=[Replicate()]).to_local()
        return total

    if inputs:
        module.register_forward_pre_hook(into, with_kwargs=True)
    module.register_forward_hook(out_of)


def sum_last_backward(module: nn.Module, mesh: DeviceMesh, width: int) -> None:
    """Sum the gradient of the last elements of a module's output over the parts, each of which uses
    them in its own heads (the rotary keys of multi-head latent attention)."""

    def out_of(_: nn.Module, args: object, output: Tensor) -> Tensor:
        before, last = output.split([output.shape[-1] - width, width], dim=-1)
        return torch.cat([before, _summed_backward(last, mesh)], dim=-1)

    module.register_forward_hook(out_of)


def _summed_backward(value: Any, mesh: DeviceMesh) -> Any:
    """Return the value unchanged. If it is a tensor that requires a gradient, backward sums its
    gradient over the parts, and waits for them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    same = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])
