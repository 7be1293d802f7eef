"""Answers the question whether, and how, a model can be fine-tuned on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from offloadtrain.config import job as jobs
from offloadtrain.config import toml
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import SIZES, ModelShape, num_params
from offloadtrain.config.sections import DataConfig, TrainConfig
from offloadtrain.config.units import format_bytes, format_count, parse_count
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.run_cost import steps_for
from offloadtrain.plan.search.suggest import (
    ALL,
    Change,
    nearest,
    of_each_placement,
    text_of,
    value_of,
)

STEP_TOKENS, SEQ_LEN = 32768, 2048
"""Tokens of a step and of a sequence; usual values for fine-tuning."""

SHOWN = 6
"""Number of settings that an answer shows, including the best."""

LEAST = 1e6
"""Fewest parameters for which a size names a model."""

NEAR = 0.2
"""Largest |log ratio| between a requested number of parameters and that of a named size."""

DECIDED = ("offload.working", "offload.activation", "offload.state", "train.micro_batch")
"""Keys that an answer always states."""

_JOB = """
name = "fine-tune"
[model]
{key} = {model}
[data]
train = "data/train.bin"
seq_len = {seq_len}
[optim]
lr = 1e-5
[offload]
activation = "recompute"
[train]
steps = 1000
micro_batch = {micro_batch}
global_batch_tokens = {tokens}
"""


@dataclass(frozen=True)
class Question:
    """A model to fine-tune, as a job.

    Attributes:
        label: name of the model.
        text: the job before `overrides`, as TOML, with a complete step in one microbatch.
        overrides: `section.key=value` texts; the search leaves these keys alone.
        job: the job with `overrides`.
    """

    label: str
    text: str
    overrides: tuple[str, ...]
    job: Config


@dataclass(frozen=True)
class Answer:
    """The result of a search.

    Attributes:
        as_asked: the plan of the question's job, with a complete step in one microbatch.
        fits: the job's tokens per step fit with some settings.
        changes: placements that fit, fastest first; if none does, changes that fit with fewer
            tokens or shorter sequences, or the single change that lacks the least memory.
        best: the plan of the first change.
        keys: the settings of the best plan.
        line: the answer in one line.
        job_text: the best plan's job file; empty if nothing fits.
    """

    as_asked: Plan
    fits: bool
    changes: Sequence[Change]
    best: Plan
    keys: Mapping[str, Any]
    line: str
    job_text: str

    def shown(self, *, as_json: bool) -> tuple[Plan, Sequence[Change]]:
        """Return the plan to report, and other changes. If the job does not fit, JSON reports the
        plan of the question, and text the nearest plan that fits."""
        if self.fits or (self.best.fits and not as_json):
            return self.best, self.changes[1:SHOWN]
        return self.as_asked, self.changes


def asked(
    label: str,
    key: str,
    model: str,
    overrides: Sequence[str],
    ranks: int,
    say: Callable[[str], Any],
) -> Question:
    """Return the job that asks whether a model can be fine-tuned.

    Args:
        key: key of the model in [model]: "hf" or "size".
        overrides: `section.key=value` texts.
        say: as in `jobs.load`.

    Raises:
        ConfigError: as in `jobs.loads`.
    """
    overrides, fixed = tuple(overrides), _keys_of(overrides)

    def job_text(seq_len: int, micro_batch: int, tokens: int) -> str:
        return _JOB.format(
            key=key,
            model=toml.text_of(model),
            seq_len=seq_len,
            micro_batch=micro_batch,
            tokens=tokens,
        )

    # A first load gives the model's longest sequence and the values of the overrides.
    origin = f"--{'hf' if key == 'hf' else 'fine-tune'}"
    probe = jobs.loads(job_text(2, 1, 0), origin, overrides, lambda line: None)
    length = probe.data.seq_len
    if "data.seq_len" not in fixed:
        length = min(SEQ_LEN, probe.model.max_seq_len)
    sequences = max(1, (probe.train.global_batch_tokens or STEP_TOKENS) // length)
    if "train.global_batch_tokens" not in fixed:
        sequences = -(-sequences // ranks) * ranks
    if "train.grad_accum_steps" in fixed:
        sequences = max(1, sequences // probe.train.grad_accum_steps)
    tokens = sequences * length
    text = job_text(length, sequences, tokens)
    return Question(label, text, overrides, jobs.loads(text, origin, overrides, say))


def answer(
    question: Question,
    name: str,
    machine: Machine,
    ranks: int,
    trace: Trace | None,
    tokens: int = 0,
    most: int = SHOWN,
) -> Answer:
    """Search placements, formats and microbatches for a question with a described model.

    Args:
        tokens: tokens of the run; 0: those of the job's steps.
        most: as in `of_each_placement`.

    Raises:
        OffloadTrainError: the job cannot be planned on this machine.
    """
    job, fixed = question.job, _keys_of(question.overrides)
    free = [key for key in ALL if not {key, key.partition(".")[0]} & fixed]
    changes = of_each_placement(job, name, machine, ranks, free, trace, most=most)
    as_asked, fits = make(job, name, machine, ranks, trace), bool(changes)
    if not fits:
        all_tried = len(free) == len(ALL)
        changes = nearest(job, name, machine, ranks, trace=trace, with_fewer_tokens=all_tried)
    changes = changes or [Change({}, as_asked)]
    best = changes[0].plan
    keys = {key: value_of(best.job, key) for key in DECIDED} | changes[0].keys
    model = f"{question.label} ({format_count(job.num_params)} parameters)"
    rate = f"{format_count(best.prediction.tokens_per_s)} tokens/s"
    no = f"No: {model} does not fit on {name} with {format_count(job.batch_tokens)} tokens per step"
    if fits:
        line = f"Yes, with {text_of(keys)}: {rate}. {model} on {name}"
    elif best.fits:
        line = f"{no}, the nearest that fits is {text_of(keys)}: {rate}"
    else:
        line = f"{no}, nothing fits; {text_of(keys)} lacks {format_bytes(best.missing_bytes)}"
    of_run = {"train.steps": steps_for(best.job, tokens)} if tokens else {}
    text = f"# {line}\n{_job_text(question, {**keys, **of_run})}" if best.fits else ""
    return Answer(as_asked, fits, changes, best, keys, line, text)


def _job_text(question: Question, keys: Mapping[str, Any]) -> str:
    """Return the question's job with these keys changed, as TOML."""
    job = toml.parse(question.text, question.label, (), question.overrides)
    list(jobs.drop_overruled_keys(job))
    for dotted, value in keys.items():
        section, key = dotted.split(".")
        job.tables[section][key] = value
    return toml.emit(job.tables)


def _keys_of(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def sized(text: str) -> str:
    """Return the named size closest to a number of parameters, such as 8B; Llama sizes come first.

    Raises:
        ConfigError: the text is not a number, or no size is near it.
    """
    if text.lower() in SIZES:
        return text.lower()
    try:
        count = parse_count(text)
    except ValueError:
        count = 0.0
    if count < LEAST:
        raise ConfigError(f"--fine-tune {text[:40]}: give parameters such as 8B or 350M")

    def distance(name: str) -> float:
        return abs(log(num_params(SIZES[name]) / count))

    for family in ("llama", ""):
        name = min((size for size in SIZES if size.startswith(family)), key=distance)
        if distance(name) < NEAR:
            return name
    known = ", ".join(f"{name} ({format_count(num_params(SIZES[name]))})" for name in SIZES)
    raise ConfigError(f"--fine-tune {text[:40]}: no shape near it is known. Known: {known}")


def job_of(model: str, shape: ModelShape, ranks: int = 1) -> Config:
    """Return a fine-tuning job of a model with one microbatch per rank and step."""
    length = min(SEQ_LEN, shape.max_seq_len)
    sequences = -(-STEP_TOKENS // (length * ranks)) * ranks
    return Config(
        name=f"fine-tune {model}",
        model=shape,
        data=DataConfig(train="-", seq_len=length),
        train=TrainConfig(steps=1, micro_batch=sequences, global_batch_tokens=sequences * length),
    )
