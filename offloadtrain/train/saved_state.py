"""The state of a run other than tensors: random states, and validation of a saved state.

A hash shows that the state is unchanged, not who wrote it, so every value is checked before it is
used. Random states are plain JSON, so that a resumed run draws the same numbers.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.manifest import STATE, DamagedCheckpointError

_MOST = 1 << 53
"""Upper limit on counts: integers below it are exact as doubles."""

Check = Callable[[Any], bool]


def require_run_state(checkpoint: Checkpoint) -> None:
    """Check that the state has the form of a run's state.

    Raises:
        DamagedCheckpointError: a value is missing, or has a wrong type or range.
    """
    state = checkpoint.state
    lacking = [key for key in _CHECKS if key not in state and key not in _OPTIONAL]
    wrong = lacking or [key for key, check in _CHECKS.items() if not check(state.get(key))]
    if not wrong and not (
        checkpoint.step == state["progress"]["step"] == state["optimizer"]["step"]
    ):
        wrong = ["progress"]
    if wrong:
        raise DamagedCheckpointError(
            f"{checkpoint.path / STATE} is no state of a run: '{wrong[0]}' is missing, or is not "
            "what a run saves there"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _has(**checks: Check) -> Check:
    """Return a check for a table with at least these keys."""
    return lambda value: (
        isinstance(value, dict) and all(check(value.get(key)) for key, check in checks.items())
    )


def _is_progress(value: Any) -> bool:
    counts = ("step", "tokens", "skipped", "skipped_in_a_row")
    numbers = {"seconds": _is_number, "val_loss": _or_none(_is_number)}
    checks = dict.fromkeys(counts, _is_count) | numbers
    return _has(**checks)(value) and value.keys() == checks.keys()


def _is_random(value: Any) -> bool:
    try:
        for state in value:
            check_random_states(state)
    except (TypeError, ValueError):
        return False
    return isinstance(value, list) and bool(value)


_OPTIONAL = ("threads", "held_out", "update")
_COUNTS = ("growth_interval", "good_steps", "tolerated")
_scaler = _has(scale=_is_number, **dict.fromkeys(_COUNTS, _is_count))
_WAITING = ("waiting_scale", "waiting_overflow")
_CHECKS: Mapping[str, Check] = {
    "optimizer": lambda value: (
        _has(step=_is_count, scaler=_or_none(_scaler))(value)
        and value.keys() <= {"step", "scaler", "expert_steps"}
        and all(_is_number((value["scaler"] or {}).get(key, 0.0)) for key in _WAITING)
        and _is(dict)(steps := value.get("expert_steps", {}))
        and all(map(_list_of(_is_count), steps.values()))
    ),
    "progress": _is_progress,
    "data": lambda value: (
        _has(seed=_is_number, epoch=_is_count, sample=_is_count)(value)
        and _is(dict)(value.get("data", {}))
    ),
    "spikes": _has(
        losses=_list_of(_is_number),
        rollbacks=_list_of(lambda pair: _list_of(_is_count)(pair) and len(pair) == 2),
    ),
    "update": lambda value: value in (None, "exact", "speculative"),
    "held_out": _or_none(_is(str)),
    "tokenizer": _is(str),
    "tokenizer_name": _is(str),
    "rng": _is_random,
    "precision": lambda value: _is(str)(value) and value in PRECISIONS,
    "threads": _or_none(_is_count),
    "config": lambda value: _has(offload=_is(dict))(value) and "clip_norm" in value["offload"],
    "hf_config": _or_none(_is(dict)),
}


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (torch's on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of all global generators, unconverted, since every step records them."""

    python: tuple[Any, ...]
    numpy: Any
    host: torch.Tensor
    cuda: list[torch.Tensor]

    @property
    def as_json(self) -> dict[str, Any]:
        version, words, gauss = self.python
        kind, words_32, position, has_gauss, cached = self.numpy
        keys = np.asarray(words_32, np.uint32)
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, _text(keys.tobytes()), int(position), int(has_gauss), float(cached)],
            "torch": _text(bytes(self.host.tolist())),
            "cuda": [_text(bytes(state.tolist())) for state in self.cuda],
        }


def random_states() -> RandomStates:
    """Read the states of all global generators; those of GPUs are copied to the host."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RandomStates(
        random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), cuda
    )


def restore_random_states(state: dict[str, Any]) -> None:
    """Set all global generators; if the number of GPUs differs, only the GPUs that both have."""
    states = _of_json(state)
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.set_rng_state(states.host)
    for index, cuda_state in enumerate(states.cuda[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, index)


def check_random_states(state: Any) -> None:
    """Check that `restore_random_states` would accept it; changes no generator.

    Raises:
        ValueError: it would not be accepted.
    """
    try:
        states = _of_json(state)
        random.Random().setstate(states.python)
        np.random.RandomState().set_state(states.numpy)
        torch.Generator().set_state(states.host)
    # Each generator raises its own kinds of errors.
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"no state of random numbers: {error}") from error


def _of_json(state: dict[str, Any]) -> RandomStates:
    version, words, gauss = state["python"]
    kind, keys, *rest = state["numpy"]
    words_32 = np.frombuffer(base64.b64decode(keys), np.uint32)
    cuda = [_tensor(text) for text in state["cuda"]]
    numpy_state = (kind, words_32, *rest)
    return RandomStates((version, tuple(words), gauss), numpy_state, _tensor(state["torch"]), cuda)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
