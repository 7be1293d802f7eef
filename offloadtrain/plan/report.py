"""Formats a plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from offloadtrain.config.batch_split import explain
from offloadtrain.config.job import Config
from offloadtrain.config.units import format_bytes, format_count, format_seconds
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.automatic import GAIN
from offloadtrain.plan.costs.among_ranks import AmongCopies, AmongExperts
from offloadtrain.plan.costs.costs import Costs, is_timed_in_fp8
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.plan import Plan
from offloadtrain.plan.run_cost import RunCost, run_cost
from offloadtrain.plan.search.suggest import Change
from offloadtrain.plan.times import compute_seconds
from offloadtrain.step.layout.state_tiers import device_share, sums_share
from offloadtrain.step.layout.tiers import Tier

LANES = {
    "compute": "forward and backward",
    "d2h": "gradients to the host",
    "host": "sums, norm, updates",
    "h2d": "weights to the device",
    "load": "streamed blocks",
    "comm": "collectives",
    "ortho": "matrices of updates",
    "update": "state on the device",
    "write": "checkpoints",
    "disk_read": "state from the disk",
    "disk_write": "state to the disk",
    "disk_load": "weights from the disk",
}
_WIDTH = 26
SUMS = "gradient sums"


_AS_BF16 = (
    "timed as those of bf16. Their own rate takes compile_blocks, a GPU whose machine file has "
    "fp8_tflops, and for models of transformers neither experts nor adapters"
)

_OF_LIGER = (
    "Liger: its loss is planned as train.chunked_loss, which makes no whole logits either; what "
    "its other kernels save in memory and time is not known to the plan"
)

CAUTION = 0.95
"""Share of a host's memory above which the report warns."""


def text(plan: Plan, changes: Sequence[Change] = (), run: RunCost | None = None) -> str:
    """Return the plan as text, verdict first; `run` defaults to the cost of the job's run."""
    lines = [_verdict(plan), *_cautions(plan)]
    lines += [(run or run_cost(plan)).text] if plan.fits else []
    parts = ["\n".join([*lines, _head(plan)]), _memory(plan), _step(plan)]
    return "\n\n".join(parts if plan.fits else [*parts, _changes(plan, changes)])


def as_json(
    plan: Plan, changes: Sequence[Change] = (), run: RunCost | None = None
) -> dict[str, Any]:
    """Return the plan as plain values in bytes and seconds."""
    spec = plan.placed.spec
    return {
        "job": plan.job.name,
        "machine": plan.name,
        "ranks": plan.ranks,
        "stage": plan.stage_names or None,
        "tensor_parts": plan.job.ranks.tensor,
        "expert_parts": plan.job.ranks.expert,
        "state_copies": spec.copies,
        "hosts": plan.hosts,
        "zero_stage": spec.zero_stage,
        "precision": plan.job.offload.precision,
        "optimizer": plan.job.optim.name,
        "params": plan.job.num_params,
        "active_params": plan.job.num_active,
        "batch_tokens": plan.job.batch_tokens,
        "streamed_blocks": len(spec.streamed),
        "recomputed_blocks": plan.placed.recomputed,
        "state_on_device": device_share(spec),
        "update": plan.job.offload.update,
        "sums_on": plan.job.offload.gradients.sums_tier,
        "sums_down": plan.job.offload.gradients.sums_dtype,
        "device_bytes": plan.device,
        "device_room_bytes": plan.device_room,
        "host_bytes": plan.host,
        "host_peak_bytes": dict(plan.host_peaks),
        "host_room_bytes": plan.host_room,
        "disk_bytes": plan.disk,
        "wear": asdict(plan.wear),
        "fits": plan.fits,
        "problems": plan.problems,
        "step": asdict(plan.prediction),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "save": None if plan.save is None else asdict(plan.save),
        "cautions": _cautions(plan),
        "run": asdict(run or run_cost(plan)),
        "changes": [_change_json(change) for change in changes],
    }


def _of_hf(plan: Plan) -> str:
    """Return a line on which figures of a transformers model are exact."""
    job = plan.job
    trained = (
        f"{format_count(job.num_trained)} trained; " if job.num_trained < job.num_params else ""
    )
    if plan.placed.trace is not None:
        return (
            f"{trained}parameters, state, activations and FLOPs are the model's: one microbatch "
            "was traced, without weights"
        )
    return (
        f"{trained}parameters and state are the model's; activations and times are estimates, for "
        "our transformer with its width, depth and heads"
    )


def _of_experts(job: Config) -> str:
    """Return the active parameters of a model with experts, by which FLOPs are counted; else ""."""
    shape = job.model
    if job.num_active is None or not shape.num_experts:
        return ""
    chosen = f"{shape.experts_per_token} of {shape.num_experts} experts"
    return f"{format_count(job.num_active)} active per token ({chosen}), "


def _of_blocks(plan: Plan) -> str:
    """Describe the layers; of a traced model, as the engine partitions it."""
    if plan.placed.trace is None:
        return f"{plan.job.model.num_layers} blocks of width {plan.job.model.d_model}"
    return f"{plan.placed.repeated} repeated blocks of {len(plan.placed.spec.blocks)}"


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "keys": change.keys,
        "fits": change.plan.fits,
        "tokens_per_s": change.plan.prediction.tokens_per_s,
        "device_bytes": sum(change.plan.device.values()),
        "host_bytes": max(change.plan.host_peaks.values()),
    }


def _head(plan: Plan) -> str:
    job, config, spec = plan.job, plan.placed.config, plan.placed.spec
    device = "the CPU" if plan.machine.on_cpu else plan.machine.gpu
    ranks = f"{plan.ranks} x {device}" if plan.ranks > 1 else device
    hosts = f" on {plan.hosts} hosts" if plan.hosts > 1 else ""
    train = job.train
    lines = [
        f"{job.name} on {plan.name}: {ranks}{hosts}, {job.offload.precision}, {job.optim.name}",
        f"{format_count(job.num_params)} parameters, {_of_experts(job)}{_of_blocks(plan)}; "
        f"{format_count(job.batch_tokens)} tokens per step "
        f"({train.micro_batch} sequences of {job.data.seq_len} x {train.grad_accum_steps})",
    ]
    if job.hf is not None:
        of_liger = _OF_LIGER if job.hf.use_liger_kernel else ""
        lines += [*filter(None, [job.hf.unquantized, _of_hf(plan), of_liger])]
    if plan.ranks > 1:
        lines.append(f"{explain(job, config, plan.ranks)}; ZeRO stage {spec.zero_stage}")
    if stages := plan.stage_names:
        needs = "which needs" if config.ranks.stages_per_rank == 1 else "whose rank needs"
        lines.append(f"memory, lanes and bus: {stages}, {needs} the most memory")
    if spec.has_state_on(Tier.DEVICE):
        there = {spec.block_of[bucket.name].name for bucket in spec.buckets_on(Tier.DEVICE)}
        share = 100 * device_share(spec)
        lines.append(
            f"{share:.0f} % of the state on the device: {len(there)} of {len(spec.blocks)} blocks"
        )
    if job.offload.activations.recompute_blocks is not None:
        again = f"{plan.placed.recomputed} of {plan.placed.repeated} blocks"
        lines.append(f"the forward of {again} runs again, the others keep their activations")
    if share := sums_share(spec):
        down = "fp32" if job.offload.gradients.sums_dtype == "fp32" else "the working dtype"
        some = f" ({100 * share:.0f} % of the sums) and on the host" if share < 1 else ""
        sums = "a sum on the device" if some else "a step's sum"
        lines.append(
            f"microbatches are summed on the device{some}; {sums} goes down once, in {down}"
        )
    if plan.requested is not None and plan.requested.offload.update == "auto":
        update, gain = job.offload.update, f"{100 * GAIN:.0f} %"
        reason = f": speculative gains less than {gain}, or cannot be used" * (update == "exact")
        lines.append(f"update = auto chooses {update}{reason}")
    if job.offload.compute.compile_blocks:
        timed = "fused" if plan.placed.traced is None else "uncompiled"
        lines.append(f"layers are compiled: timed as {timed} operations")
        if job.offload.activations.mode not in ("selective", "keep"):
            lines[-1] += (
                "; the bytes that they keep are planned as those of uncompiled ones, which is more"
            )
    if job.offload.compute.fp8 != "off":
        known = is_timed_in_fp8(job, plan.machine)
        rate = f"{plan.machine.fp8_tflops:g} Tflop/s, with their casts" if known else _AS_BF16
        lines.append(f"FP8 products: {rate}")
        asks_compiler = job.offload.activations.mode in ("selective", "keep")
        if job.offload.compute.compile_blocks and asks_compiler and find_spec("torchao") is None:
            lines[-1] += "; what layers keep is planned as of bf16: torchao is not installed"
    if spec.streamed:
        places = {"host": "the host", "disk": "the disk", "device": "shards on the devices"}
        where = places[config.offload.weights.tier]
        lines.append(f"{len(spec.streamed)} blocks are streamed from {where}")
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    each = " of each rank" if plan.ranks > 1 else ""
    room = f"of {format_bytes(plan.device_room)}"
    room += f" ({format_bytes(plan.machine.gpu_reserved_bytes)} reserved for CUDA)"
    if plan.machine.on_cpu:
        room = "(in the host's memory)"
    lines = [f"device{each}: {_sum(plan.device)} {room}"]
    lines += _rows(plan.device)
    lines += [f"host{each}: {_sum(plan.host)}"]
    lines += _rows(plan.host)
    if plan.disk:
        lines += [f"disk{each}: {_sum(plan.disk)}", *_rows(plan.disk)]
    peaks = ", ".join(f"{moment} {format_bytes(n)}" for moment, n in plan.host_peaks.items())
    many = f", {plan.local_ranks} ranks" if plan.local_ranks > 1 else ""
    device_note = ", including the device's bytes" if plan.machine.on_cpu else ""
    room, reserved = format_bytes(plan.host_room), plan.machine.host_reserved_bytes
    if reserved:
        room += f" ({format_bytes(reserved)} reserved for a desktop's programs: --host-reserve)"
    lines.append(f"peaks of a host{many}: {peaks}; it has {room}{device_note}")
    return "\n".join(lines)


def _sum(owners: Mapping[str, int]) -> str:
    return format_bytes(sum(owners.values()))


def _rows(owners: Mapping[str, int]) -> list[str]:
    rows = sorted(owners.items(), key=lambda item: -item[1])
    return [f"  {owner:{_WIDTH}} {format_bytes(size):>11}" for owner, size in rows if size]


def _step(plan: Plan) -> str:
    step, machine = plan.prediction, plan.machine
    is_launching = step.launch_s >= step.seconds
    waits_s = step.seconds - step.busy_s["compute"] if is_launching else step.exposed
    lines = [
        f"step: {format_seconds(step.seconds)}, of which the device waits "
        f"{format_seconds(waits_s)}",
        f"  {'lane':8} {'':22} {'busy':>9} {'waits':>9}",
    ]
    for lane, meaning in LANES.items():
        if busy := step.busy_s.get(lane, 0.0):
            exposed = step.exposed_s.get(lane, 0.0)
            times = f"{format_seconds(busy):>9} {format_seconds(exposed):>9}"
            lines.append(f"  {lane:8} {meaning:22} {times}")
    if is_launching:
        lines.append("  bound by launches: the host takes longer to launch it than the device")
    if step.none_right_s is not None and step.none_right_s <= step.seconds:
        lines.append("  speculative gains nothing here: set update = exact")
    elif step.none_right_s is not None:
        rate = step.tokens_per_s * step.seconds / step.none_right_s
        lines.append(
            f"  speculative: {format_seconds(step.seconds)} if all guesses are right, "
            f"{format_seconds(step.none_right_s)} ({format_count(rate)} tokens/s) if none is"
        )
    lines += [*plan.stage_lines(), *_copies(plan), *_parts(plan), *_experts(plan)]
    again = mfu = ""
    has_adapters = plan.job.hf is not None and plan.job.hf.lora is not None
    if plan.job.offload.activations.recomputes and not has_adapters:
        again = f" of {100 * step.forward_again:.0f} % of the forward"
    if step.mfu is not None:
        bits = " in 16 bits" if plan.job.offload.compute.fp8 != "off" else ""
        mfu = f"; MFU {100 * step.mfu:.1f} % of {machine.peak_tflops:g} Tflop/s{bits}"
    lines.append(
        f"{format_count(step.tokens_per_s)} tokens/s, {step.tflops:.3g} Tflop/s per rank "
        f"(6 N + 12 L d T per token), {step.hardware_tflops:.3g} with recompute{again}{mfu}"
    )
    buckets = [bucket for placed in plan.placements for bucket in placed.spec.buckets]
    owned = sum(bucket.params / bucket.ranks for bucket in buckets)
    lines.append(
        f"bus: {format_bytes(step.d2h_bytes)} down, {format_bytes(step.h2d_bytes)} up per step "
        f"and rank ({(step.d2h_bytes + step.h2d_bytes) / owned:.2f} bytes per parameter owned); "
        f"DRAM: {format_bytes(step.dram_bytes)} by the host's kernels"
        + (f"; to other ranks: {format_bytes(step.comm_bytes)}" if plan.ranks > 1 else "")
    )
    if plan.job.offload.activations.mode == "offload_saved":
        lines.append(_saved_tensors(plan.placed, machine))
    if plan.disk:
        lines += [_disk(plan), _wear(plan)]
    lines.append(_checkpoint(plan))
    return "\n".join(lines)


def _copies(plan: Plan) -> Iterator[str]:
    """Yield a line on communication between the copies of the state."""
    spec, sent = plan.placed.spec, plan.prediction.sent.copies
    if spec.copies > 1:
        among = AmongCopies(spec, plan.machine, plan.job.ranks.tensor)
        where = "inside the host" if among.hosts == 1 else f"between {among.hosts} hosts"
        yield (
            f"  hybrid sharding: {spec.copies} copies of the state, each in {spec.ranks} shards; "
            f"sums of a shard over the copies send {format_bytes(sent.num_bytes)} per step and "
            f"rank, {format_seconds(sent.seconds)} {where}"
        )


def _parts(plan: Plan) -> Iterator[str]:
    """Yield a line on communication of tensor parallel parts, which the device waits for."""
    parts, sent = plan.job.ranks.tensor, plan.prediction.sent.parts
    if parts > 1:
        where = "inside the host" if parts <= plan.machine.gpus else "between hosts"
        divided = "attention's" if plan.job.model.num_experts else "the layers'"
        yield (
            f"  tensor parallel: each rank holds 1/{parts} of {divided} matrices; sums over the "
            f"parts send {format_bytes(sent.num_bytes)} per step and rank, "
            f"{format_seconds(sent.seconds)} {where}"
        )


def _experts(plan: Plan) -> Iterator[str]:
    """Yield a line on the exchange of tokens with experts, which the device waits for."""
    ranks, sent = plan.job.ranks.expert, plan.prediction.sent.experts
    if ranks > 1:
        local_experts = plan.job.model.num_experts // ranks
        inside = AmongExperts(plan.placed, plan.machine).hosts == 1
        yield (
            f"  expert parallel: each rank holds {local_experts} of {plan.job.model.num_experts} "
            f"experts of a layer; tokens on their way send {format_bytes(sent.num_bytes)} per "
            f"step and rank, {format_seconds(sent.seconds)} "
            f"{'inside the host' if inside else 'between hosts'}, if all experts get as many"
        )


def _disk(plan: Plan) -> str:
    """Return a line on disk traffic of a step, its rates, and its bound."""
    load, machine = plan.prediction.disk, plan.machine
    rates = f"{load.read_rate / 1e9:.3g} and {load.write_rate / 1e9:.3g} GB/s"
    if machine.disk_both_gbps:
        rates += f", which share {machine.disk_both_gbps:g} GB/s"
    if load.assumed:
        rates += ", assumed: `offloadtrain doctor --save` measures the drive of its --folder"
    bound_s, lane = plan.prediction.bound
    return (
        f"disk: {format_bytes(load.read_bytes)} read, {format_bytes(load.written_bytes)} written "
        f"per step and rank, at {rates}; no schedule is faster than {format_seconds(bound_s)} "
        f"({lane}), this one takes {plan.prediction.seconds / bound_s:.2f} x that"
    )


def _wear(plan: Plan) -> str:
    wear = plan.wear
    until = "its rating is unknown (disk_tbw in the machine file)"
    if wear.days is not None:
        until = f"its rating of {plan.machine.disk_tbw:g} TB is reached in {wear.days:.3g} days"
    return (
        f"wear of a host's drive: {format_bytes(wear.per_step)} per step, "
        f"{wear.per_day / 1e12:.3g} TB per day; {until}"
    )


def _checkpoint(plan: Plan) -> str:
    size, save = format_bytes(plan.checkpoint_bytes), plan.save
    if save is None:
        return f"checkpoint: {size}; its time is known once `offloadtrain doctor` measured the disk"
    return (
        f"checkpoint: {size}, {format_seconds(save.write_s)} at {plan.machine.disk_gbps:g} GB/s, "
        f"of which training stands still {format_seconds(save.stall_s)} (train.checkpoint_spill: "
        f"{format_bytes(plan.spill_bytes)} on all ranks): less than 3 % of the run from "
        f"train.checkpoint_every = {save.interval}"
    )


def _verdict(plan: Plan) -> str:
    if not plan.fits:
        return "\n".join(["It does not fit:", *(f"  {problem}" for problem in plan.problems)])
    rate = format_count(plan.prediction.tokens_per_s)
    step = format_seconds(plan.prediction.seconds)
    none_right_s = plan.prediction.none_right_s
    if none_right_s is not None and none_right_s > plan.prediction.seconds:
        step += f" ({format_seconds(none_right_s)} if no guess of speculative is right)"
    return f"It fits: {_needs(plan)}; {rate} tokens/s, {step} a step."


def _cautions(plan: Plan) -> list[str]:
    """Warn if a host has little memory left for other programs."""
    share = max(plan.host_peaks.values()) / max(plan.host_room, 1)
    if not CAUTION < share <= 1:
        return []
    return [
        f"Caution: {100 * share:.1f} % of the host's memory is used: other programs that need some "
        "stop the run. Close them, or leave more to them (--host-reserve)"
    ]


def _needs(plan: Plan) -> str:
    """Return the peak bytes of a GPU and a host, and their room."""
    host = max(plan.host_peaks.values())
    on_host = f"host {format_bytes(host)} of {format_bytes(plan.host_room)}"
    if plan.machine.on_cpu:
        return on_host
    on_disk = f", disk {_sum(plan.disk)}" if plan.disk else ""
    return f"GPU {_sum(plan.device)} of {format_bytes(plan.device_room)}, {on_host}{on_disk}"


def _changes(plan: Plan, changes: Sequence[Change]) -> str:
    """List changes that make the plan fit, or the nearest one if none does."""
    if not changes:
        return "No placement, format or microbatch makes it fit."
    if not changes[0].plan.fits:
        return (
            "Nothing that was tried fits: placements, formats, one sequence in a step, shorter "
            f"ones. The least of all:\n{_change(changes[0])}\nIt needs a machine with more memory, "
            "or a smaller model: offloadtrain plan --largest."
        )
    if changes[0].plan.disk and not plan.disk:
        drive = changes[0].plan
        lines = ["Nothing that was tried fits in memory. It fits with a drive (docs/disk.md):"]
        return "\n".join([*lines, *map(_change, changes), _disk(drive), _wear(drive)])
    if (tokens := changes[0].plan.job.batch_tokens) < plan.job.batch_tokens:
        sums = plan.host.get(SUMS, 0)
        because = f": their sums in fp32 take {format_bytes(sums)}" if sums else ""
        lines = [
            f"No placement or format fits {plan.job.batch_tokens} tokens per step{because}.",
            f"It fits with fewer tokens ({tokens}, in one microbatch):",
        ]
    else:
        lines = ["It fits with these settings, the fastest first (--set KEY=VALUE ...):"]
    return "\n".join([*lines, *map(_change, changes)])


def alternatives(changes: Sequence[Change]) -> str:
    """Return a list of other settings that fit."""
    return "\n".join(["Others that fit, with --set:", *map(_change, changes)])


def _change(change: Change) -> str:
    rate = format_count(change.plan.prediction.tokens_per_s)
    return f"  {_needs(change.plan)}  {rate:>6} tokens/s  {change.text}"


def hidden_above(placed: Placement, machine: Machine) -> int:
    """Return the least `offload_saved_above`, in bytes, with which all moved tensors go down during
    forward and come back during backward; 0: the job's value is enough.

    Copies of weights and gradients use the same bus but are not counted; a simulated step
    shows how much they leave.

    Raises:
        MachineError: as `predict`.
    """
    costs, compute = Costs(placed, machine), compute_seconds(placed, machine)
    down = compute.forward * costs.bus(machine.d2h_gbps)
    up = compute.backward * costs.bus(machine.h2d_gbps)
    moved, above = 0, max(placed.block_inputs, default=0) + 1
    for size, alike in groupby(sorted(placed.block_inputs, reverse=True)):
        moved += sum(alike)
        if moved > min(down, up):
            return above
        above = size
    return 0


def _saved_tensors(placed: Placement, machine: Machine) -> str:
    """Return a line on saved tensors that move to the host; if compute does not hide all of
    them, it gives the threshold above which it does."""
    sizes, threshold = placed.block_inputs, placed.config.offload.activations.offload_saved_above
    if not sizes:
        return (
            f"saved tensors: none has {format_bytes(threshold)}, so nothing moves: lower "
            "offload.offload_saved_above"
        )
    size = format_bytes(sum(sizes))
    line = f"saved tensors: {len(sizes)}, {size}, go to the host in each microbatch"
    if (above := hidden_above(placed, machine)) == 0:
        return f"{line}, which takes no longer than forward and backward"
    return (
        f"{line}, which takes longer than forward or backward; those from "
        f"{format_bytes(above)} on do not (offload_saved_above = {above})"
    )
