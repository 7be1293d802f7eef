"""A job without its memory: the engine's own layout on the meta device, and a proof of its program.

`offloadtrain train JOB --dry-run`. The plan says what the engine will hold; here the engine says
it, of the whole model, and both must be the same to the byte. The program that it will launch is
recorded from a twin of the job whose matrices have a few elements, with the same blocks, placement
and update mode, and is proved free of races.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from offloadtrain.assembly import decay_groups, offload_job
from offloadtrain.config import Config
from offloadtrain.distributed import Ranks
from offloadtrain.engine.build import lay_out, make_blocks, map_memory
from offloadtrain.engine.cut import cut
from offloadtrain.engine.groups import normalise_groups
from offloadtrain.errors import OffloadTrainError
from offloadtrain.memory import DeviceArena, Ledger, PaperArena
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.plan.plan import Plan
from offloadtrain.step import memory
from offloadtrain.step.prove import prove
from offloadtrain.step.spec import StepSpec
from offloadtrain.step.trace import Launched
from offloadtrain.transfer import SequentialLanes, on_lanes
from offloadtrain.transfer.recorder import RecordingLanes

STEPS, MOST_MICRO_STEPS = 3, 3
MOST_LAYERS = 128
"""Of the twin: with more, every layer repeats what another one in the same place does."""


class DryRunError(OffloadTrainError):
    """The engine would not do as planned; this is a defect of offloadtrain."""


def check(plan: Plan) -> str:
    """Lay out and prove; a sentence on what was done.

    Raises:
        DryRunError: the engine's layout is another than the plan's, or its program has a race.
        HostMemoryError, DeviceMemoryError: from the engine, if a limit is too small.
    """
    ledger = laid_out(plan)
    launches, faults = proved(plan)
    if faults:
        raise DryRunError(f"the program of a step has {len(faults)} faults, the first: {faults[0]}")
    total = sum(row.bytes for row in ledger.rows())
    of_one = "" if plan.placed.spec.alone else "of one rank "
    layers = plan.placed.config.model.num_layers
    of_some = f"of {MOST_LAYERS} of the blocks " if layers > MOST_LAYERS else ""
    return (
        f"laid out {layers} blocks, {total} bytes, as planned; "
        f"proved {launches} operations of {STEPS} steps {of_some}{of_one}free of races"
    )


def laid_out(plan: Plan) -> Ledger:
    """The engine's Ledger of the whole model, without its memory.

    Raises:
        DryRunError: the spec of the module is not the plan's, or the Ledger not the spec's.
    """
    config, planned = plan.placed.config, plan.copied.spec
    ledger, lanes, device = Ledger(), SequentialLanes(), torch.device("meta")
    ranks = Ranks.on_paper(planned.ranks)
    with device:
        model = Transformer(config.model)
    groups = normalise_groups(model, decay_groups(model, config), AdamW())
    blocks, _ = make_blocks(cut(model), model, groups, config.offload, ranks, lanes)
    spec = lay_out(model, AdamW(), blocks, config.offload, ranks, plan.copies_room)
    if spec != planned:
        raise DryRunError(f"laid out and planned differ: {_first_difference(spec, planned)}")
    arena = PaperArena(ledger) if spec.offloaded else DeviceArena(ledger, device)
    map_memory(blocks, spec, device, arena=arena, ledger=ledger)
    _compare(ledger, spec)
    return ledger


def _first_difference(spec: StepSpec, planned: StepSpec) -> str:
    pairs = zip_longest(spec.blocks, planned.blocks)
    block = next((f"block {one} and {other}" for one, other in pairs if one != other), "")
    fields = (f.name for f in dataclasses.fields(StepSpec) if f.name != "blocks")
    of_spec = ((f, getattr(spec, f), getattr(planned, f)) for f in fields)
    return block or next(f"{f} {one} and {other}" for f, one, other in of_spec if one != other)


def _compare(ledger: Ledger, spec: StepSpec) -> None:
    """Raises DryRunError where the Ledger is not what the spec says; gradients of ZeRO stage 1 are
    mapped when they first come."""
    device = memory.by_owner(memory.device_requests(spec))
    resident = memory.by_owner(() if spec.offloaded else memory.host_requests(spec))
    expected = {("device", owner): size for owner, size in (device | resident).items()}
    expected |= {("host", owner): size for owner, size in memory.host_owners(spec).items()}
    booked = {(row.tier, row.owner): row.bytes for row in ledger.rows()}
    for tier, owner in sorted(expected.keys() | booked.keys()):
        said, found = expected.get((tier, owner), 0), booked.get((tier, owner), 0)
        if said != found:
            raise DryRunError(f"{owner} on the {tier}: planned {said} bytes, laid out {found}")


def proved(plan: Plan) -> tuple[int, list[Any]]:
    """(operations, faults) of some steps of the job's twin on one rank."""
    config, threads = twin(plan), torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices of a few elements: more would wait for each other
    lanes = RecordingLanes(SequentialLanes())
    model = Transformer(config.model)
    with on_lanes(lanes):
        optimizer = offload_job(model, config, torch.device("cpu"))
    for _ in range(STEPS):
        for _ in range(config.train.grad_accum_steps):
            tokens = torch.randint(config.model.vocab_size, (1, config.data.seq_len))
            optimizer.backward(model(tokens, tokens))
        optimizer.step()
    optimizer.close()
    torch.set_num_threads(threads)
    launches = sum(isinstance(entry, Launched) for entry in lanes.program)
    return launches, prove(lanes.program)


def twin(plan: Plan) -> Config:
    """The same blocks in the same places, with matrices of a few elements; of very many, some."""
    config = plan.placed.config
    model, train = config.model, config.train
    layers = min(model.num_layers, MOST_LAYERS)
    spec = plan.placed.spec
    streamed = -(-len(spec.streamed) * layers // model.num_layers)  # the same share
    tiny = replace(
        model,
        num_layers=layers,
        d_model=8,
        num_heads=2,
        num_kv_heads=1 if model.kv_heads < model.num_heads else 0,
        d_ff=16,
        vocab_size=32,
        max_seq_len=4,
    )
    few = min(train.grad_accum_steps, MOST_MICRO_STEPS)
    offload = replace(
        config.offload,
        warmup_steps=min(config.offload.warmup_steps, 1),
        resident_blocks=layers - streamed if spec.streams else None,
        device_memory_limit=None,
    )
    return replace(
        config,
        model=tiny,
        data=replace(config.data, seq_len=4),
        offload=offload,
        train=replace(train, micro_batch=1, grad_accum_steps=few),
    )
