"""The split of a job's global batch over ranks: a step uses the same samples on any number."""

from __future__ import annotations

from dataclasses import replace

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config

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


def shared(config: Config, ranks: int) -> Config:
    """Return the job of one of `ranks` ranks: the same steps of the same tokens, divided.

    A rank gets fewer microbatches, or smaller ones if the number is not divisible.

    Raises:
        ConfigError: the sequences of a step are not divisible by the ranks.
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
    """Return a sentence that describes the split."""
    before, after = job.train, part.train
    return (
        f"{ranks} ranks share {before.micro_batch * before.grad_accum_steps} sequences per step: "
        f"train.micro_batch {before.micro_batch} -> {after.micro_batch}, "
        f"train.grad_accum_steps {before.grad_accum_steps} -> {after.grad_accum_steps} each"
    )
