"""Which runs are recorded: for each model all pairs of the axes, and what is special one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

MODES: dict[str, dict[str, Any]] = {
    "exact": {"clip_norm": 0.5},
    "early": {"skip_nonfinite": False},
    "speculative, right": {"update": "speculative", "clip_norm": 1e9},
    "speculative, wrong": {"update": "speculative", "clip_norm": 0.01},
    "speculative, partly": {"update": "speculative", "clip_norm": 1e9},
    "delayed": {"update": "delayed", "clip_norm": 0.5, "warmup_steps": 1},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "streamed, 1 slot": {"working": "host", "device_slots": 1},
    "streamed, 2 slots": {"working": "host", "device_slots": 2},
    "streamed, 3 slots": {"working": "host", "device_slots": 3},
    "partly streamed": {"working": "host", "resident_blocks": 1},
    "streamed, recomputed": {"working": "host", "activation": "recompute"},
    "streamed, inputs offloaded": {"working": "host", "activation": "offload"},
    "state on the device": {"state_on": "device"},
}
MORE_PLACEMENTS: dict[str, dict[str, Any]] = {
    "recomputed": {"activation": "recompute"},
    "inputs offloaded": {"activation": "offload"},
    "state on the device, inputs offloaded": {"state_on": "device", "activation": "offload"},
}
SHARED: dict[str, dict[str, Any]] = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3, device": {"zero_stage": 3},
    "stage 3, host": {"working": "host"},
    "stage 3, partly": {"working": "host", "resident_blocks": 1, "device_slots": 1},
    "stage 3, inputs offloaded": {"working": "host", "activation": "offload"},
    "stage 2, state on the device": {"zero_stage": 2, "state_on": "device"},
    "stage 3, state on the device": {"zero_stage": 3, "state_on": "device"},
}
FORMATS = ("fp32/bf16", "fp32/fp32", "split16/bf16", "int8/bf16", "int8/fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        kept: format of the state and precision.
        staging: whether a staging slot holds every bucket, or only a piece of it.
        backward: "explicit": `optimizer.backward(loss)`; "plain": `loss.backward()`.
        reduction: dtype in which ranks sum.
        script: what happens between forward and step; see `scripts`.
    """

    model: str = "chain"
    mode: str = "exact"
    placement: str = "on the device"
    kept: str = "fp32/bf16"
    accum: int = 1
    staging: str = "whole"
    backward: str = "explicit"
    ranks: int = 1
    reduction: str = "working"
    script: str = "four steps"

    @property
    def name(self) -> str:
        """What differs from the plainest run, behind model, mode and placement."""
        always = ("model", "mode", "placement", "kept")
        others = [f.name for f in fields(self) if f.name not in always]
        plain = Case()
        said = [f"{n}={getattr(self, n)}" for n in others if getattr(self, n) != getattr(plain, n)]
        return "; ".join([*(getattr(self, n) for n in always), *said])

    @property
    def possible(self) -> bool:
        """Whether `offload` takes it, and training does not end in an error that it should."""
        fp16, early = self.kept.endswith("fp16"), self.mode == "early"
        in_order = not (fp16 and (early or self.backward == "plain"))
        on_device = self.kept.startswith("fp32") and self.mode in ("exact", "early")
        twice = self.model == "mixed reentrant" and early
        full = self.mode == "speculative, partly" and "inputs offloaded" in self.placement
        on_host = "state on" not in self.placement
        return in_order and not twice and not full and (on_device or on_host)


def pairwise(seed: str, axes: dict[str, Sequence[Any]], make: Callable[..., Case]) -> list[Case]:
    """Few cases in which every two values of two axes that go together meet; another choice for
    another seed."""
    rows = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    made = [(tuple(row.values()), make(**row)) for row in rows]
    possible = [(values, case) for values, case in made if case.possible]
    random.Random(seed).shuffle(possible)
    numbers: dict[Any, int] = {}
    covers = []
    for values, _ in possible:
        pairs = combinations(enumerate(values), 2)
        covers.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs))
    missing, chosen = (1 << len(numbers)) - 1, []
    while missing:
        best = max(range(len(possible)), key=lambda i: (covers[i] & missing).bit_count())
        chosen.append(possible[best][1])
        missing &= ~covers[best]
    return chosen


ALONE = ("chain", "tied", "unusual", "skipping", "frozen", "shared", "mixed reentrant", "groups")
AMONG_RANKS: dict[str, Sequence[str]] = {
    "chain": tuple(SHARED),
    "unusual": ("stage 1", "stage 2", "stage 3, host"),
}
"""Model → placements."""


def _alone() -> Iterator[Case]:
    axes: dict[str, Sequence[Any]] = {
        "mode": tuple(MODES),
        "placement": tuple(PLACEMENTS),
        "kept": FORMATS,
        "accum": (1, 2),
        "staging": ("whole", "pieces"),
        "backward": ("explicit", "plain"),
    }
    for model in ALONE:
        yield from pairwise(model, axes, lambda m=model, **values: Case(model=m, **values))


def _among_ranks() -> Iterator[Case]:
    axes: dict[str, Sequence[Any]] = {
        "mode": tuple(MODES),
        "placement": (),
        "kept": FORMATS,
        "accum": (1, 2),
        "staging": ("whole", "pieces"),
        "reduction": ("working", "fp32"),
    }
    for model, placements in AMONG_RANKS.items():
        axes["placement"] = placements
        yield from pairwise(model, axes, lambda m=model, **values: Case(model=m, ranks=2, **values))
    for mode, placement, accum in (
        ("exact", "stage 1", 2),
        ("early", "stage 2", 1),
        ("speculative, right", "stage 3, device", 1),
        ("speculative, wrong", "stage 3, host", 2),
        ("delayed", "stage 3, partly", 1),
        ("delayed", "stage 2", 2),
    ):
        reduction = "fp32" if accum == 2 else "working"
        yield Case(mode=mode, placement=placement, accum=accum, ranks=4, reduction=reduction)


_GUESSING = ("speculative, right", "speculative, wrong", "speculative, partly")
_SKIPPING = ("exact", *_GUESSING, "delayed")
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "some steps skip": _SKIPPING,
    "clips by hand": ("exact", "speculative, right", "speculative, partly", "delayed"),
    "the odds decide": ("speculative, right", "speculative, wrong"),
    "two backwards in a micro-step": _SKIPPING,
    "synchronizes": tuple(MODES),
    "loads its state": tuple(MODES),
    "evaluates": tuple(MODES),
    "drops gradients": _SKIPPING,
    "keeps its graphs": _SKIPPING,
    "a backward fails": _SKIPPING,
    "forwards first": tuple(MODES),
    "a forward is for nothing": ("exact", "delayed"),
    "rates change": ("exact", *_GUESSING, "delayed"),
    "shows its weights": ("exact", "speculative, right", "delayed"),
}
"""Script → the modes that it is for."""
_PLAIN = ("two backwards in a micro-step", "keeps its graphs", "forwards first")
_FOR_SCRIPTS = ("on the device", "streamed, 2 slots", "streamed, inputs offloaded")
_FOR_SCRIPTS_OF_RANKS = {
    "some steps skip": "stage 2",
    "clips by hand": "stage 3, device",
    "loads its state": "stage 3, host",
    "evaluates": "stage 3, partly",
    "drops gradients": "stage 1",
    "keeps its graphs": "stage 3, host",
    "shows its weights": "stage 3, device",
}


def _special() -> Iterator[Case]:
    number = 0
    for script, modes in _SCRIPTS.items():
        backward = "plain" if script in _PLAIN else "explicit"
        for mode, placement in product(modes, _FOR_SCRIPTS):
            number += 1
            accum = 2 if script == "forwards first" else 1 + number % 2
            kept = FORMATS[number % 3]
            case = Case(
                script=script,
                mode=mode,
                placement=placement,
                accum=accum,
                kept=kept,
                backward=backward,
            )
            if case.possible:
                yield case
    for script, mode in product(("too few microbatches", "some get nothing"), MODES):
        model = "skipping" if script == "some get nothing" else "chain"
        yield Case(script=script, mode=mode, model=model, accum=2)
    for mode in _SKIPPING:
        yield Case(script="some steps skip", mode=mode, kept="int8/fp16")
    for script, placement in _FOR_SCRIPTS_OF_RANKS.items():
        backward = "plain" if script in _PLAIN else "explicit"
        for mode in ("exact", "speculative, right", "delayed"):
            yield Case(script=script, mode=mode, placement=placement, ranks=2, backward=backward)


def _odd() -> Iterator[Case]:
    """Models and placements beside the matrix."""
    models = ("recompute", "reentrant", "behind the hooks", "partly used", "fp32 norms")
    placements = ("streamed, 1 slot", "streamed, inputs offloaded", *MORE_PLACEMENTS)
    number = 0
    for model, placement in product(models, placements):
        for mode in ("exact", "early", "speculative, wrong", "delayed"):
            number += 1
            case = Case(model=model, mode=mode, placement=placement, accum=1 + number % 2)
            if case.possible:
                yield case
    for mode in MODES:
        yield Case(model="detached", mode=mode)
    for model, mode in product(("mixed reentrant", "frozen", "tied"), ("exact", "delayed")):
        for placement in ("stage 2", "stage 3, host", "stage 3, device"):
            yield Case(model=model, mode=mode, placement=placement, ranks=2)


CASES: dict[str, Case] = {
    case.name: case for case in (*_alone(), *_among_ranks(), *_special(), *_odd())
}
