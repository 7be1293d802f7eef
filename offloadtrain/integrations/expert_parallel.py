"""The transformer with its experts divided among ranks (GShard, arXiv:2006.16668).

Each rank holds the same number of experts of every layer, and all else whole; tokens go to the
ranks of their experts: [Note: Experts of other ranks] in `model.experts`.
"""

from __future__ import annotations

from torch import nn

from offloadtrain.engine.api import optimizer_of
from offloadtrain.engine.checks import ModelError
from offloadtrain.model.experts import Experts
from offloadtrain.runtime.mesh import DeviceMesh, check_expert_axes, keep_experts
from offloadtrain.runtime.token_exchange import AllToAll


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of the shipped transformer among ranks, before `offload` or `pipeline`,
    which gets the same mesh.

    Its tensors of experts become DTensors, of which this rank keeps its part: experts
    [r · E / R, (r + 1) · E / R) on rank r of the R of axis "ep". Nothing is sent. Every rank then
    calls the model with tokens of its own, all ranks alike often.

    Args:
        model: with `model.num_experts` divisible by R; its parameters may be on the meta device.
        mesh: with the axis "ep"; before it may be "dp", whose ranks hold the same experts, and
            before that "pp", whose ranks hold the stages of a pipeline. Behind it may be "tp",
            whose ranks have the same tokens, hold the same experts, and compute them alike.

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
        keep_experts(experts, mesh["ep"])
        experts.exchange = AllToAll(mesh["ep"].get_group())


def _check(layers: list[Experts], ranks: int) -> None:
    """Raises ModelError, see `expert_parallel`."""
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
