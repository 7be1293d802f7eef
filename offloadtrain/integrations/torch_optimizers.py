"""Translates torch optimizers to update rules: hyperparameters, groups and state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offloadtrain.engine import OffloadOptimizer
from offloadtrain.optim import SGD, Adagrad, Adam, AdamW, AnyRule

_RULES: dict[type[torch.optim.Optimizer], type[Any]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
}
_REFUSED = ("amsgrad", "maximize")
_QUANTIZED = "__bnb_optimizer_quant_state__"
"""Key of bitsandbytes' tensors in its state dict; 32-bit Lion's moment is "state1"."""


def translated(optimizer: torch.optim.Optimizer, source: str) -> tuple[AnyRule, list[Any]]:
    """Return the update rule of a torch optimizer, and its groups for `offload`.

    Args:
        source: name of the argument that held it, for messages.

    Raises:
        TypeError: there is no rule for its class.
        ValueError: a group needs an update that the rule does not have.
    """
    kind, groups = _RULES.get(type(optimizer)), optimizer.param_groups
    if kind is None:
        raise TypeError(
            f"{source} = ({type(optimizer).__name__}, …): there is no rule for it. Of torch's "
            f"optimizers {', '.join(each.__name__ for each in _RULES)} are translated; leave it "
            "out, and the optimizer is made from TrainingArguments; or give one of "
            "offloadtrain.offload"
        )
    # torch's AdamW is an Adam with this flag.
    decoupled = {group.get("decoupled_weight_decay", False) for group in groups}
    unlike = [f"{key} = {group[key]}" for group in groups for key in _REFUSED if group.get(key)]
    unlike += ["decoupled_weight_decay in a part of its groups"] if len(decoupled) > 1 else []
    if unlike:
        raise ValueError(
            f"{source} = ({type(optimizer).__name__}, …) with {unlike[0]}, which "
            f"{kind.__name__} is not"
        )
    kind = AdamW if True in decoupled else kind
    names = kind().defaults().keys()
    values = [{k: _number(group[k]) for k in names & group.keys()} for group in groups]
    # SGD allocates a buffer if the rule's momentum is not 0; a group may still set it to 0.
    rule: AnyRule = kind(**max(values, key=lambda group: group.get("momentum", 0)))
    return rule, [g | {"params": o["params"]} for g, o in zip(values, groups, strict=True)]


def take_over(original: torch.optim.Optimizer, optimizer: OffloadOptimizer) -> None:
    """Move the state of a translated optimizer, and share its groups, so that schedules
    created for the torch optimizer change the offloaded one."""
    for group, original_group in zip(optimizer.param_groups, original.param_groups, strict=True):
        # Keys of a schedule, such as "initial_lr".
        added = original_group.keys() - group.keys() - original.defaults.keys()
        group.update({key: original_group[key] for key in added})
    if original.state:
        state = original.state_dict()
        complete(state, optimizer, step=1)
        optimizer.load_state_dict(state)
        original.state.clear()
    original.param_groups = optimizer.param_groups
    original._opt_called = True  # type: ignore[attr-defined]  # or each schedule warns once


def complete(state: dict[str, Any], optimizer: OffloadOptimizer, *, step: int) -> None:
    """Add entries that this optimizer's state has and a plain one's may lack: SGD's steps and
    buffers. Rename bitsandbytes' Lion state to this package's names.

    Args:
        state: a plain optimizer's state dict, with the same number of parameters; changed in place.
        step: number of steps that it has taken.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # `load_state_dict` raises if their numbers differ.
    for key, param in zip(keys, params, strict=False):
        entry = state["state"].setdefault(key, {})
        entry |= entry.pop(_QUANTIZED, {})
        if "state1" in entry:
            entry["exp_avg"] = entry.pop("state1")
        rule = optimizer._rules[0]
        if isinstance(rule, SGD):
            entry.setdefault("step", step)
            if not rule.moments:
                # The state has only masters, which stay.
                state["state"][key] = {**optimizer.state[param], "step": entry["step"]}
            elif entry.get("momentum_buffer") is None:
                entry["momentum_buffer"] = torch.zeros(param.shape, dtype=torch.float32)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
