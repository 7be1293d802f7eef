"""Every random state of a run, as plain JSON, so that a resumed run draws the same numbers."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators (torch's on every device)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of all global generators, as they come: taken in every step."""

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


def snapshot() -> Snapshot:
    """Read all states; those of GPUs are kept on the host, too."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return Snapshot(
        random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), cuda
    )


def capture() -> dict[str, Any]:
    """Return the states of all global generators."""
    return snapshot().as_json


def restore(state: dict[str, Any]) -> None:
    """Set all global generators; with fewer or more GPUs than saved, those that both have."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_bytes(keys), np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    for index, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_tensor(text), index)


def check(state: Any) -> None:
    """Check that `restore` would take it; no generator is changed.

    Raises:
        ValueError: it would not.
    """
    try:
        version, words, gauss = state["python"]
        random.Random().setstate((version, tuple(words), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.RandomState().set_state((kind, np.frombuffer(_bytes(keys), np.uint32), *rest))
        torch.Generator().set_state(_tensor(state["torch"]))
        for text in state["cuda"]:
            _tensor(text)
    # Each of the generators has its own errors.
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"no state of random numbers: {error}") from error


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
