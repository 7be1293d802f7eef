"""The dry run of a job: the engine's layout on the meta device, and a proof of its program.

`offloadtrain train JOB --dry-run`. The engine lays out the whole model, and its bytes must equal
the plan's. The program of its steps is generated at real size, without the model, and proved free
of races. `preview` adds the plan and the host memory of each state format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import cast

import torch

from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.config.offload import STATE_PRECISIONS
from offloadtrain.config.ranks_options import NO_FLUSH, Stage
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.buffers import MemoryMap
from offloadtrain.engine.build import lay_out, make_blocks
from offloadtrain.engine.division import Division
from offloadtrain.engine.param_groups import normalise_groups
from offloadtrain.engine.partition import partition
from offloadtrain.hardware.machine import Machine, find, shipped
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import rule_of
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.parallel.pipeline.decoder_stages import cut_stage
from offloadtrain.parallel.pipeline.drive import stage_steps
from offloadtrain.parallel.pipeline.stage_modules import divide
from offloadtrain.parallel.tensor import transformers_plan
from offloadtrain.parallel.tensor.own_model import narrowed, with_fewer_experts
from offloadtrain.plan import report
from offloadtrain.plan.automatic import with_decisions_of
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import settled
from offloadtrain.runtime.arena import Ledger, MetaArena
from offloadtrain.runtime.detect_machine import here
from offloadtrain.runtime.device import resolve_device
from offloadtrain.runtime.disk_arena import MetaDiskArena
from offloadtrain.runtime.lanes import SequentialLanes
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.step.layout.buffer_table import added, buffer_table, disk_owners, host_owners
from offloadtrain.step.layout.buffers import by_owner
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import Fault, prove_operations
from offloadtrain.train.build import described, empty_model, needed_trace

STEPS, MOST_MICRO_STEPS = 3, 3
MOST_PIECES, FEWEST_BLOCKS = 4096, 16
"""Limits on the proved program; further repeated blocks add no new cases."""


class DryRunError(OffloadTrainError):
    """The engine differs from the plan, which is a defect of offloadtrain."""


def preview(config: Config, ranks: int = 1) -> tuple[str, bool, Config]:
    """Return (report, True if the job fits, the job with the plan's decisions on gradient sums and
    update mode), for the job's machine or else this one."""
    described_job = described(config)
    name, machine = _machine(described_job)
    trace = needed_trace(described_job, machine, ranks)
    job = settled(described_job, name, machine, ranks, trace)
    plan = make(job, name, machine, ranks, trace)
    lines = [report.text(plan), _formats(plan, trace), check(plan)]
    return "\n\n".join(lines), plan.fits, with_decisions_of(config, plan.job)


def _machine(config: Config) -> tuple[str, Machine]:
    if config.device.machine:
        return find(config.device.machine)
    try:
        return here(on_gpu=resolve_device(config.device.kind).type == "cuda")
    except ConfigError as error:
        raise ConfigError(
            f"{error}; or set device.machine to the machine the job is for: "
            f"{', '.join(shipped())}, or a file of offloadtrain doctor"
        ) from None


def _formats(plan: Plan, trace: Trace | None) -> str:
    """Return a line with the host memory of each state format that supports the precision."""
    job, precision = plan.job, plan.job.offload.precision
    needs = {}
    for state, precisions in STATE_PRECISIONS.items():
        if precision in precisions:
            changed_job = replace(job, offload=job.offload.replace(state=state))
            changed_plan = make(changed_job, plan.name, plan.machine, plan.ranks, trace)
            needs[state] = max(changed_plan.host_peaks.values())
    text = ", ".join(f"{state} {format_bytes(size)}" for state, size in needs.items())
    return f"a host needs, by state format: {text}"


def check(plan: Plan) -> str:
    """Lay out the model and prove its program; return a sentence on the result.

    Raises:
        DryRunError: the engine's layout differs from the plan's, or its program has a race.
        HostMemoryError, DeviceMemoryError: the engine exceeds a memory limit.
    """
    ledger = laid_out(plan)
    launches, layers, left_out = 0, 0, 0
    for placed in _placements(plan):
        some, part = some_of(placed.spec), placed.config
        count, faults = proved(some, placed.input_bytes, None if part.ranks.flushes else part.stage)
        if faults:
            raise DryRunError(
                f"the program of a step has {len(faults)} faults, the first: {faults[0]}"
            )
        launches += count
        layers += part.model.num_layers
        left_out += len(placed.spec.blocks) - len(some.blocks)
    total = sum(row.bytes for row in ledger.rows())
    of_one = "" if plan.placed.spec.is_single else "of a rank "
    of_some = f"of {layers - left_out} of the blocks " if left_out else ""
    return (
        f"laid out {layers} blocks, {total} bytes, as planned; "
        f"proved {launches} operations of {STEPS} steps {of_some}{of_one}free of races"
    )


def laid_out(plan: Plan) -> Ledger:
    """Return the engine's Ledger of the whole model, without allocating memory.

    Raises:
        DryRunError: the spec of the module differs from the plan's, or the Ledger from the spec.
    """
    ledger = Ledger()
    for placed in _placements(plan):
        _lay_out(plan, placed, ledger)
    _compare(ledger, [placed.spec for placed in _placements(plan)])
    return ledger


def _placements(plan: Plan) -> tuple[Placement, ...]:
    """Return the placements of the rank's stages, second copies of the state included."""
    return plan.with_copies, *plan.placements[1:]


def _lay_out(plan: Plan, placed: Placement, ledger: Ledger) -> None:
    config, planned = placed.config, placed.spec
    lanes, device = SequentialLanes(), torch.device("meta")
    model, first = _stage_of(plan, config.stage)
    rule = update_rule(config.optim)
    groups = normalise_groups(model, decay_groups(model, config), rule)
    rules = [rule_of(rule, group) for group in groups]
    parts = partition(model)
    division = Division(
        replicas=Ranks.fake(planned.ranks, planned.copies, plan.job.ranks.expert),
        parts=Ranks.fake(plan.job.ranks.tensor),
        first=first,
        weight_versions=planned.weight_versions,
        gradient_sums=planned.gradient_sums,
        update_policy=planned.update_policy,
    )
    blocks, _ = make_blocks(parts, model, groups, rules, config.offload, division, lanes)
    spec = lay_out(model, blocks, config.offload, division, plan.second_copy_budget)
    if spec != planned:
        raise DryRunError(f"the layout differs from the plan: {_first_difference(spec, planned)}")
    arena, disk = MetaArena(ledger), MetaDiskArena(ledger)
    MemoryMap(buffer_table(spec), device, arena=arena, disk=disk, ledger=ledger)


def _stage_of(plan: Plan, stage: Stage | None) -> tuple[torch.nn.Module, int]:
    """Return a stage of the model, or the model without stages, on the meta device, and the index
    of its first parameter."""
    model = empty_model(plan.job)
    if plan.job.hf is not None:
        transformers_plan.narrowed(model, plan.job.ranks.tensor)
    else:
        narrowed(cast(Transformer, model), plan.job.ranks.tensor)
        with_fewer_experts(cast(Transformer, model), plan.job.ranks.expert)
    if stage is None:
        return model, 0
    numbers = {param: number for number, param in enumerate(model.parameters())}
    cut_stage(model, divide(model, stage.count, plan.job.ranks.given_layers), stage.index)
    return model, min(numbers[param] for param in model.parameters())


def _first_difference(spec: StepSpec, planned: StepSpec) -> str:
    pairs = zip_longest(spec.blocks, planned.blocks)
    block = next((f"block {first} and {other}" for first, other in pairs if first != other), "")
    fields = (f.name for f in dataclasses.fields(StepSpec) if f.name != "blocks")
    of_spec = ((f, getattr(spec, f), getattr(planned, f)) for f in fields)
    return block or next(
        f"{f} {first} and {other}" for f, first, other in of_spec if first != other
    )


def _compare(ledger: Ledger, specs: Sequence[StepSpec]) -> None:
    """Raise DryRunError if the Ledger differs from the specs. (Gradients of ZeRO stage 1 are
    allocated on first use.)"""
    tiers = {
        "device": [by_owner(buffer_table(spec).allocated(Tier.DEVICE).values()) for spec in specs],
        "host": [host_owners(spec) for spec in specs],
        "disk": [disk_owners(spec) for spec in specs],
    }
    expected = {
        (tier, owner): size
        for tier, owners in tiers.items()
        for owner, size in added(owners).items()
    }
    booked = {(row.tier, row.owner): row.bytes for row in ledger.rows()}
    for tier, owner in sorted(expected.keys() | booked.keys()):
        planned, actual = expected.get((tier, owner), 0), booked.get((tier, owner), 0)
        if planned != actual:
            raise DryRunError(f"{owner} on the {tier}: planned {planned} bytes, laid out {actual}")


def proved(
    spec: StepSpec, input_bytes: int = 0, unflushed: Stage | None = None
) -> tuple[int, list[Fault]]:
    """Return (operations, faults) of a few steps of the first and the last rank, at real size.

    Args:
        input_bytes: bytes of a repeated block's input, which activation = "offload" moves.
        unflushed: this stage of a pipeline without flushes, whose steps overlap.
    """
    most = max(MOST_MICRO_STEPS, 0 if unflushed is None else unflushed.count)
    config = spec.config.replace(
        grad_accum_steps=min(spec.config.grad_accum_steps, most),
        warmup_steps=min(spec.config.warmup_steps, 1),
    )
    spec = replace(spec, config=config)
    launches, faults = 0, []
    for rank in sorted({0, spec.ranks - 1}):
        program = Program(spec, rank)
        if unflushed is None:
            operations = steps(program, STEPS, input_bytes)
        else:
            at = unflushed.index, unflushed.count
            operations, _ = stage_steps(program, NO_FLUSH, *at, STEPS, input_bytes)
        launches = sum(isinstance(op, Launch) for op in operations)
        faults += prove_operations(spec, operations, rank)
    return launches, faults


def some_of(spec: StepSpec) -> StepSpec:
    """Return the spec with fewer repeated blocks, the same share of them resident."""
    pieces = max(len(spec.pieces(bucket)) for bucket in spec.buckets)
    most = max(MOST_PIECES // pieces, FEWEST_BLOCKS)
    repeated = [block.name for block in spec.blocks if block.repeated]
    # Leave out blocks in the middle: the first blocks may be recomputed and the last ones not.
    left_out = repeated[most - most // 2 : len(repeated) - most // 2]
    blocks = tuple(block for block in spec.blocks if block.name not in left_out)
    names = {block.name for block in blocks}
    return replace(
        spec,
        blocks=blocks,
        streamed=spec.streamed & names,
        second_copies=spec.second_copies & names,
    )
