"""The state of a run beside the tensors of a checkpoint: checked before anything relies on it.

Its hash says that it is as it was written, not who wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.manifest import STATE, DamagedCheckpointError
from offloadtrain.train.saved import rng

_MOST = 1 << 53
"""Counts that a double holds exactly."""

Check = Callable[[Any], bool]


def require_run_state(found: Checkpoint) -> None:
    """Check that the state is one that a run has saved.

    Raises:
        DamagedCheckpointError: a value is missing, or is not what it should be.
    """
    state = found.state
    lacking = [key for key in _CHECKS if key not in state and key not in _OPTIONAL]
    wrong = lacking or [key for key, check in _CHECKS.items() if not check(state.get(key))]
    wrong += [] if wrong or _is_of_step(found) else ["progress"]
    if wrong:
        raise DamagedCheckpointError(
            f"{found.path / STATE} is no state of a run: '{wrong[0]}' is missing, or is not what a "
            "run saves there"
        )


def _is_of_step(checkpoint: Checkpoint) -> bool:
    state = checkpoint.state
    return bool(checkpoint.step == state["progress"]["step"] == state["optimizer"]["step"])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _has(**checks: Check) -> Check:
    """A table with at least these keys."""
    return lambda value: (
        isinstance(value, dict) and all(check(value.get(key)) for key, check in checks.items())
    )


def _is_progress(value: Any) -> bool:
    counts = ("step", "tokens", "skipped", "skipped_in_a_row")
    numbers = {"seconds": _is_number, "val_loss": _or_none(_is_number)}
    checks = dict.fromkeys(counts, _is_count) | numbers
    return _has(**checks)(value) and value.keys() == checks.keys()


def _is_config(value: Any) -> bool:
    return _has(offload=_is_table)(value) and "clip_norm" in value["offload"]


def _is_random(value: Any) -> bool:
    try:
        for state in value:
            rng.check(state)
    except (TypeError, ValueError):
        return False
    return isinstance(value, list) and bool(value)


def _are_expert_steps(value: Any) -> bool:
    return _is_table(value) and all(_list_of(_is_count)(steps) for steps in value.values())


_OPTIONAL = ("threads", "held_out")
_COUNTS = ("growth_interval", "good_steps", "tolerated")
_scaler = _has(scale=_is_number, **dict.fromkeys(_COUNTS, _is_count))
_WAITING = ("waiting_scale", "waiting_overflow")
_CHECKS: Mapping[str, Check] = {
    "optimizer": lambda value: (
        _has(step=_is_count, scaler=_or_none(_scaler))(value)
        and value.keys() <= {"step", "scaler", "expert_steps"}
        and all(_is_number((value["scaler"] or {}).get(key, 0.0)) for key in _WAITING)
        and _are_expert_steps(value.get("expert_steps", {}))
    ),
    "progress": _is_progress,
    "data": lambda value: (
        _has(seed=_is_number, epoch=_is_count, sample=_is_count)(value)
        and _is_table(value.get("data", {}))
    ),
    "spikes": _has(
        losses=_list_of(_is_number),
        rollbacks=_list_of(lambda pair: _list_of(_is_count)(pair) and len(pair) == 2),
    ),
    "held_out": _or_none(_is_text),
    "tokenizer": _is_text,
    "tokenizer_name": _is_text,
    "rng": _is_random,
    "precision": lambda value: _is_text(value) and value in PRECISIONS,
    "threads": _or_none(_is_count),
    "config": _is_config,
    "hf_config": _or_none(_is_table),
}
