"""The transformer with its experts divided among ranks (GShard, arXiv:2006.16668).

Each rank holds the same number of experts of every layer, and all other parameters in full. Tokens
are sent to the ranks of their experts and back by all-to-all: [Note: Experts of other ranks] in
`model.experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offloadtrain.config.errors import ModelError
from offloadtrain.engine.api import optimizer_of
from offloadtrain.model.experts import Experts
from offloadtrain.parallel.mesh import DeviceMesh, check_expert_axes
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.process_group import Group, all_to_all_single


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of the shipped transformer among ranks. Call it before `offload` or
    `pipeline`, with the same mesh.

    The experts' tensors become DTensors. Rank r of the R ranks of axis "ep" keeps experts
    [r · E / R, (r + 1) · E / R); nothing is sent. Every rank then calls the model with its own
    tokens; all ranks must make the same number of calls.

    Args:
        model: `model.num_experts` must be divisible by R; parameters may be on the meta device.
        mesh: has the axis "ep". Optional axes before it are "pp", the stages of a pipeline, and
            "dp", ranks with the same experts. The optional axis "tp" after it has ranks with the
            same tokens and the same experts, which compute the same results.

    Raises:
        ValueError: the mesh has other axes.
        ModelError: the model has no experts, or R does not divide them, or it is offloaded or
            divided already.
    """
    check_expert_axes(mesh.mesh_dim_names or ())
    if optimizer_of(model) is not None:
        raise ModelError("expert_parallel after offload(): divide the experts before it")
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    _check(layers, mesh["ep"].size())
    for experts in layers if mesh["ep"].size() > 1 else ():
        _keep_experts(experts, mesh["ep"])
        experts.exchange = AllToAll(mesh["ep"].get_group())


def _check(layers: list[Experts], ranks: int) -> None:
    """Check the model, see `expert_parallel`; raise ModelError."""
    if not layers:
        raise ModelError(
            "expert_parallel: the model has no experts of the shipped transformer (num_experts)"
        )
    for experts in layers:
        if experts.exchange is not None:
            raise ModelError("expert_parallel: the experts of this model are divided already")
        if experts.up.shape[0] % ranks:
            raise ModelError(
                f"num_experts = {experts.up.shape[0]} cannot be divided among the {ranks} ranks of "
                "axis 'ep': each holds the same number. Use a divisor of num_experts"
            )


def _keep_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn a module's parameters, whose first dimension is the expert, into DTensors along a
    one-dimensional mesh. Each rank keeps its part of its own values; nothing is sent."""
    from torch.distributed.tensor import DTensor, Shard

    for name, param in list(module.named_parameters(recurse=False)):
        part = param.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        made = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(made, param.requires_grad))


class AllToAll:
    """Exchanges rows among the ranks of a group that hold different experts."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __deepcopy__(self, _: dict[int, Any]) -> AllToAll:
        """Return self: a copied model exchanges with the same ranks, and groups cannot be
        copied."""
        return self

    def counts(self, counts_E: Tensor) -> Tensor:
        """Exchange counts by all-to-all; return those that every rank sent here, (ranks, E /
        ranks).

        Args:
            counts_E: E / ranks numbers for each rank.
        """
        result = torch.empty_like(counts_E)
        # Waits for the slowest rank, which must have computed its router.
        with HEARTBEAT.collective():
            all_to_all_single(result, counts_E.contiguous(), group=self._group)
        return result.view(self._group.size(), -1)

    def rows(self, rows_MD: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to the ranks, in rank order, and return the received rows, in rank order.

        Args:
            rows_MD: (sum of `sent`, D).
            sent, received: number of rows to and from each rank.
        """
        result = _Exchanged.apply(rows_MD, self._group, sent, received)  # type: ignore[no-untyped-call]
        return cast(Tensor, result)


class _Exchanged(torch.autograd.Function):
    """All-to-all with autograd. torch's is in a private module, and reports no heartbeat."""

    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.back = group, received, sent
        return _exchanged(rows_MD, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad_SD, *ctx.back), None, None, None


def _exchanged(
    rows_MD: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """All-to-all of rows; `sent` and `received` are the numbers of rows by rank."""
    result = rows_MD.new_empty(sum(received), rows_MD.shape[1])
    # Waits for the rows of all ranks. The order is the same on all: layers run one after another.
    with HEARTBEAT.collective():
        all_to_all_single(result, rows_MD.contiguous(), list(received), list(sent), group=group)
    return result
