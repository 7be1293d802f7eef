"""The weights of an offloaded model, as frameworks save them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from offloadtrain.engine import OffloadOptimizer

Dtypes = Mapping[nn.Parameter, torch.dtype]


def dtypes_of(model: nn.Module) -> Dtypes:
    """Call it before the model is offloaded, for `state_dict`."""
    return {param: param.dtype for param in model.parameters()}


def state_dict(
    model: nn.Module, optimizer: OffloadOptimizer, given: Dtypes | None = None
) -> dict[str, Tensor]:
    """Return the model's state dict on the host; all ranks call it, which gather shards.

    Args:
        given: the dtypes of the parameters before they were offloaded: where that is fp32, the
            masters stand in place of 16-bit weights. They are views of "fp32" state of one rank,
            otherwise copies of 4 bytes per parameter.
    """
    ranks = optimizer.ranks
    if optimizer.config.zero_stage_among(ranks.size) == 3:
        buffers = {
            f"{prefix}{'.' * bool(prefix)}{name}": buffer.to("cpu", copy=True)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        state = buffers | dict(optimizer.full_weights())
    else:
        state = model.state_dict()
    wide = [param for param, dtype in (given or {}).items() if dtype is torch.float32]
    masters = _masters(optimizer, set(wide)) if wide else {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in masters and name in state:
            state[name] = masters[param]
    return state


def _masters(optimizer: OffloadOptimizer, wide: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the fp32 masters of these parameters that are trained."""
    params = dict(optimizer.model.named_parameters())
    state = {param: optimizer.state.get(param, {}) for param in params.values()}
    masters = {param: entry["master"] for param, entry in state.items() if "master" in entry}
    if optimizer.ranks.is_single and masters:
        return {param: master for param, master in masters.items() if param in wide}
    gathered = ((params[name], master) for name, master in optimizer.master_weights())
    return {param: master for param, master in gathered if param in wide and param.requires_grad}
