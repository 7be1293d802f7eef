"""The range of every key of a job but those of [model] and [offload], which check their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias

from offloadtrain.config import command_hooks, toml
from offloadtrain.config.units import parse_bytes

_Rule: TypeAlias = tuple[Callable[[Any], object], str]
"""Whether a value holds, and the words for what is allowed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _at_least(least: int) -> _Rule:
    return (lambda value: value >= least), f"at least {least}"


_POSITIVE: _Rule = (lambda value: value > 0), "above 0"
_NOT_NEGATIVE: _Rule = (lambda value: value >= 0), "0 or more"
_SHARE: _Rule = (lambda value: 0 <= value <= 1), "from 0 to 1"
_PATH: _Rule = (lambda value: value and value.isprintable()), "a path: not empty, printable"
_PATH_OR_NONE: _Rule = (lambda value: not value or value.isprintable()), "a printable path"


def _is_size(text: str) -> bool:
    try:
        return not text or parse_bytes(text) > 0
    except ValueError:
        return False


_COMMAND: _Rule = (command_hooks.is_command, "a program and its arguments, printable; or empty")
_SIZE: _Rule = (_is_size, 'a size such as "10 GiB", or empty for none')

RULES: dict[str, _Rule] = {
    "name": (
        _NAME.fullmatch,
        "1 to 64 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit",
    ),
    "runs_dir": _PATH,
    "data.source": _PATH_OR_NONE,
    "data.tokenizer": _PATH_OR_NONE,
    "data.field": ((lambda value: value and value.isprintable()), "a name: not empty, printable"),
    "data.chat_template": _PATH_OR_NONE,
    "data.train": _PATH_OR_NONE,
    "data.val": _PATH_OR_NONE,
    "data.cache": _PATH,
    "data.val_fraction": ((lambda value: 0 <= value < 1), "from 0 to below 1"),
    "data.seq_len": _at_least(2),
    "optim.lr": _POSITIVE,
    "optim.betas": ((lambda value: all(0 <= beta < 1 for beta in value)), "each from 0 to below 1"),
    "optim.eps": _POSITIVE,
    "optim.momentum": _NOT_NEGATIVE,
    "optim.dampening": ((lambda value: value <= 1), "at most 1"),
    "optim.lr_decay": _NOT_NEGATIVE,
    "optim.max_norm": _NOT_NEGATIVE,
    "optim.muon_momentum": _SHARE,
    "optim.adamw_lr": _POSITIVE,
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.warmup_steps": _NOT_NEGATIVE,
    "optim.min_lr_ratio": _SHARE,
    "device.threads": ((lambda value: 0 <= value <= 4096), "0 (as torch chooses) to 4096"),
    "device.process_memory_limit": _SIZE,
    "device.machine": _PATH_OR_NONE,
    "ranks.pipeline": _at_least(1),
    "ranks.stages_per_rank": _at_least(1),
    "ranks.tensor": _at_least(1),
    "ranks.expert": _at_least(1),
    "ranks.shard": (
        (lambda value: value == 0 or value >= 2),
        "0 (all ranks share the state) or at least 2",
    ),
    "train.steps": _at_least(1),
    "train.micro_batch": _at_least(1),
    "train.global_batch_tokens": _NOT_NEGATIVE,
    "train.label_smoothing": ((lambda value: 0 <= value < 1), "from 0 to below 1"),
    "train.z_loss": _NOT_NEGATIVE,
    "train.eval_every": ((lambda value: value >= 0), "0 (never) or more"),
    "train.eval_batches": _at_least(1),
    "train.checkpoint_every": ((lambda value: value >= 0), "0 (never) or more"),
    "train.keep_every": ((lambda value: value >= 0), "0 (none) or more"),
    "train.checkpoint_spill": _NOT_NEGATIVE,
    "train.keep_last": ((lambda value: value >= 2), "at least 2 (the newest may be damaged)"),
    "train.spike_score": _POSITIVE,
    "train.max_rollbacks": _at_least(1),
    "train.log_every_s": _POSITIVE,
    "train.hang_timeout_s": _NOT_NEGATIVE,
    "train.sample_tokens": _NOT_NEGATIVE,
    "train.on_alert": _COMMAND,
    "train.on_end": _COMMAND,
    "train.seed": _NOT_NEGATIVE,
}


def out_of_range(job: object) -> Iterator[str]:
    """Yield a sentence for each value of a `Config` that is out of its range."""
    for key, (holds, allowed) in RULES.items():
        value = attrgetter(key)(job)
        if not holds(value):
            yield f"{key} = {toml.shown(value)} must be {allowed}"
