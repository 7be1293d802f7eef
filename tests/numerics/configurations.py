"""Configurations of a run: any value of each axis, as far as `offload` takes them together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.step.layout import step_spec
from tests.numerics.models import MODELS

UPDATES: dict[str, dict[str, Any]] = {
    "exact": {},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative"},
    "delayed": {"update": "delayed", "warmup_steps": 1},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident weights": {},
    "1 slot": {"working": "host", "device_slots": 1},
    "partly streamed": {"working": "host", "resident_blocks": 1},
    "state on the device": {"state_on": "device"},
    "half of the state on the device": {"state_on": {"device": 0.5}},
}
DISK_PLACEMENTS: dict[str, dict[str, Any]] = {
    "state on the disk": {"state_on": "disk"},
    "weights on the disk": {"working": "disk", "state_on": "host"},
    "all on the disk": {"state_on": "disk", "grad_on": "disk", "working": "disk"},
    "three tiers": {
        "state_on": {"device": 0.3, "disk": 0.4},
        "working": "disk",
        "resident_blocks": 2,
    },
}
SUMS: dict[str, dict[str, Any]] = {
    "on the host": {},
    "on the device": {"sums_on": "device"},
    "rounded": {"sums_on": "device", "sums_down": "working"},
    "on both": {"sums_on": {"device": 0.4}},
}
FORMATS = ("fp32/bf16", "fp32/fp32", "fp32/fp16", "split16/bf16", "int8/bf16", "int8/fp16")
AXES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "format": FORMATS,
    "update": tuple(UPDATES),
    "placement": (*PLACEMENTS, *DISK_PLACEMENTS),
    "activation": ("keep", "recompute", "selective", "offload", "offload_saved"),
    "accum": (1, 2, 3),
    "clip": (None, 0.3, 1e9),
    "clips": ((), (0.5, 0.2)),
    "sums": tuple(SUMS),
    "explicit": (True, False),
    "staging": (None, 1000),
}


@dataclass(frozen=True)
class Configuration:
    """One value of each axis.

    Attributes:
        format: of the state, and the precision.
        clips: norms of calls of `clip_grad_norm_`.
        explicit: backward by `optimizer.backward(loss)`, not by `loss.backward()`.
        staging: bytes of a staging slot; None: as many as the largest bucket has.
    """

    model: str
    format: str
    update: str
    placement: str
    activation: str
    accum: int
    clip: float | None
    clips: tuple[float, ...]
    sums: str
    explicit: bool
    staging: int | None

    def __str__(self) -> str:
        return ", ".join(str(getattr(self, field.name)) for field in fields(self))

    @property
    def precision(self) -> str:
        return self.format.partition("/")[2]

    @property
    def uses_disk(self) -> bool:
        return self.placement in DISK_PLACEMENTS

    @property
    def options(self) -> dict[str, Any]:
        """Options of `offload`, without `clip_norm` and `grad_accum_steps`."""
        state = {"state": self.format.partition("/")[0], "activation": self.activation}
        placement = (PLACEMENTS | DISK_PLACEMENTS)[self.placement]
        return state | UPDATES[self.update] | placement | SUMS[self.sums]

    @property
    def is_valid(self) -> bool:
        if self.clips and self.update == "early":  # its gradients are gone before they are clipped
            return False
        if self.precision == "fp16" and not self.explicit:  # the loss must be scaled
            return False
        options = {"precision": self.precision, "clip_norm": self.clip, **self.options}
        if self.uses_disk:
            options |= {"scratch_dir": "somewhere"}
        config = OffloadConfig(grad_accum_steps=self.accum, **options)
        return not list(config.problems())


@contextmanager
def placed(configuration: Configuration, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield options of `offload` for a run inside of the context."""
    options = configuration.options
    if configuration.uses_disk:
        options |= {"scratch_dir": str(folder), "scratch_in_memory": True}
    with pytest.MonkeyPatch.context() as patch:
        if configuration.staging is not None:
            patch.setattr(step_spec, "STAGING_BYTES", configuration.staging)
        yield options


def any_valid() -> st.SearchStrategy[Configuration]:
    axes = {name: st.sampled_from(axis) for name, axis in AXES.items()}
    return st.builds(Configuration, **axes).filter(lambda configuration: configuration.is_valid)


def covering(count: int, *, disk: bool) -> list[Any]:
    """Return so many configurations, always the same, that hold most pairs of values: each is the
    best of a few that are drawn. Those after every value was there once are marked `slow`, as are
    all that use the disk."""
    draw = random.Random(1)
    sums = tuple(name for name in SUMS if name != "on both")  # see `test_sum_shares`
    axes = AXES | {"placement": tuple(DISK_PLACEMENTS if disk else PLACEMENTS), "sums": sums}

    def valid() -> Iterator[Configuration]:
        while True:
            case = Configuration(**{name: draw.choice(axis) for name, axis in axes.items()})
            if case.is_valid:
                yield case

    values = {(name, value) for name, axis in axes.items() for value in axis}
    covered: set[frozenset[tuple[str, Any]]] = set()
    cases: list[Any] = []
    for _ in range(count):
        best = max(islice(valid(), 12), key=lambda case: len(_pairs(case) - covered))
        covered |= _pairs(best)
        cases.append(pytest.param(best, marks=pytest.mark.slow) if disk or not values else best)
        values -= set(vars(best).items())
    return cases


def _pairs(configuration: Configuration) -> set[frozenset[tuple[str, Any]]]:
    return set(map(frozenset, combinations(vars(configuration).items(), 2)))
