"""The question that people ask: can this size of model be fine-tuned on this machine, and how?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import log

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import SIZES, ModelShape, num_params
from offloadtrain.config.sections import DataConfig, TrainConfig
from offloadtrain.config.units import format_count
from offloadtrain.plan.search.suggest import Change

STEP_TOKENS, SEQ_LEN = 32768, 2048
"""Tokens of a step and of a sequence: usual for fine-tuning."""

NEAR = 0.2
"""A named size stands for a number of parameters that is so close to its own."""

_UNITS = {"M": 1e6, "B": 1e9}


def sized(text: str) -> str:
    """Return the named size that is closest to a number of parameters, such as 8B; Llama's first.

    Raises:
        ConfigError: no number, or no size is near.
    """
    if text.lower() in SIZES:
        return text.lower()
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([MB])", text.strip().upper())
    if match is None or not float(match[1]):
        raise ConfigError(f"--fine-tune {text[:40]}: give parameters such as 8B or 350M")
    count = float(match[1]) * _UNITS[match[2]]

    def distance(name: str) -> float:
        return abs(log(num_params(SIZES[name]) / count))

    for family in ("llama", ""):
        name = min((size for size in SIZES if size.startswith(family)), key=distance)
        if distance(name) < NEAR:
            return name
    known = ", ".join(f"{name} ({format_count(num_params(SIZES[name]))})" for name in SIZES)
    raise ConfigError(f"--fine-tune {text[:40]}: no shape near it is known. Known: {known}")


def job_of(model: str, shape: ModelShape, ranks: int = 1) -> Config:
    """Return the fine-tuning of a model, in one microbatch per rank."""
    length = min(SEQ_LEN, shape.max_seq_len)
    sequences = -(-STEP_TOKENS // (length * ranks)) * ranks
    return Config(
        name=f"fine-tune {model}",
        model=shape,
        data=DataConfig(train="-", seq_len=length),
        train=TrainConfig(steps=1, micro_batch=sequences, global_batch_tokens=sequences * length),
    )


def verdict(job: Config, size: str, placements: Sequence[Change], size_text: str) -> str:
    """Answer in one line."""
    model = f"{size_text} ({size}, {format_count(job.num_params)} parameters)"
    if not placements:
        return f"No: {model} does not fit with {format_count(job.batch_tokens)} tokens per step."
    best = placements[0]
    rate = format_count(best.plan.prediction.tokens_per_s)
    return f"Yes: {model} trains at {rate} tokens/s: {best.text}"
