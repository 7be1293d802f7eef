"""One parameter's state on the host, as tensors: viewed, and loaded from saved state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.norm import EngineError
from offloadtrain.optim import AnyRule, Rule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import with_own_storage
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.kernels import cut
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.step.layout.formats import FP32, Field, recognise


def views(bucket: Bucket, slot: Slot) -> dict[str, Tensor]:
    """Return field → a view of its memory, shaped as the parameter where the shard holds all of it;
    scales are 1-D. At rest only while the lanes are empty."""
    pieces = zip(bucket.format.fields(bucket.spec.moments), bucket.state_of(slot), strict=True)
    return {field.name: slot.shaped(with_own_storage(piece)) for field, piece in pieces}


def check_held_by(state_dict: Mapping[str, Any], own: Mapping[str, tuple[int, int]]) -> None:
    """Raises EngineError for the state of another rank, whose shards may have the same sizes."""
    saved = {name: tuple(at) for name, at in state_dict.get("held_by", {}).items()}
    if all(count == 1 for _, count in saved.values()) or saved == own:
        return  # full tensors, of which any rank takes its shard; torch's own, too
    several = [name for name in own if saved.get(name, own[name])[1] > 1 or own[name][1] > 1]
    their, this = (
        " and ".join("{} {} of {}".format(name, *shards.get(name, own[name])) for name in several)
        for shards in (saved, own)
    )
    raise EngineError(
        f"the state is that of {their} (counted from 0), and this process is {this}. The "
        "state_dict() of a rank holds its shards only: load it on as many ranks, each its own. "
        "Weights that any number of ranks can load: dict(optimizer.master_weights()), which all "
        "ranks call. The checkpoints of jobs fit any number of ranks"
    )


def load_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    held: Mapping[nn.Parameter, tuple[Bucket, Slot]],
    rules: Sequence[AnyRule],
) -> tuple[int, dict[str, list[int]]]:
    """Load state and hyperparameters from an optimizer's state dict; returns its step, and the
    steps of experts that are skipped where they are unused.

    Args:
        rules: that of each group.

    Raises:
        EngineError: if groups, shapes or step counts do not fit.
    """
    saved, entries = state_dict["param_groups"], state_dict["state"]
    sizes, model_sizes = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != model_sizes:
        raise EngineError(f"parameter groups of sizes {sizes} do not fit the model's {model_sizes}")
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in saved for key in group["params"]]
    without = [held[p][1].name for k, p in zip(keys, params, strict=True) if k not in entries]
    if without:
        raise EngineError(f"the state has nothing for '{without[0]}' ({len(without)} in all)")
    for key, param in zip(keys, params, strict=True):
        if "step" not in entries[key]:
            wanted = ", ".join(held[param][0].spec.moments)
            name, has = held[param][1].name, ", ".join(entries[key]) or "nothing"
            raise EngineError(f"'{name}' needs a step and {wanted}, the state has {has}")
    of_experts = {
        held[param][1].name: torch.as_tensor(entries[key]["step"]).reshape(-1).int().tolist()
        for key, param in zip(keys, params, strict=True)
        if held[param][0].usage is not None
    }
    step = _common_step(
        (held[param][1].name, entries[key]["step"])
        for key, param in zip(keys, params, strict=True)
        if held[param][1].name not in of_experts
    )
    for group, other, rule in zip(groups, saved, rules, strict=True):
        _load_group(group, other, rule)
    for key, param in zip(keys, params, strict=True):
        bucket, slot = held[param]
        rule = rules[bucket.group]
        tensors = _tensors(entries[key])
        first, last = bucket.piece(slot)
        has_full_shape = any(tuple(tensor.shape) == slot.shape for tensor in tensors.values())
        if has_full_shape or last - first == slot.numel:
            load(bucket, slot, rule, tensors, None)
        elif first < last:
            load(bucket, slot, rule, tensors, first)
    return max([step, *chain(*of_experts.values())]), of_experts


def _common_step(steps: Iterable[tuple[str, Any]]) -> int:
    """Return the step of all parameters, by name; 0 if there are none.

    Raises:
        EngineError: they differ.
    """
    distinct: set[float] = set()
    for name, step in steps:
        if isinstance(step, Tensor) and step.numel() > 1:
            raise EngineError(
                f"the state has a step for each of {step.numel()} experts of '{name}', which were "
                "skipped where they were unused: offload with skip_unused as it was then"
            )
        distinct.add(float(step))
    if len(distinct) > 1:
        raise EngineError(
            f"all parameters step together, but the state has steps {sorted(distinct)}"
        )
    return int(distinct.pop()) if distinct else 0


def load(
    bucket: Bucket, slot: Slot, rule: Rule, tensors: Mapping[str, Tensor], lo: int | None
) -> None:
    """Copy this rank's part of a parameter's state out of `tensors`, of any format. The lanes must
    be empty.

    With moments alone, as torch's own optimizers keep them, the master weights stay as they are.

    Args:
        tensors: of the parameter's shape; or, where `lo` is given, 1-D, from element `lo` on.

    Raises:
        EngineError: for a missing tensor or another shape.
    """
    saved = _tensors(tensors)
    without_master = bool(saved) and set(saved) == set(rule.moments)
    dtypes = {key: name_of(tensor.dtype) for key, tensor in saved.items()}
    source = FP32 if without_master else recognise(dtypes, rule.moments, bucket.format)
    if source is None:
        wanted = ", ".join(field.name for field in bucket.format.fields(rule.moments))
        raise EngineError(
            f"'{slot.name}' needs {wanted}, the state has {', '.join(saved) or 'nothing'}"
        )
    fields = [field for field in source.fields(rule.moments) if field.name in saved]
    count = slot.numel if lo is None else saved[fields[0].name].numel()
    values = tuple(_flat_values(slot, field, saved[field.name], lo, count) for field in fields)
    (first, last), lo = bucket.piece(slot), lo or 0
    begin, end = max(first, lo), min(last, lo + count)
    if begin >= end:
        return
    flat = cut(fields, values, begin - lo, end - lo)
    own_fields = bucket.format.fields(rule.moments)
    target = cut(own_fields, bucket.state_of(slot), begin - first, end - first)
    if without_master:
        flat = (_decoded(bucket, rule, target, end - begin), *flat)
    if [x.dtype for x in target] == [x.dtype for x in flat]:
        for destination, value in zip(target, flat, strict=True):
            destination.copy_(value)
    else:
        rule.convert(source, flat, bucket.format, target)


def whole_master(bucket: Bucket, slot: Slot, rule: Rule, ranks: Ranks) -> Tensor:
    """Return a parameter's master weights, or its frozen weights, from the shards of all ranks: a
    copy on the host, fp32, of its shape. A collective."""
    if bucket.state:
        shard = master(bucket, slot, rule)
    else:
        shard = bucket.weights_of(slot).to("cpu", torch.float32, copy=True)
    if ranks.is_single:
        return slot.shaped(shard)
    (lo, hi), values = bucket.piece(slot), torch.empty(slot.numel, device="cpu")
    values[lo:hi] = shard
    ranks.assemble(values, bucket.pieces(slot))
    return slot.shaped(values)


def master(bucket: Bucket, slot: Slot, rule: Rule) -> Tensor:
    """Copy this rank's part of a parameter's master weights to the host, decoded: (n,) fp32. The
    lanes must be empty."""
    first, last = bucket.piece(slot)
    return _decoded(bucket, rule, bucket.state_of(slot), last - first)


def load_weights(bucket: Bucket, slot: Slot, tensor: Tensor, lo: int | None) -> None:
    """Copy this rank's part of the weights that forward uses out of all of them, in the parameter's
    shape, or out of a 1-D piece from element `lo` on."""
    flat = slot.flattened(tensor) if lo is None else tensor
    (first, last), lo = bucket.piece(slot), lo or 0
    begin, end = max(first, lo), min(last, lo + flat.numel())
    if begin < end:
        bucket.weights_of(slot)[begin - first : end - first].copy_(flat[begin - lo : end - lo])


def _load_group(group: dict[str, Any], saved: Mapping[str, Any], rule: Rule) -> None:
    """Load the hyperparameters of a saved group, without the switches of torch's own optimizers.

    Raises:
        EngineError: if one of them asks for another update.
    """
    decoupled = getattr(rule, "decoupled", None)
    another = saved.get("decoupled_weight_decay", decoupled) is not decoupled
    unsupported = [key for key in ("amsgrad", "maximize") if saved.get(key)]
    if unsupported or (another and saved.get("weight_decay")):
        wrong = ", ".join(unsupported) or "another kind of weight decay (Adam's, or AdamW's)"
        raise EngineError(f"the state was made with {wrong}, which {type(rule).__name__} is not")
    options = {key: value for key, value in saved.items() if key not in _SWITCHES}
    group.update({k: v.item() if isinstance(v, Tensor) else v for k, v in options.items()})


_SWITCHES = {"params", "amsgrad", "maximize", "decoupled_weight_decay"} | {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_accumulator_value",
}
"""Keys of torch's groups that are no hyperparameters here. A sum contains its initial value."""


def _tensors(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state without its step."""
    return {key: value for key, value in entry.items() if key != "step"}


def _decoded(bucket: Bucket, rule: Rule, tensors: tuple[Tensor, ...], count: int) -> Tensor:
    """Copy the master weights of a piece of state to the host, decoded: (count,) fp32."""
    if bucket.format is FP32:
        return tensors[0].to("cpu", copy=True)
    decoded = torch.empty(count, device="cpu")
    kernels.read_master(bucket.format, rule.moments, tensors, decoded)
    return decoded


def _flat_values(slot: Slot, field: Field, tensor: Tensor, lo: int | None, count: int) -> Tensor:
    """Return a tensor of saved state as (n,), in the order of the parameter's memory.

    Raises:
        EngineError: for another shape.
    """
    wanted: tuple[int, ...]
    if field.per > 1:
        fits, wanted = tensor.numel() == field.numel(count), (field.numel(count),)
    elif lo is None:
        fits, wanted = tuple(tensor.shape) == slot.shape, slot.shape
    else:
        fits, wanted = tuple(tensor.shape) == (count,) and lo + count <= slot.numel, (count,)
    if not fits:
        raise EngineError(
            f"'{slot.name}' needs {field.name} of shape {wanted}, the state has "
            f"{tuple(tensor.shape)}"
        )
    in_full = lo is None and field.per == 1
    return slot.flattened(tensor) if in_full else tensor.reshape(-1)
