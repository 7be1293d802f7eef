"""The optimizer's state for saving and loading: by buffer, and by parameter."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.division import Division
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.parameters import ParameterGuard
from offloadtrain.engine.saved_state import (
    WHOLE,
    WORKING,
    FlatState,
    OwnState,
    Parts,
    StateWriter,
    flat_states,
    own_state,
    own_weights,
    whole,
)
from offloadtrain.optim import AnyRule, Rule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import with_own_storage
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.kernels import cut
from offloadtrain.runtime.process_group import UNTRAINED, Extent, Ranks
from offloadtrain.runtime.tensor_parts import PartError, Share, shares_of
from offloadtrain.step.layout.formats import FP32, Field, recognise


def views(bucket: Bucket, slot: Slot) -> dict[str, Tensor]:
    """Return field → a view of its memory, in the parameter's shape if the shard holds all of it;
    scales are 1-D. Complete only while the lanes are idle."""
    pieces = zip(bucket.format.fields(bucket.spec.moments), bucket.state_of(slot), strict=True)
    return {field.name: slot.shaped(with_own_storage(piece)) for field, piece in pieces}


def check_held_by(state_dict: Mapping[str, Any], own: Mapping[str, tuple[int, int]]) -> None:
    """Raises EngineError for the state of another rank, whose shards may have the same sizes."""
    saved = {name: tuple(at) for name, at in state_dict.get("held_by", {}).items()}
    if all(count == 1 for _, count in saved.values()) or saved == own:
        return  # full tensors, also in torch's own state: any rank takes its shard
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


Entries = dict[nn.Parameter, dict[str, Any]]
"""Parameter → its state, with its step."""


def entries_of(
    state_dict: Mapping[str, Any],
    groups: Sequence[dict[str, Any]],
    places: Mapping[nn.Parameter, tuple[Bucket, Slot]],
) -> Entries:
    """Return the entries of an optimizer's state dict by parameter, frozen parameters last.

    Raises:
        EngineError: if groups do not fit, or there is no entry for a trained parameter that was
            trained when the state was saved.
    """
    saved, entries = state_dict["param_groups"], state_dict["state"]
    sizes, model_sizes = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != model_sizes:
        raise EngineError(f"parameter groups of sizes {sizes} do not fit the model's {model_sizes}")
    params = [param for group in groups for param in group["params"]]
    keys = [key for group in saved for key in group["params"]]
    pairs = list(zip(keys, params, strict=True))
    untrained = set(state_dict.get("untrained", ()))
    expected = {key for key, p in pairs if p in places and key not in untrained}
    without = [places[p][1].name for k, p in pairs if k in expected and k not in entries]
    if without:
        raise EngineError(f"the state has nothing for '{without[0]}' ({len(without)} in all)")
    for key, param in pairs:
        if key in expected and "step" not in entries[key]:
            wanted = ", ".join(places[param][0].spec.moments)
            name, has = places[param][1].name, ", ".join(entries[key]) or "nothing"
            raise EngineError(f"'{name}' needs a step and {wanted}, the state has {has}")
    pairs.sort(key=lambda pair: pair[1] not in places)
    return {param: entries[key] for key, param in pairs if key in entries}


def steps_of(
    entries: Entries, places: Mapping[nn.Parameter, tuple[Bucket, Slot]]
) -> tuple[dict[nn.Parameter, int], dict[str, list[int]]]:
    """Return the step of each trained parameter, and by name the steps of experts that are skipped
    while they are unused.

    Raises:
        EngineError: the state was saved with skipped experts, and here they are not skipped.
    """
    steps, of_experts = {}, {}
    for param, (bucket, slot) in places.items():
        step = torch.as_tensor(entries[param]["step"] if param in entries else 0, device="cpu")
        if bucket.usage is not None:
            of_experts[slot.name] = step.reshape(-1).int().tolist()
        elif step.numel() > 1:
            raise EngineError(
                f"the state has a step for each of {step.numel()} experts of '{slot.name}', which "
                "were skipped where they were unused: offload with skip_unused as it was then"
            )
        else:
            steps[param] = int(step)
    return steps, of_experts


def load_dict(
    entries: Entries,
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[dict[str, Any]],
    places: Mapping[nn.Parameter, tuple[Bucket, Slot]],
    rules: Sequence[AnyRule],
) -> None:
    """Load the state of trained parameters, and hyperparameters.

    Args:
        saved: the groups of a state dict.
        rules: one per group.

    Raises:
        EngineError: if shapes or hyperparameters do not fit.
    """
    for group, other, rule in zip(groups, saved, rules, strict=True):
        _load_group(group, other, rule)
    for param in (param for param in entries if param in places):
        bucket, slot = places[param]
        rule = rules[bucket.group]
        tensors = _tensors(entries[param])
        first, last = bucket.piece(slot)
        has_full_shape = any(tuple(tensor.shape) == slot.shape for tensor in tensors.values())
        if has_full_shape or last - first == slot.numel:
            load(bucket, slot, rule, tensors, None)
        elif first < last:
            load(bucket, slot, rule, tensors, first)


def load(
    bucket: Bucket, slot: Slot, rule: Rule, tensors: Mapping[str, Tensor], lo: int | None
) -> None:
    """Copy this rank's part of a parameter's state from `tensors`, in any format. The lanes must
    be idle.

    If there are only moments, as in torch's optimizers, the master weights stay unchanged.

    Args:
        tensors: in the parameter's shape; or, with `lo`, 1-D, from element `lo` on.

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
        flat = (decoded(bucket, target, end - begin), *flat)
    if [x.dtype for x in target] == [x.dtype for x in flat]:
        for destination, value in zip(target, flat, strict=True):
            destination.copy_(value)
    else:
        rule.convert(source, flat, bucket.format, target)


def reset_moments(bucket: Bucket, slot: Slot, rule: Rule) -> None:
    """Set the moments of this rank's part to zero. The lanes must be idle."""
    first, last = bucket.piece(slot)
    if rule.moments and first < last:
        load(bucket, slot, rule, dict.fromkeys(rule.moments, torch.zeros(last - first)), first)


def copy_assigned(bucket: Bucket, slot: Slot, entry: Mapping[str, Any], step: Tensor) -> None:
    """Copy moments that were assigned to a parameter's entry of `state` into the state. The lanes
    must be idle.

    Args:
        step: step count of the parameter, 0-dim.

    Raises:
        EngineError: a value is not a moment, or has another shape.
    """
    own_steps = {} if bucket.usage else {"step": step}
    for key, view in (views(bucket, slot) | own_steps).items():
        value = torch.as_tensor(entry.get(key, view))
        if torch.equal(value.to(view), view):
            continue
        is_moment = key in bucket.spec.moments and view.is_floating_point()
        if not is_moment or value.shape != view.shape:
            raise EngineError(
                f"state['{slot.name}']['{key}'] was assigned: only moments that are not "
                f"quantized can be, by tensors of shape {tuple(view.shape)}. reset_state() resets "
                "moments of any format and the step count; weights are written into parameters"
            )
        view.copy_(value)


def master(bucket: Bucket, slot: Slot) -> Tensor:
    """Copy this rank's part of a parameter's master weights to the host, decoded: (n,) fp32. The
    lanes must be idle."""
    first, last = bucket.piece(slot)
    return decoded(bucket, bucket.state_of(slot), last - first)


def load_weights(bucket: Bucket, slot: Slot, tensor: Tensor, lo: int | None) -> None:
    """Copy this rank's part of the weights that forward uses from a full tensor, in the parameter's
    shape, or from a 1-D piece that starts at element `lo`."""
    flat = slot.flattened(tensor) if lo is None else tensor
    (first, last), lo = bucket.piece(slot), lo or 0
    begin, end = max(first, lo), min(last, lo + flat.numel())
    if begin < end:
        bucket.weights_of(slot)[begin - first : end - first].copy_(flat[begin - lo : end - lo])


def _load_group(group: dict[str, Any], saved: Mapping[str, Any], rule: Rule) -> None:
    """Load the hyperparameters of a saved group, without the switches of torch's own optimizers.

    Raises:
        EngineError: if a hyperparameter selects another update rule.
    """
    decoupled = getattr(rule, "decoupled", None)
    another = saved.get("decoupled_weight_decay", decoupled) is not decoupled
    unsupported = [key for key in VARIANTS if saved.get(key)]
    if unsupported or (another and saved.get("weight_decay")):
        wrong = ", ".join(unsupported) or "another kind of weight decay (Adam's, or AdamW's)"
        raise EngineError(f"the state was made with {wrong}, which {type(rule).__name__} is not")
    options = {key: value for key, value in saved.items() if key not in _SWITCHES}
    group.update({k: v.item() if isinstance(v, Tensor) else v for k, v in options.items()})


VARIANTS = ("amsgrad", "maximize")
"""Keys of torch's groups that select another update rule."""
_SWITCHES = {"params", *VARIANTS, "decoupled_weight_decay"} | {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_accumulator_value",
}
"""Keys of torch's groups that are not hyperparameters here. A sum includes its initial value."""


def _tensors(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state without its step."""
    return {key: value for key, value in entry.items() if key != "step"}


def decoded(bucket: Bucket, tensors: tuple[Tensor, ...], count: int) -> Tensor:
    """Copy the master weights of a piece of state to the host, decoded: (count,) fp32."""
    if bucket.format is FP32:
        return tensors[0].to("cpu", copy=True)
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    kernels.read_master(bucket.format, bucket.spec.moments, tensors, values)
    return values


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


_log = logging.getLogger(__name__)


class StateIO:
    """The part of `OffloadOptimizer` that checkpoints use."""

    model: nn.Module
    state: defaultdict[Tensor, Any]
    _division: Division
    _engine: Engine
    _parameter_guard: ParameterGuard
    _frozen_state: dict[nn.Parameter, list[Tensor]]
    synchronize: Callable[[], None]
    take_over_writes: Callable[[], None]

    def settle(self) -> None:
        """Adopt values that user code has written, and wait until the state is complete."""
        self.take_over_writes()
        self.synchronize()

    @property
    def _held_by(self) -> dict[str, tuple[int, int]]:
        """Role ("rank", "part" or "stage") → number of this rank in it, and count of its ranks."""
        each = {"rank": self.ranks, "part": self._division.parts, "stage": self._division.stages}
        return {name: (some.rank, some.size) for name, some in each.items()}

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the state."""
        return self._division.replicas

    @property
    def _blocks(self) -> list[Block]:
        return [*self._engine.residency.blocks.values()]

    @property
    def _rules(self) -> Sequence[AnyRule]:
        """The rule of each group."""
        return self._engine.functions.rules

    @cached_property
    def parts(self) -> Parts:
        """This rank's shares of DTensors, as ranges of the full parameters.

        Raises:
            PartError: the ranges of a parameter cannot be determined.
        """
        parts = self._division.parts
        if parts.is_single and self.ranks.of_experts is self.ranks:
            return WHOLE
        return Parts(parts, shares_of(self.model))

    def named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (parameter name, the tensors of its state): complete views of host memory. Frozen
        parameters in shards yield their weights."""
        # The caller reads views that Adam on the host lane may still write.
        self.settle()
        for _, slot in self._slots():
            yield slot.name, _tensors(self.state[slot.param])
        for bucket, slot in [] if self.ranks.is_single else self._frozen_slots():
            yield slot.name, {UNTRAINED: slot.shaped(bucket.weights_of(slot))}

    def extents(self) -> dict[str, Extent]:
        """Return this rank's shard of its share of every trained parameter, and of frozen
        parameters of streamed blocks; shapes are those of full parameters."""
        slots = [*self._slots(), *self._frozen_slots()]
        return {s.name: Extent(self.parts.share(s).shape, *b.piece(s)) for b, s in slots}

    @property
    def saves_untrained(self) -> bool:
        """True if this rank saves the untrained tensors: other ranks have equal copies."""
        return self.ranks.rank == self._division.parts.rank == self.ranks.copies.rank == 0

    def flat_states(self) -> list[FlatState]:
        """Describe every buffer that `write_state` writes, in its order. With hybrid sharding each
        group saves some of the buckets: the others have no pieces here.

        Raises:
            PartError: a part of a matrix is in a format that only this mesh could read.
        """
        # After a failure of the device its weights are lost: the checkpoint ends the delay.
        in_use = self._is_delayed and not self._engine.guard.salvaged
        rank = self.ranks.rank
        buckets = [bucket for block in self._blocks for bucket in block.all_buckets]
        states = list(flat_states(buckets, rank, in_use=in_use, parts=self.parts))
        copies, names = self.ranks.copies, list(dict.fromkeys(state.bucket for state in states))
        written_here = {*names[copies.rank :: copies.size]}
        return [
            state if state.bucket in written_here else replace(state, pieces=()) for state in states
        ]

    def warn_of_no_checkpoints(self) -> None:
        """Warn at once if saving would raise an error hours later; one of the ranks with
        parts of a matrix logs it."""
        try:
            if self.saves_untrained and self.parts is not WHOLE:
                self.flat_states()
        except PartError as error:
            _log.warning("these weights train, and no checkpoint of them can be saved: %s", error)

    def write_state(self, writer: StateWriter) -> None:
        """Start to write the state after the last step; the next steps run meanwhile.

        The writer is called on the lane of writes, in any order of buckets. At most one at a time.
        """
        if not self._engine.guard.salvaged:
            self.take_over_writes()
            self._engine.write_state(writer)
            return
        # The lanes have stopped for good, and nothing changes the state any more.
        for block in self._blocks:
            for bucket in block.buckets:
                writer.write(bucket.name, whole(buffer.flat for buffer in bucket.state))
            for bucket in block.frozen:
                writer.write(bucket.name, whole([bucket.home.flat]))
        writer.finish()

    def finish_writing(self) -> None:
        """Wait until `write_state` has written everything."""
        if not self._engine.guard.salvaged:
            self._engine.finish_writing()

    def scaler_state(self) -> dict[str, float] | None:
        """Return the state of the loss scaler after the last step; None without loss scaling."""
        scaler = self._engine.counter.scaler
        return None if scaler is None else scaler.state_dict()

    @property
    def expert_steps(self) -> dict[str, list[int]]:
        """Parameter → steps of each of its entries, for parameters that are skipped while they are
        unused; -1 for entries of other ranks."""
        return {
            slot.name: bucket.usage.steps_by_entry(slot, self.parts.share(slot))
            for bucket, slot in self._slots()
            if bucket.usage is not None
        }

    def own_states(self) -> dict[str, list[OwnState]]:
        """Return views of this rank's share of every parameter of `extents`, to be read or
        overwritten; `finish_load` makes the written values effective."""
        # The caller reads or writes memory that Adam and uploads in flight still use.
        self.settle()
        slots = [*self._slots(), *self._frozen_slots()]
        return {slot.name: own_state(b, slot, self.parts) for b, slot in slots}

    def own_weights(self) -> dict[str, list[OwnState]]:
        """Return views of this rank's share of the weights that forward uses, if they may be older
        than the state's (update mode "delayed"); otherwise {}. To be overwritten like
        `own_states`: `finish_load` makes them effective."""
        # As in `own_states`; no newer weights are pending afterwards.
        self.synchronize()
        if not self._is_delayed:
            return {}
        self._engine.detach_weights()
        return {slot.name: own_weights(b, slot, self.parts) for b, slot in self._slots()}

    def load_named_state(
        self, name: str, tensors: Mapping[str, Tensor], *, lo: int | None = None
    ) -> None:
        """Load the state of a parameter, as far as this rank holds it; `finish_load` makes it
        effective.

        State of another format is converted, and rounded to nearest if this format is narrower.

        Args:
            tensors: its state, or only `WORKING`; in the parameter's shape; or 1-D, its
                elements from `lo` on, a multiple of 128, in the order of its memory. Scales: one
                value per 128 elements. For a DTensor: those of the full parameter.

        Raises:
            EngineError: for an unknown parameter, a missing tensor or another shape.
        """
        # This thread writes the state, which Adam and uploads in flight still use.
        self.synchronize()
        frozen = next(((b, s) for b, s in self._frozen_slots() if s.name == name), None)
        if frozen is not None:
            load_weights(*frozen, tensors[UNTRAINED], lo)
            return
        entry = next(((b, s) for b, s in self._slots() if s.name == name), None)
        if entry is None:
            raise EngineError(f"the model has no trainable parameter '{name}'")
        share = self.parts.share(entry[1])
        if not share.is_part:
            self._load(entry, tensors, lo)
            return
        flat = _flattened(share, tensors, lo)
        count = min(tensor.numel() for tensor in flat.values())
        for part in share.ranges:
            first, last = max(part.at, lo or 0), min(part.at + part.length, (lo or 0) + count)
            if first < last:
                cut = {kind: x[first - (lo or 0) : last - (lo or 0)] for kind, x in flat.items()}
                self._load(entry, cut, part.lo + first - part.at)

    def _load(
        self, entry: tuple[Bucket, Slot], tensors: Mapping[str, Tensor], lo: int | None
    ) -> None:
        if WORKING in tensors:
            load_weights(*entry, tensors[WORKING], lo)
        else:
            load(*entry, self._rules[entry[0].group], tensors, lo)

    def finish_load(
        self,
        *,
        step: int,
        scaler: Mapping[str, float] | None = None,
        delayed: bool = False,
        expert_steps: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Set the step count and upload the weights, after `load_named_state` of every parameter.

        Args:
            delayed: the weights that forward uses were also loaded, into `own_weights`: the weights
                of the state stay pending, as they were when they were saved.
            expert_steps: see `expert_steps`; `step` for parameters that are not in it.

        Raises:
            EngineError: only one of state and optimizer has a loss scaler.
        """
        counter = self._engine.counter
        if (scaler is None) != (counter.scaler is None):
            raise EngineError("the loss scaler's state is there in only one of state and optimizer")
        if counter.scaler is not None and scaler is not None:
            counter.scaler.load_state_dict(dict(scaler))
            if not self._is_delayed:  # saved by a run whose scale follows late
                counter.scaler.catch_up()
        self._count_from(step, expert_steps or {})
        # Waits: parameters hold the loaded weights when this returns.
        self._engine.emit(delayed=delayed)
        # Frozen parameters may have been loaded too.
        self._parameter_guard.renew()

    @torch.no_grad()
    def _take_over_frozen(self) -> None:
        """Copy values written into frozen parameters into their saved masters, with which training
        will continue. Elements that were not written keep the precision of their master."""
        for param in self._frozen_state:
            state, weights = self.state[param], param.detach().cpu()
            saved = state["master"] if "master" in state else state["weight"]
            written = saved.to(weights.dtype) != weights
            saved[written] = weights[written].to(saved.dtype)

    @torch.no_grad()
    def _weights_in_use(self) -> list[Tensor]:
        """Copy this rank's part of the weights that forward uses to the host, if newer weights are
        pending (update mode "delayed"): 2 bytes per parameter."""
        if not self._engine.program.mode.waiting:
            return []
        # The copies below do not run on the lanes.
        self._engine.drain()
        return [bucket.weights_of(slot).to("cpu", copy=True) for bucket, slot in self._slots()]

    @torch.no_grad()
    def _delay_newest(self, weights: Sequence[Tensor]) -> None:
        """Set the weights that forward uses, if any, and keep the weights of the state pending."""
        if not weights:
            return
        self._engine.detach_weights()
        for (bucket, slot), in_use in zip(self._slots(), weights, strict=True):
            bucket.weights_of(slot).copy_(in_use)
        self._engine.emit(delayed=True)
        self._parameter_guard.renew()

    def _count_from(self, step: int, expert_steps: Mapping[str, Sequence[int]]) -> None:
        self._engine.counter.count_from(step)
        for bucket, slot in self._slots():
            if bucket.usage is not None:
                steps = expert_steps.get(slot.name, step)
                bucket.usage.load_steps(slot, self.parts.share(slot), steps)

    @property
    def _is_delayed(self) -> bool:
        return self._engine.program.spec.is_delayed

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        pairs = [(b, s) for block in self._blocks for b in block.buckets for s in b.slots]
        return iter(sorted(pairs, key=lambda pair: pair[1].index))

    def _frozen_slots(self) -> list[tuple[Bucket, Slot]]:
        """List frozen parameters of streamed blocks, which are on the device only while in a
        slot."""
        return [(b, s) for block in self._blocks for b in block.frozen for s in b.slots]


def _flattened(share: Share, tensors: Mapping[str, Tensor], lo: int | None) -> dict[str, Tensor]:
    """Return state of a full parameter, or of elements from `lo` on, as 1-D tensors in the order
    of its memory.

    Raises:
        EngineError: the tensors have different sizes, because a value covers several elements.
    """
    flat = {}
    for kind, tensor in tensors.items():
        flat[kind] = tensor.reshape(-1)
        if lo is None and tuple(tensor.shape) == share.shape:
            flat[kind] = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            flat[kind].as_strided(share.shape, share.stride).copy_(tensor)
    if len(sizes := {values.numel() for values in flat.values()}) > 1:
        raise EngineError(
            f"a part of a tensor of shape {share.shape} cannot be taken out of state with "
            f"{sorted(sizes)} values, where one stands for several elements: give it in fp32"
        )
    return flat
