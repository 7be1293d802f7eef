"""The split of a job over ranks: the global batch, the layers into stages of a pipeline, the
matrices into parts, and the state into shards.

A step uses the same samples for any number of ranks. Ranks of different parts are adjacent, then
ranks that share a copy of the state: rank = ((stage x copies + copy) x shards + shard) x parts +
part. Among the ranks that share the state, ranks with different experts are adjacent.
"""

from __future__ import annotations

from dataclasses import replace

from offloadtrain.config.errors import ConfigError, broken
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import INTERLEAVED, RanksConfig, Stage, numbers_of

MOST_RANKS = 1 << 16


def parse_ranks(flag: str, text: str) -> int:
    """Parse a number of ranks from the command line.

    Raises:
        ConfigError: if the text is not a number or out of range.
    """
    if len(text) > 9 or not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_RANKS:
        raise ConfigError(
            f"{flag} {text[:40]}: give a number of at least 1 and at most {MOST_RANKS}"
        )
    return int(text)


def replicas(config: Config, ranks: int) -> int:
    """Return the number of ranks that divide the batch: the ranks of one stage and one part.

    Raises:
        ConfigError: if the ranks are not divisible by the stages, parts and experts.
    """
    parts, experts, stages = config.ranks.tensor, config.ranks.expert, config.ranks.pipeline
    together = experts * parts * stages
    rest, many = ranks % together, f"{ranks} rank{'s' if ranks > 1 else ''}"
    of_stage, of_each = (" of a stage", " of each stage") if stages > 1 else ("", "")
    problems = broken(
        (
            rest and experts > 1,
            f"ranks.expert = {experts} and {many}: each group of {experts} ranks holds all experts"
            f"{of_stage}{' for a part' if parts > 1 else ''}. Start a multiple of {together} "
            "(--nproc), or set ranks.expert = 1",
        ),
        (
            rest and parts > 1,
            f"ranks.tensor = {parts} and {many}: the ranks of all parts read one batch, and each "
            f"part{of_each} needs one. Start a multiple of {together} (--nproc), or set "
            "ranks.tensor = 1",
        ),
        (
            rest,
            f"ranks.pipeline = {stages} and {many}: each stage needs as many ranks as the others. "
            f"Start a multiple of {stages} (--nproc), or set ranks.pipeline = 1",
        ),
    )
    if problems:
        raise ConfigError(problems[0])
    return ranks // (parts * stages)


def shards(config: Config, ranks: int) -> int:
    """Return the number of ranks that share one copy of the state of their part of the model.

    Raises:
        ConfigError: as in `replicas`, or if the replicas are not divisible into such groups.
    """
    count, size = replicas(config, ranks), config.ranks.shard
    if not size:
        return count
    if count % size:
        model_parts = config.ranks.pipeline * config.ranks.tensor
        of_part = f", {count} of each part of the model" if model_parts > 1 else ""
        raise ConfigError(
            f"ranks.shard = {size} and {ranks} rank{'s' if ranks > 1 else ''}{of_part}: each "
            f"group of {size} holds a whole copy of the state. Start a multiple of "
            f"{size * model_parts} (--nproc), or set ranks.shard = 0"
        )
    return size


def of_stage(config: Config, index: int) -> Config:
    """Return the job of one stage of the pipeline: a model with fewer layers."""
    stage = config.ranks.stage(index, config.model.num_layers)
    hf = None if config.hf is None else config.hf.of_stage(stage)
    model = replace(config.model, num_layers=stage.layers)
    return replace(config, stage=stage, model=model, hf=hf)


def held_stages(ranks: RanksConfig, place: int, layers: int) -> tuple[Stage, ...]:
    """Return the stages of a rank.

    Args:
        place: the position of the rank in its pipeline.
        layers: number of layers of the whole model.
    """
    numbers = range(place, ranks.stages, ranks.pipeline)
    return tuple(ranks.stage(number, layers) for number in numbers)


def part_of(config: Config, rank: int) -> str:
    """Return the rank's part of every matrix, for example "part 1 of 2", or "experts 0 to 3", or
    both; "" if the rank has all."""
    parts, experts = config.ranks.tensor, config.ranks.expert
    names = [] if parts == 1 else [f"part {rank % parts + 1} of {parts}"]
    if experts > 1:
        count = config.model.num_experts // experts
        first = rank // parts % experts * count
        several = f"experts {first} to {first + count - 1}"
        names.append(f"expert {first}" if count == 1 else several)
    return ", ".join(names)


def group_of(config: Config, ranks: int, rank: int) -> str:
    """Return the group of ranks that share the rank's copy of the state, for example "group 2 of
    2"; "" if there is only one copy.

    Raises:
        ConfigError: as in `shards`.
    """
    each, every = shards(config, ranks), replicas(config, ranks)
    replica = rank // config.ranks.tensor % every
    return "" if each == every else f"group {replica // each + 1} of {every // each}"


def _stage_of(config: Config, ranks: int, rank: int) -> str:
    processes, stages = config.ranks.pipeline, config.ranks.stages
    if stages == 1:
        return ""
    numbers = range(rank // (ranks // processes), stages, processes)
    return numbers_of([Stage.of(number, (1,) * stages) for number in numbers])


def roles(config: Config, ranks: int) -> tuple[str, ...]:
    """Return the role of each rank for messages: its stage, its copy of the state, and its part of
    the matrices or its experts; () if all ranks have the same role.

    Raises:
        ConfigError: as in `shards`.
    """
    names = []
    for rank in range(ranks):
        group, part = group_of(config, ranks, rank), part_of(config, rank)
        names.append(", ".join(filter(None, (_stage_of(config, ranks, rank), group, part))))
    return tuple(names) if any(names) else ()


def shared(config: Config, ranks: int) -> Config:
    """Return the job of one of `ranks` ranks: the same steps with the same tokens, divided.

    A rank gets fewer microbatches, or smaller ones if the number is not divisible. Ranks of
    different stages and of different parts of matrices get the same microbatches.

    Raises:
        ConfigError: if the sequences of a step are not divisible by the ranks, or the ranks by the
            stages, or there are fewer microbatches than stages.
    """
    train, ranks = config.train, replicas(config, ranks)
    sequences = train.micro_batch * train.grad_accum_steps
    per_rank, rest = divmod(sequences, ranks)
    if rest:
        fitting = next(n for n in range(ranks - 1, 0, -1) if sequences % n == 0)
        raise ConfigError(
            f"a step has {sequences} sequences (train.micro_batch = {train.micro_batch} x "
            f"train.grad_accum_steps = {train.grad_accum_steps}), which {ranks} ranks cannot share "
            f"evenly: take {fitting}, or a batch that {ranks} divides"
        )
    # All schedules except GPipe need a microbatch for each rank of the pipeline.
    schedule = config.ranks.schedule
    least = 1 if schedule == "gpipe" else config.ranks.pipeline
    sizes = range(min(train.micro_batch, per_rank // least), 0, -1)
    micro = next((n for n in sizes if per_rank % n == 0 and _rounds(config, per_rank // n)), 0)
    if not micro and per_rank >= least:
        raise ConfigError(
            f"{per_rank} sequences per step on each rank, and ranks.pipeline = {least}: "
            "interleaved runs microbatches in rounds of as many as there are ranks. Set "
            f"train.grad_accum_steps to a multiple of {least}"
        )
    if not micro:
        raise ConfigError(
            f"{per_rank} sequences per step on each rank, and ranks.pipeline = "
            f"{config.ranks.pipeline}: {schedule} needs a microbatch for each stage. Raise "
            'train.grad_accum_steps, or set ranks.schedule = "gpipe"'
        )
    windows = train.eval_batches * train.micro_batch
    part = replace(
        train,
        micro_batch=micro,
        grad_accum_steps=per_rank // micro,
        global_batch_tokens=0,
        eval_batches=max(1, windows // (micro * ranks)),
    )
    return replace(config, train=part)


def _rounds(config: Config, microbatches: int) -> bool:
    """Return True if "interleaved" can divide the microbatches into rounds."""
    rounds = max(1, microbatches // config.ranks.pipeline)
    return config.ranks.schedule != INTERLEAVED or microbatches % rounds == 0


def explain(job: Config, part: Config, ranks: int) -> str:
    """Return a sentence that describes the split."""
    before, after = job.train, part.train
    stages, parts, processes = job.ranks.stages, job.ranks.tensor, job.ranks.pipeline
    size, experts, groups = shards(job, ranks), job.ranks.expert, ranks // parts
    each = "one rank" if ranks == processes else f"{ranks // processes} ranks"
    who = f"{ranks} ranks" if stages == 1 else f"{stages} stages of {each} each"
    if stages > processes:
        who = f"{ranks} ranks" if ranks == processes else f"{processes} groups of {each}"
        who += f" with {stages // processes} of {stages} stages each"
    who += "" if job.ranks.flushes else f" ({job.ranks.schedule}: no flush between steps)"
    if parts > 1 and stages > 1:
        who += f", every {parts} of which divide its matrices (tensor parallel),"
    elif parts > 1:
        who = f"{groups} group{'s' if groups > 1 else ''} of {parts} ranks (tensor parallel)"
    who += (
        "" if size == replicas(job, ranks) else f", every {size} of which hold a copy of the state,"
    )
    who += f", every {experts} of which hold all experts," if experts > 1 else ""
    verb = "shares" if ranks == parts and stages == 1 else "share"
    return (
        f"{who} {verb} {before.micro_batch * before.grad_accum_steps} sequences per step: "
        f"train.micro_batch {before.micro_batch} -> {after.micro_batch}, "
        f"train.grad_accum_steps {before.grad_accum_steps} -> {after.grad_accum_steps} each"
    )
