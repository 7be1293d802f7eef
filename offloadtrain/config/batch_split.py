"""A job's global batch, dealt out to ranks: what a step learns from does not depend on how many."""

from __future__ import annotations

from dataclasses import replace

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config

MOST_RANKS = 1 << 16


def parse_ranks(flag: str, text: str) -> int:
    """How many ranks an argument of the command line asks for.

    Raises:
        ConfigError: no number, or none that a job could have.
    """
    if len(text) > 9 or not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_RANKS:
        raise ConfigError(
            f"{flag} {text[:40]}: give a number of at least 1 and at most {MOST_RANKS}"
        )
    return int(text)


def shared(config: Config, ranks: int) -> Config:
    """The job of one of so many ranks: the same steps of the same tokens, each rank its part.

    A rank has fewer microbatches; where they do not divide, smaller ones.

    Raises:
        ConfigError: if the sequences of a step cannot be dealt out evenly.
    """
    train = config.train
    sequences = train.micro_batch * train.grad_accum_steps
    own, rest = divmod(sequences, ranks)
    if rest:
        fitting = next(n for n in range(ranks - 1, 0, -1) if sequences % n == 0)
        raise ConfigError(
            f"a step has {sequences} sequences (train.micro_batch = {train.micro_batch} x "
            f"train.grad_accum_steps = {train.grad_accum_steps}), which {ranks} ranks cannot share "
            f"evenly: take {fitting}, or a batch that {ranks} divides"
        )
    micro = next(n for n in range(min(train.micro_batch, own), 0, -1) if own % n == 0)
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
    """A sentence on what became of the batch."""
    before, after = job.train, part.train
    return (
        f"{ranks} ranks share {before.micro_batch * before.grad_accum_steps} sequences per step: "
        f"train.micro_batch {before.micro_batch} -> {after.micro_batch}, "
        f"train.grad_accum_steps {before.grad_accum_steps} -> {after.grad_accum_steps} each"
    )
