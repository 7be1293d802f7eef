"""The public function `offload()`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from offloadtrain.config.offload import OFFLOAD_SAVED_ABOVE, OffloadConfig, OptionError
from offloadtrain.config.toml import shown
from offloadtrain.engine.checks.agreement import check_same_model, check_same_options
from offloadtrain.engine.checks.model_checks import (
    ModelError,
    check_arguments,
    check_compiled,
    check_model,
    check_rule,
    offloaded,
    warn_of_no_layers,
)
from offloadtrain.engine.checks.part_checks import check_parts
from offloadtrain.engine.compute_device import resolve_device
from offloadtrain.engine.experts import check_skips
from offloadtrain.engine.norm import StagePlace, Stages
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.param_groups import normalise_groups
from offloadtrain.engine.state.load_weights import ParamInit
from offloadtrain.optim import AdamW, AnyRule
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.lanes import lanes_for
from offloadtrain.runtime.mesh import DeviceMesh, Mesh
from offloadtrain.runtime.process_group import ALONE, Group, Ranks

_Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def offload(
    model: nn.Module,
    rule: AnyRule | None = None,
    *,
    params: _Params | None = None,
    device: str | torch.device = "auto",
    config: OffloadConfig | None = None,
    precision: str = "bf16",
    state: str = "fp32",
    state_on: str | Mapping[str, float] = "host",
    scratch_dir: str | None = None,
    scratch_in_memory: bool = False,
    grad_on: str = "host",
    sums_on: str = "host",
    sums_down: str = "fp32",
    seed: int = 0,
    update: str = "exact",
    warmup_steps: int = 0,
    clip_norm: float | None = None,
    skip_nonfinite: bool = True,
    loss_scale_hysteresis: int = 1,
    grad_accum_steps: int = 1,
    host_memory_limit: int | None = None,
    checkpoint_spill: int = 0,
    working: str = "device",
    device_slots: int = 2,
    resident_blocks: int | None = None,
    device_memory_limit: int | None = None,
    activation: str = "keep",
    recompute_blocks: int | None = None,
    offload_saved_above: int = OFFLOAD_SAVED_ABOVE,
    partition_activations: bool = False,
    compile_blocks: bool = False,
    process_group: Group | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    zero_stage: int = 0,
    keep_whole: Sequence[str] = (),
    reduction: str = "working",
    param_init_fn: ParamInit | None = None,
    cast_inputs: bool | None = None,
    keep_fp32: Sequence[str] = (),
    skip_unused: Sequence[str] = (),
    pin_memory: bool = True,
) -> OffloadOptimizer:
    """Put a model's optimizer state into host memory and return the optimizer that trains it.

    The model's parameters become views of flat buffers of the working dtype on the device; their
    values as given become the fp32 master weights. Tied parameters stay tied. Frozen parameters are
    moved and cast with the rest and have no state. Norms with running statistics keep fp32
    parameters; buffers keep their dtype. fp32 inputs are cast where they meet 16-bit weights (see
    `cast_inputs`), and losses that the model computes are fp32, as under `torch.autocast`. For
    16-bit logits that it returns, and inside a `checkpoint` of your own, take the loss of
    `logits.float()`.

    Gradients are taken from `.grad` during backward: code that reads `.grad` afterwards finds None.
    So torch's `clip_grad_norm_`, and with it Accelerate's, the Trainer's `max_grad_norm` and
    Lightning's `gradient_clip_val`, **clip nothing and return 0.0** (a warning says so once): use
    `clip_norm`, or `optimizer.clip_grad_norm_(max_norm)` between the last backward and `step()`.

    `optimizer.backward(loss)` divides by `grad_accum_steps` and scales fp16 losses. A plain
    `loss.backward()` does neither, as in every torch loop: divide the loss before it. If the loss
    is divided already (Accelerate, the Trainer), call `optimizer.backward(loss, divide=False)`.
    Loops whose backwards follow each other without a forward in between call
    `optimizer.end_micro_step()` behind each plain `loss.backward()`. For pipelines see `pipeline`.

    `model.load_state_dict` keeps working: fp32 values become the master weights as they are.

    Args:
        model: any module, not wrapped for data parallelism. Parameters may be on the meta device,
            with `param_init_fn`: then a full copy of the model never exists.
        rule: `AdamW(...)`, `Adam`, `Lion`, `SGD`, `Adagrad`, `LAMB`, `Muon` or your own
            (docs/extending.md); default AdamW().
        params: parameters or groups as for a torch optimizer; each trainable parameter in exactly
            one. Default: all of them in one group.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", or a torch.device.
        config: all the options below in one object, instead of the arguments; not `process_group`
            and `param_init_fn`. An argument beside it is an error, unless it has its default value:
            then the config's holds.
        precision: dtype of working weights and gradients: "bf16", "fp16" (dynamic loss scaling),
            "fp32".
        state: format of the host state: "fp32" (12 bytes per parameter), "split16" (8; bf16 only)
            or "int8" (5), or one of your own (docs/extending.md). Gradients take 2 more, or 4 where
            microbatches are summed.
        state_on: where gradients, masters and moments are, and Adam runs. "host"; "device": nothing
            is offloaded; a share such as {"device": 0.3}: that of the first blocks of the forward
            is on the device, and the next forward runs over them while the host updates the
            others; "auto": the largest share that `device_memory_limit` holds. Streamed weights
            (working = "host") have their state on the host. "disk", or a share: masters and moments
            are in a file, and a few buckets of them on the host while it updates them; for update
            modes "exact" and "delayed". The same bits everywhere on the CPU.
        scratch_dir: folder of the file for what is on the disk, on a local drive. The file has no
            name and ends with the process.
        scratch_in_memory: accept a `scratch_dir` on tmpfs, which is host memory: for tests.
        grad_on: "disk": gradients of buckets whose state is on the disk wait there for their
            update, too; a few are on the host at a time. Microbatches are then read, added and
            written. Not in update mode "delayed". The same bits.
        sums_on: where microbatches are summed, in fp32, if the state is on the host. "device": 4
            bytes per parameter there; one copy goes down per step, in fp32, whatever the number of
            microbatches. The same bits. "auto" is decided by the plan of a job.
        sums_down: with sums on the device, the dtype in which they go down. "working": rounded
            once, before the norm is taken: half the bytes, on the bus and in `gradients`; as exact
            as a gradient of one microbatch.
        seed: seed of stochastic rounding in "split16" and "int8".
        update: update mode. "exact": the update of a resident run. "speculative": the same bits;
            Adam runs inside backward on the assumption that nothing is clipped or skipped, into a
            second copy of the state. "delayed": one step of staleness, Adam beside the whole next
            step.
        warmup_steps: in mode "delayed", exact steps before the first delayed one.
        clip_norm: largest global gradient norm; None: only `clip_grad_norm_` of the optimizer
            clips.
        skip_nonfinite: skip a step whose gradient norm is not finite; three in a row log a warning.
            If False and nothing is clipped, Adam of mode "exact" runs inside backward.
        loss_scale_hysteresis: with "fp16", the overflow since the loss scale last grew that first
            halves it; 1, every one does, as in torch's GradScaler.
        grad_accum_steps: microbatches per step, summed in fp32 on the host; `backward` divides by
            it, see above.
        host_memory_limit: bytes that the engine may hold on the host; decides how many blocks
            "speculative" can speculate on. None: nine tenths of what is available.
        checkpoint_spill: bytes of host memory into which a save copies the state that it writes
            last, so that the next updates need not wait for the disk there; at most the state's.
        working: residence of the working weights. "device"; "host": repeated blocks (the layers of
            a list) are streamed, loaded ahead of their use in forward and in backward. Embedding,
            final norm and head stay on the device; among ranks see `zero_stage`.
        device_slots: how many streamed blocks are on the device at once.
        resident_blocks: how many of the repeated blocks stay on the device. None: as many as
            `device_memory_limit` leaves room for; without one, none.
        device_memory_limit: bytes that the engine may hold on the device: weights, slots and
            gradient staging. Activations and gradients on their way are torch's.
        activation: the activations of the layers of a list. "keep": all stay on the device;
            "recompute": inputs stay, and forward runs again in backward (dropout draws the same);
            "offload": as "recompute", with the inputs in host memory; "offload_saved": what the
            model's forward saves for backward goes to host memory and comes back, of any model, and
            nothing runs again. A loss outside of the model keeps what it saves.
        recompute_blocks: with "recompute" and "offload" how many layers' forward runs again: the
            first ones; the last ones, whose activations backward frees first, keep all of theirs.
            None: all. In a pipeline it counts in each stage.
        offload_saved_above: bytes; with "offload_saved" smaller memory stays on the device.
        partition_activations: with tensor parallel, each rank of the axis "tp" keeps its part of
            the inputs that recompute starts from, on the device ("recompute") or on the host
            ("offload"); they are gathered for backward. Not with sequence parallel, whose inputs
            are divided already.
        compile_blocks: `torch.compile` the forward of each layer of a list, at its first call.
            Layers alike share one code. Results differ from uncompiled ones by rounding, and are
            the same in every placement. Not with tensor or expert parallel.
        process_group: of torch.distributed, whose ranks share the state of this model: each keeps
            and updates its shard. Every one of them calls `offload`, `step` and so on at the same
            point. Default: all ranks where torch.distributed is initialised, else this process
            alone. Rank 0's weights are everybody's.
        mesh: instead of `process_group`, with axes "dp", whose ranks share the state (or
            "dp_replicate" and "dp_shard" of hybrid sharding: the ranks of each group, those of a
            host as a rule, share the state, and all groups sum their gradients), and "pp",
            whose ranks hold the other stages of the model: the norm is that of all stages, and they
            skip together. `pipeline` makes the stages as well. And "tp", along which the model's
            DTensors (of `parallelize_module`) are divided: each rank offloads its part, and the
            norm counts each part once. Or "dp" and "ep", along which `expert_parallel` has divided
            the experts: all ranks have batches of their own and share the state of what all hold;
            the ranks of "dp" share that of their experts. "pp" or "tp" may stand beside these two.
        zero_stage: what ranks share out: 1: the optimizer state; 2: and gradients; 3: and the
            weights, gathered for their use; 0: 3 with working = "host", which needs it, else 2. In
            stage 3 modules outside of layers stay whole where sharding them saves no memory: small
            ones, and a tied embedding, which would need a slot as large as itself.
        keep_whole: in stage 3, names of modules outside of layers, or shell patterns of them, that
            stay whole on every rank: those whose weights are read without calling them, and those
            that two others need at once.
        reduction: dtype in which gradients are summed over ranks: "working", that of the weights,
            or "fp32", at twice the traffic.
        param_init_fn: gets each module that owns meta parameters or buffers, in the order of
            `model.modules()`, with memory and without values, and fills what it owns.
        cast_inputs: None: an fp32 input is cast where it meets a matrix of 16 bits and torch would
            refuse the product: timesteps, labels and masks reach the model as they are. True: every
            floating-point input of the model is cast at its entrance. False: none is cast.
        keep_fp32: names of parameters, or shell patterns of them such as "*norm*", whose working
            weights stay fp32. A scale near 1 moves in steps of 0.008 in bf16; where that is too
            coarse (contrastive losses), norms kept so follow their masters as under autocast, at
            the price of fp32 inputs and outputs of these norms.
        skip_unused: names of parameters, or shell patterns of them such as "*.experts.*": a step in
            which an expert got no gradient leaves its weights, moments and step count, as torch
            skips a parameter whose `.grad` is None. A tensor with three or more axes holds an
            expert per index of the first one. Named parameters are updated in `step()` in every
            update mode (docs/experts.md).
        pin_memory: pin host memory where the device is a GPU.

    Raises:
        ModelError: a model that would not train correctly, naming the parameter.
        HostMemoryError, DeviceMemoryError, DiskError: before anything is allocated, if a limit, the
            available memory or the space on the disk is too small.
        RankError: ranks differ in model, groups or options.
        ValueError, TypeError: arguments out of range, contradictory or of a wrong type.
    """
    given = locals()
    check_arguments(model, rule)
    options = {option.name: given[option.name] for option in fields(OffloadConfig)}
    names = {key: tuple(given[key]) for key in ("keep_fp32", "keep_whole", "skip_unused")}
    chosen = _chosen(OffloadConfig(**options | names), config).checked()
    on = resolve_device(device, chosen.precision)
    Ranks.tell_of_long_waits()
    if mesh is None:
        return attach(model, rule, params, chosen, on, Ranks.of(process_group, on), param_init_fn)
    if process_group is not None:
        raise ValueError("process_group and mesh are both given: leave process_group out")
    axes = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh, on)
    place = StagePlace(Stages(axes.stages), parts=axes.parts)
    return attach(model, rule, params, chosen, on, axes.replicas, param_init_fn, place)


def attach(
    model: nn.Module,
    rule: AnyRule | None,
    params: _Params | None,
    chosen: OffloadConfig,
    on: torch.device,
    ranks: Ranks,
    param_init_fn: ParamInit | None,
    place: StagePlace | None = None,
    ledger: Ledger | None = None,
) -> OffloadOptimizer:
    """Offload a model, or a stage of one; the arguments are those of `offload`, resolved.

    Args:
        ledger: that of the process's other stages.
    """
    _check_scratch(chosen)
    chosen.zero_stage_among(ranks.size)
    if optimizer_of(model) is not None:
        raise ModelError("the model is offloaded already: close() its optimizer first")
    check_model(model, may_be_meta=param_init_fn is not None)
    rule = rule or AdamW()
    check_rule(rule, chosen)
    groups = normalise_groups(model, params, rule)
    parts = ALONE if place is None else place.parts
    check_same_model(model, groups, chosen, ranks, parts)
    check_compiled(model, chosen)
    whole = ledger is None and (place is None or place.stages.ranks.is_single)
    check_parts(model, rule, parts, ranks, is_stage=not whole)
    check_skips(model, chosen, rule, whole=whole)
    if place is not None:
        check_same_options(chosen, rule, place)
    if place is None or place.stages.ranks.is_single:
        warn_of_no_layers(model, chosen, ranks)
    lanes = lanes_for(on, among_ranks=not ranks.is_single)
    optimizer = OffloadOptimizer(
        model, rule, groups, chosen, on, ranks, lanes, param_init_fn, place, ledger
    )
    offloaded[model] = weakref.ref(optimizer)
    optimizer.warn_of_no_checkpoints()
    return optimizer


def _check_scratch(config: OffloadConfig) -> None:
    """Raises OptionError for anything on the disk without a folder for it, which a job has."""
    if config.uses_disk and not config.scratch_dir:
        asked = "working = 'disk'"
        if config.disk_share:
            asked = f"state_on = {shown(config.state_on)}"
        raise OptionError(
            f"{asked} without scratch_dir: set it to a folder on a local drive, best an NVMe one, "
            "which holds the state while the run lasts"
        )


def optimizer_of(model: nn.Module) -> OffloadOptimizer | None:
    """Return the optimizer that trains a model, if there is one."""
    found: OffloadOptimizer | None = offloaded[model]() if model in offloaded else None
    return found


def _chosen(options: OffloadConfig, config: OffloadConfig | None) -> OffloadConfig:
    """Return the options, which are either in their own arguments or in `config`.

    Raises:
        ValueError: an option is in both.
    """
    if config is None:
        return options
    default = OffloadConfig()
    for option in fields(OffloadConfig):
        if (value := getattr(options, option.name)) != getattr(default, option.name):
            raise ValueError(
                f"config and {option.name} = {value!r} are both given: put it into the config "
                f"(dataclasses.replace(config, {option.name}={value!r})), or leave the config out"
            )
    return config
