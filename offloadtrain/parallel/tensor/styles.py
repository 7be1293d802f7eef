"""How modules of tensor parallel run: what of their inputs, weights and outputs each part has.

A module keeps its own forward. Hooks around it say which part of a tensor this rank has, so that
autograd sums over the parts where it must: forward what each part adds to an output, backward what
each part adds to the gradient of an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.parallel.mesh import DeviceMesh
from offloadtrain.runtime.tensor_parts import is_distributed, keep_part

# DTensor takes a second to import, which others do not need: functions here do it.


def divided_dim(linear: nn.Module, *, outputs: bool) -> int:
    """Return the dimension of a linear layer's weight that its outputs, or inputs, are along.

    GPT-2's `Conv1D` is a linear layer whose weight is (inputs, outputs).
    """
    return int(outputs != isinstance(linear, nn.Linear))


def divide_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """Make a parameter a DTensor along a mesh of one axis; this rank takes its part of what it has,
    and sends nothing. Its memory has the order of [Note: Parts of matrices].

    Args:
        dim: the dimension that is divided; None: each rank keeps all of it.
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
    """Make a parameter without values as large as a part of it, without any rank but this one."""
    param: Tensor = getattr(module, name)
    sizes = list(param.shape)
    sizes[dim] //= parts
    setattr(module, name, nn.Parameter(param.new_empty(sizes)))


def _slowest(sizes: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return strides for `sizes` where `dim` varies slowest. In tensors with more than two
    dimensions the first one, that of experts, stays slowest."""
    first = [0] if len(sizes) > 2 and dim else []
    order = [*first, dim, *(axis for axis in range(len(sizes)) if axis not in (*first, dim))]
    stride, step = [0] * len(sizes), 1
    for axis in reversed(order):
        stride[axis], step = step, step * sizes[axis]
    return tuple(stride)


def divide_linear(
    linear: nn.Module, mesh: DeviceMesh, *, outputs: bool, whole: bool = False
) -> None:
    """Make the weights of a linear layer DTensors along a mesh of one axis; each rank takes its
    part of what it has, and sends nothing.

    Args:
        outputs: its outputs are divided; otherwise its inputs, and outputs are sums over the parts.
        whole: all else of the model is not divided: outputs are gathered, or inputs are cut.
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
        # Backward waits for the other parts here, as all of them read the full input.
        x = DTensor.from_local(args[0], mesh, input_placements, run_check=False)
        return x.redistribute(placements=wanted_placements), *args[1:]

    def out_of(_: nn.Module, args: object, output: Any) -> Tensor:
        # Waits for the other parts where outputs are sums over them, or are gathered.
        result: Tensor = output.redistribute(placements=passed_on).to_local()
        return result

    linear.register_forward_pre_hook(into)
    linear.register_forward_hook(out_of)


def stand_alone(linear: Any, parts: int, outputs: bool, whole: bool) -> None:
    """Give a linear layer without values, and without other ranks, the sizes that it has among
    them: outputs gathered, or inputs cut."""

    def into(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0].chunk(parts, -1)[0], *args[1:]

    def out_of(_: nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.cat([output] * parts, dim=-1)

    if outputs and hasattr(linear, "nf"):  # of a Conv1D, which views its outputs by it
        linear.nf //= parts
    if whole and outputs:
        linear.register_forward_hook(out_of)
    elif whole:
        linear.register_forward_pre_hook(into)


def norm_each_head(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Run a norm over the last dimension, whose inputs are divided along another, the heads: the
    gradients of its weights are sums over the parts."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    # Which dimension it takes for the divided one does not matter: the norm is over the last.
    parallelize_module(norm, mesh, SequenceParallel(use_local_output=True), src_data_rank=None)


def run_with_parts(module: nn.Module) -> None:
    """Give a module's forward this rank's parts of its own parameters as plain tensors."""
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
    """Sum a module's output over the parts, each of which has computed some of it.

    Args:
        inputs: backward sums the gradients of its inputs, too.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def into(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        summed = {key: _summed_backward(value, mesh) for key, value in kwargs.items()}
        return tuple(_summed_backward(value, mesh) for value in args), summed

    def out_of(_: nn.Module, args: object, output: Any) -> Tensor:
        # Waits for what the other parts have computed.
        summands = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        total: Tensor = summands.redistribute(placements=[Replicate()]).to_local()
        return total

    if inputs:
        module.register_forward_pre_hook(into, with_kwargs=True)
    module.register_forward_hook(out_of)


def sum_last_backward(module: nn.Module, mesh: DeviceMesh, width: int) -> None:
    """Sum the gradient of the last elements of a module's output over the parts: each hands them to
    its own heads (the rotary keys of multi-head latent attention)."""

    def out_of(_: nn.Module, args: object, output: Tensor) -> Tensor:
        before, last = output.split([output.shape[-1] - width, width], dim=-1)
        return torch.cat([before, _summed_backward(last, mesh)], dim=-1)

    module.register_forward_hook(out_of)


def _summed_backward(value: Any, mesh: DeviceMesh) -> Any:
    """Return a tensor of numbers as it is, whose gradient backward sums over the parts, which it
    waits for; anything else as it is."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    same = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])
