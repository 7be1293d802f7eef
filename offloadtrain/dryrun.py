"""A job without its memory: the engine's own layout on the meta device, and a proof of its program.

`offloadtrain train JOB --dry-run`. The plan says what the engine will hold; here the engine says
it, of the whole model, and both must be the same to the byte. The program that it will launch is
recorded from a twin of the job whose matrices have a few elements, with the same blocks, placement
and update mode, and is proved free of races.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from offloadtrain.assembly import decay_groups, offload_job
from offloadtrain.config import Config
from offloadtrain.distributed import Ranks
from offloadtrain.engine import PRECISIONS
from offloadtrain.engine.build import lay_out
from offloadtrain.engine.groups import normalise_groups
from offloadtrain.engine.settings import Settings
from offloadtrain.errors import OffloadTrainError
from offloadtrain.memory import DeviceArena, Ledger, PaperArena
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import AdamW
from offloadtrain.plan import memory
from offloadtrain.plan.plan import Plan
from offloadtrain.step.prove import prove
from offloadtrain.step.trace import Launched
from offloadtrain.transfer import SequentialLanes, on_lanes
from offloadtrain.transfer.recorder import RecordingLanes
from offloadtrain.units import parse_bytes

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
    _compare(ledger, plan)
    launches, faults = proved(plan)
    if faults:
        raise DryRunError(f"the program of a step has {len(faults)} faults, the first: {faults[0]}")
    total = sum(row.bytes for row in ledger.rows())
    of_one = "of one rank " if plan.placed.ranks > 1 else ""
    layers = plan.placed.config.model.num_layers
    of_some = f"of {MOST_LAYERS} of the blocks " if layers > MOST_LAYERS else ""
    return (
        f"laid out {layers} blocks, {total} bytes, as planned; "
        f"proved {launches} operations of {STEPS} steps {of_some}{of_one}free of races"
    )


def laid_out(plan: Plan) -> Ledger:
    """The engine's Ledger of the whole model, without its memory."""
    config, ledger = plan.placed.config, Ledger()
    with torch.device("meta"):
        model = Transformer(config.model)
    groups = normalise_groups(model, decay_groups(model, config), AdamW())
    offloads = plan.placed.offloaded
    arena = PaperArena(ledger) if offloads else DeviceArena(ledger, torch.device("meta"))
    lay_out(
        model,
        AdamW(),
        groups,
        _settings(plan),
        lanes=SequentialLanes(),
        arena=arena,
        ledger=ledger,
    )
    return ledger


def _settings(plan: Plan) -> Settings:
    """As `offload` makes them of a job."""
    config = plan.placed.config
    device, optim = config.device, config.optim
    limit = parse_bytes(device.host_memory_limit) if device.host_memory_limit else None
    if limit is None and optim.update == "speculative":  # as much as the machine has
        limit = int(plan.copies_room * memory.HEADROOM)
    return Settings(
        device=torch.device("meta"),
        dtype=PRECISIONS[device.precision],
        clip_norm=optim.clip_norm or None,
        skip_nonfinite=optim.skip_nonfinite,
        grad_accum_steps=config.train.grad_accum_steps,
        pin_memory=False,
        state=optim.state,
        seed=config.train.seed,
        update=optim.update,
        warmup_steps=optim.delay_warmup_steps,
        host_memory_limit=limit,
        state_on=optim.state_on,
        working=device.working,
        device_slots=device.slots,
        resident_blocks=None if device.resident_blocks < 0 else device.resident_blocks,
        device_memory_limit=parse_bytes(device.memory_limit) if device.memory_limit else None,
        activation=device.activation,
        zero_stage=plan.placed.stage or (3 if device.working == "host" else 2),
        reduction=torch.float32 if config.ranks.reduction == "fp32" else None,
        ranks=Ranks.on_paper(plan.placed.ranks),
    )


def _compare(ledger: Ledger, plan: Plan) -> None:
    later = ("block inputs", "gradients") if plan.placed.stage == 1 else ("block inputs",)
    booked = {(row.tier, row.owner): row.bytes for row in ledger.rows()}
    planned = {("device", owner): n for owner, n in memory.device(plan.placed).items()}
    planned |= {("host", owner): n for owner, n in plan.host.items()}
    for (tier, owner), size in planned.items():
        mapped_later = owner in later and (tier == "device" or owner == "block inputs")
        if owner in ("Python, torch", "padding") or mapped_later:
            continue
        found = booked.pop((tier, owner), 0)
        if found != size:
            raise DryRunError(f"{owner} on the {tier}: planned {size} bytes, laid out {found}")
    if rest := {key for key, size in booked.items() if size and key[1] != "padding"}:
        raise DryRunError(f"laid out and not planned: {sorted(rest)}")


def proved(plan: Plan) -> tuple[int, list[Any]]:
    """(operations, faults) of some steps of the job's twin on one rank."""
    config, threads = twin(plan), torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices of a few elements: more would wait for each other
    lanes = RecordingLanes(SequentialLanes())
    model = Transformer(config.model)
    with on_lanes(lanes):
        precision = config.device.precision
        optimizer = offload_job(model, config, torch.device("cpu"), precision)
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
    streamed = -(-len(plan.placed.streamed) * layers // model.num_layers)  # the same share
    stay = layers - streamed
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
    return replace(
        config,
        model=tiny,
        optim=replace(config.optim, delay_warmup_steps=min(config.optim.delay_warmup_steps, 1)),
        data=replace(config.data, seq_len=4),
        train=replace(train, micro_batch=1, grad_accum_steps=few),
        device=replace(config.device, resident_blocks=stay, memory_limit=""),
    )
