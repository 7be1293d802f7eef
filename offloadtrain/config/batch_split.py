"""The split of a job's global batch over ranks, and of its layers over the stages of a pipeline.

A step uses the same samples on any number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import Stage

MOST_RANKS = 1 << 16


def parse_ranks(flag: str, text: str) -> int:
    """Parse a number of ranks from the command line.

    Raises:
        ConfigError: not a number, or out of range.
    """
    if len(text) > 9 or not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_RANKS:
        raise ConfigError(
            f"{flag} {text[:40]}: give a number of at least 1 and at most {MOST_RANKS}"
        )
    return int(text)


def replicas(config: Config, ranks: int) -> int:
    """Return how many ranks divide the batch: those of one stage of the pipeline.

    Raises:
        ConfigError: the ranks cannot be divided into the stages.
    """
    count, rest = divmod(ranks, config.ranks.pipeline)
    if rest or not count:
        raise ConfigError(
            f"ranks.pipeline = {config.ranks.pipeline} and {ranks} ranks: each stage needs as many "
            f"ranks as the others. Start a multiple of {config.ranks.pipeline} (--nproc), or set "
            "ranks.pipeline = 1"
        )
    return count


def of_stage(config: Config, index: int) -> Config:
    """Return the part of a job that is one stage of its pipeline: a model of fewer layers."""
    stage = Stage.of(index, config.ranks.pipeline, config.model.num_layers)
    return replace(config, stage=stage, model=replace(config.model, num_layers=stage.layers))


def roles(config: Config, ranks: int) -> tuple[str, ...]:
    """Return what each rank is in the pipeline, for messages; nothing without one."""
    stages = config.ranks.pipeline
    if stages == 1:
        return ()
    each = replicas(config, ranks)
    return tuple(Stage.of(rank // each, stages, stages).number for rank in range(ranks))


def shared(config: Config, ranks: int) -> Config:
    """Return the job of one of `ranks` ranks: the same steps of the same tokens, divided.

    A rank gets fewer microbatches, or smaller ones if the number is not divisible. The ranks of
    different stages of a pipeline get the same ones.

    Raises:
        ConfigError: the sequences of a step are not divisible by the ranks, or the ranks by the
            stages; or there are fewer microbatches than stages.
    """
    train, ranks = config.train, replicas(config, ranks)
    sequences = train.micro_batch * train.grad_accum_steps
    own, rest = divmod(sequences, ranks)
    if rest:
        fitting = next(n for n in range(ranks - 1, 0, -1) if sequences % n == 0)
        raise ConfigError(
            f"a step has {sequences} sequences (train.micro_batch = {train.micro_batch} x "
            f"train.grad_accum_steps = {train.grad_accum_steps}), which {ranks} ranks cannot share "
            f"evenly: take {fitting}, or a batch that {ranks} divides"
        )
    # 1F1B needs a microbatch for each stage.
    least = config.ranks.pipeline if config.ranks.schedule == "1f1b" else 1
    sizes = range(min(train.micro_batch, own // least), 0, -1)
    micro = next((n for n in sizes if own % n == 0), 0)
    if not micro:
        raise ConfigError(
            f"{own} sequences per step on each rank, and ranks.pipeline = {config.ranks.pipeline}: "
            "1f1b needs a microbatch for each stage. Raise train.grad_accum_steps, or set "
            'ranks.schedule = "gpipe"'
        )
    windows = train.eval_batches * train.micro_batch
    part = replace(
        train,
        micro_batch=micro,
        grad_accum_steps=own // micro,
        global_batch_tokens=0,
        eval_batches=max(1, windows // (micro * ranks)),
    )
    return replace(config, train=part)


def explain(job: Config, part: Config, ranks: int) -> str:
    """Return a sentence that describes the split."""
    before, after = job.train, part.train
    stages = job.ranks.pipeline
    each = "one rank" if ranks == stages else f"{ranks // stages} ranks"
    who = f"{ranks} ranks" if stages == 1 else f"{stages} stages of {each} each"
    return (
        f"{who} share {before.micro_batch * before.grad_accum_steps} sequences per step: "
        f"train.micro_batch {before.micro_batch} -> {after.micro_batch}, "
        f"train.grad_accum_steps {before.grad_accum_steps} -> {after.grad_accum_steps} each"
    )
