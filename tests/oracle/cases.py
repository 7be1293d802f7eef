"""Which runs are recorded: for each model all pairs of the axes, and special cases one by one.

The covering cases together contain every kind of operation and buffer: see `test_coverage`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

from offloadtrain.config.offload import OffloadConfig

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
ON_OTHER_TIERS: dict[str, dict[str, Any]] = {
    "half of the state on the device": {"state_on": {"device": 0.5}},
    "a third of the state on the device, streamed": {
        "state_on": {"device": 0.3},
        "working": "host",
        "resident_blocks": 2,
    },
    "state on the disk": {"state_on": "disk"},
    "state on the disk, streamed": {"state_on": "disk", "working": "host"},
    "state and gradients on the disk": {"state_on": "disk", "grad_on": "disk"},
    "weights on the disk": {"working": "disk"},
    "all on the disk": {
        "state_on": "disk",
        "grad_on": "disk",
        "working": "disk",
        "device_slots": 1,
    },
    "state on three tiers": {
        "state_on": {"device": 0.3, "disk": 0.4},
        "working": "disk",
        "resident_blocks": 2,
    },
    "sums on the device": {"sums_on": "device"},
    "sums on the device, streamed": {"sums_on": "device", "working": "host"},
    "rounded sums on the device": {"sums_on": "device", "sums_down": "working"},
    "rounded sums and half of the state on the device": {
        "sums_on": "device",
        "sums_down": "working",
        "state_on": {"device": 0.5},
    },
    "saved tensors offloaded": {"activation": "offload_saved", "offload_saved_above": 0},
    "saved tensors offloaded, streamed": {
        "activation": "offload_saved",
        "offload_saved_above": 0,
        "working": "host",
    },
    "the first input offloaded": {
        "activation": "offload",
        "recompute_blocks": 1,
        "working": "host",
    },
    "spill": {"checkpoint_spill": 14 << 12},
    "spill, streamed": {"checkpoint_spill": 5 << 12, "working": "host"},
    "spill of half of the state": {"checkpoint_spill": 5 << 12, "state_on": {"disk": 0.5}},
}
WITH_PARTS: dict[str, dict[str, Any]] = {
    "parts of inputs": {"activation": "recompute", "partition_activations": True},
    "parts of inputs offloaded": {"activation": "offload", "partition_activations": True},
    "parts of inputs, streamed": {
        "activation": "recompute",
        "partition_activations": True,
        "working": "host",
    },
}
WITH_SUM_SHARES: dict[str, dict[str, Any]] = {
    "some sums on the device": {"sums_on": {"device": 0.4}},
    "some sums on the device, streamed": {"sums_on": {"device": 0.4}, "working": "host"},
    "some rounded sums and half of the state on the device": {
        "sums_on": {"device": 0.6},
        "sums_down": "working",
        "state_on": {"device": 0.5},
    },
    "some sums on the device, gradients on the disk": {
        "sums_on": {"device": 0.4},
        "state_on": "disk",
        "grad_on": "disk",
    },
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
MESHES: dict[str, dict[str, int]] = {
    "hybrid": {"dp_replicate": 2, "dp_shard": 2},
    "2 groups of experts": {"dp": 1, "ep": 2},
    "2 groups of experts, 2 replicas": {"dp": 2, "ep": 2},
    "2 parts": {"dp": 1, "tp": 2},
    "2 parts, 2 replicas": {"dp": 2, "tp": 2},
    "2 stages": {"pp": 2, "dp": 1},
    "2 stages, 2 replicas": {"pp": 2, "dp": 2},
}
"""Axes of ranks and their sizes."""
FORMATS = ("fp32/bf16", "fp32/fp32", "split16/bf16", "int8/bf16", "int8/fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        format: of the state, and the precision.
        staging: whether a staging slot holds every bucket, or only a piece of it.
        backward: "explicit": `optimizer.backward(loss)`; "plain": `loss.backward()`.
        reduction: dtype in which ranks sum.
        script: what happens between forward and step; see `scripts`.
        rule: the optimizer; see `runs`.
        mesh: of `MESHES`; "": all ranks share the state.
        schedule: of a pipeline; "": the model is whole on every rank.
    """

    model: str = "chain"
    mode: str = "exact"
    placement: str = "on the device"
    format: str = "fp32/bf16"
    accum: int = 1
    staging: str = "whole"
    backward: str = "explicit"
    ranks: int = 1
    reduction: str = "working"
    script: str = "four steps"
    rule: str = "adamw"
    mesh: str = ""
    schedule: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Of `offload`, by mode and placement."""
        mode = dict(MODES[self.mode])
        if self.schedule == "2bw":
            del mode["warmup_steps"]  # its first step is delayed
        return {**mode, **_ALL_PLACEMENTS[self.placement]}

    @property
    def name(self) -> str:
        """What differs from the plainest run, behind model, mode and placement."""
        always = ("model", "mode", "placement", "format")
        varying = [f.name for f in fields(self) if f.name not in always]
        plain = Case()
        changes = [
            f"{n}={getattr(self, n)}" for n in varying if getattr(self, n) != getattr(plain, n)
        ]
        return "; ".join([*(getattr(self, n) for n in always), *changes])

    @property
    def possible(self) -> bool:
        """Whether `offload` takes it, and training does not end in an error that it should."""
        fp16, early = self.format.endswith("fp16"), self.mode == "early"
        in_order = not (fp16 and (early or self.backward == "plain"))
        on_device = self.format.startswith("fp32") and self.mode in ("exact", "early")
        twice = self.model == "mixed reentrant" and early
        full = self.mode == "speculative, partly" and "inputs offloaded" in self.placement
        on_host = "state on" not in self.placement or self.placement in ON_OTHER_TIERS
        on_host = on_host or self.placement in WITH_SUM_SHARES
        sums = self.accum > 1 or "sums" not in self.placement
        scripted = self.mode in _SCRIPTS.get(self.script, MODES)
        possible = in_order and not twice and not full and (on_device or on_host)
        possible = possible and sums and scripted
        return possible and _is_taken(self.mode, self.placement, self.schedule)


@cache
def _is_taken(mode: str, placement: str, schedule: str) -> bool:
    """Whether `offload` takes the options. Thousands of cases differ in what is no option, and each
    process of a test of ranks imports this module."""
    options = Case(mode=mode, placement=placement, schedule=schedule).options
    return not any(OffloadConfig(**options).problems())


_ALL_PLACEMENTS = {**PLACEMENTS, **MORE_PLACEMENTS, **ON_OTHER_TIERS, **WITH_PARTS, **SHARED}
_ALL_PLACEMENTS |= WITH_SUM_SHARES


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
        "model": ALONE,
        "mode": tuple(MODES),
        "placement": tuple(PLACEMENTS),
        "format": FORMATS,
        "accum": (1, 2),
        "staging": ("whole", "pieces"),
        "backward": ("explicit", "plain"),
    }
    yield from pairwise("alone", axes, Case)


def _among_ranks() -> Iterator[Case]:
    axes: dict[str, Sequence[Any]] = {
        "model, placement": [(m, place) for m, places in AMONG_RANKS.items() for place in places],
        "mode": tuple(MODES),
        "format": FORMATS,
        "accum": (1, 2),
        "staging": ("whole", "pieces"),
        "reduction": ("working", "fp32"),
    }

    def case(**values: Any) -> Case:
        model, placement = values.pop("model, placement")
        return Case(model=model, placement=placement, ranks=2, **values)

    yield from pairwise("ranks", axes, case)
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
    axes: dict[str, Sequence[Any]] = {
        "script": tuple(_SCRIPTS),
        "mode": tuple(MODES),
        "placement": _FOR_SCRIPTS,
        "accum": (1, 2),
        "format": FORMATS[:3],
    }

    def case(script: str, **values: Any) -> Case:
        return Case(script=script, backward="plain" if script in _PLAIN else "explicit", **values)

    yield from pairwise("scripts", axes, case)
    for script, mode in product(("too few microbatches", "some get nothing"), MODES):
        model = "skipping" if script == "some get nothing" else "chain"
        yield Case(script=script, mode=mode, model=model, accum=2)
    for mode in _SKIPPING:
        yield Case(script="some steps skip", mode=mode, format="int8/fp16")
    for script, placement in _FOR_SCRIPTS_OF_RANKS.items():
        backward = "plain" if script in _PLAIN else "explicit"
        for mode in ("exact", "speculative, right", "delayed"):
            yield Case(script=script, mode=mode, placement=placement, ranks=2, backward=backward)


def _odd() -> Iterator[Case]:
    """Models and placements beside the matrix."""
    axes: dict[str, Sequence[Any]] = {
        "model": ("recompute", "reentrant", "behind the hooks", "partly used", "fp32 norms"),
        "placement": ("streamed, 1 slot", "streamed, inputs offloaded", *MORE_PLACEMENTS),
        "mode": ("exact", "early", "speculative, wrong", "delayed"),
        "accum": (1, 2),
    }
    yield from pairwise("odd", axes, Case)
    for mode in MODES:
        yield Case(model="detached", mode=mode)
    for model, mode in product(("mixed reentrant", "frozen", "tied"), ("exact", "delayed")):
        for placement in ("stage 2", "stage 3, host", "stage 3, device"):
            yield Case(model=model, mode=mode, placement=placement, ranks=2)


def _covering() -> Iterator[Case]:
    """Together they contain every kind of operation and of buffer: see `test_coverage`."""
    yield Case(model="frozen", mode="speculative, right", placement="streamed, 1 slot")
    yield Case(model="frozen", mode="speculative, wrong", placement="streamed, 1 slot")
    yield Case(model="mixed reentrant")
    yield Case(model="unusual", placement="state on the device")
    yield Case(placement="all on the disk", accum=2)
    yield Case(placement="state on three tiers", mode="early", format="split16/bf16")
    yield Case(placement="rounded sums and half of the state on the device", accum=2)
    yield Case(placement="saved tensors offloaded, streamed", mode="delayed")
    yield Case(placement="spill of half of the state", script="saves")
    yield Case(placement="state on three tiers", script="averages")
    yield Case(rule="muon", accum=2)
    yield Case(model="experts to skip", placement="streamed, 2 slots")
    yield Case(ranks=2, placement="stage 1")
    yield Case(ranks=2, placement="stage 3, device", mode="early", reduction="fp32")
    yield Case(ranks=4, placement="stage 2", mesh="hybrid")
    yield Case(ranks=2, model="divided", placement="parts of inputs", mesh="2 parts")
    # Two versions of shards, and two sums of gradients.
    yield Case(
        model="staged",
        mode="delayed",
        placement="stage 3, device",
        accum=4,
        ranks=4,
        mesh="2 stages, 2 replicas",
        schedule="2bw",
    )


def _on_other_tiers() -> Iterator[Case]:
    """Each placement in each mode; other models and scripts in turn."""
    axes: dict[str, Sequence[Any]] = {
        "mode": ("exact", "early", "speculative, wrong", "delayed"),
        "placement": tuple(ON_OTHER_TIERS),
        "format": FORMATS[::2],
        "accum": (1, 2),
        "script": ("four steps", "saves"),
    }
    yield from pairwise("tiers", axes, Case)
    for number, placement in enumerate(ON_OTHER_TIERS):
        format = FORMATS[(1, 2, 4)[number % 3]]
        mode = ("exact", "delayed")[number % 2]
        case = Case(mode=mode, placement=placement, accum=2, format=format, staging="pieces")
        if case.possible:
            yield case
    scripts = ("some steps skip", "drops gradients", "evaluates", "loads its state")
    placements = (
        "state on three tiers",
        "all on the disk",
        "rounded sums on the device",
        "spill",
    )
    for number, (placement, mode) in enumerate(product(placements, ("exact", "delayed"))):
        for script in (scripts[number % 4], scripts[(number + 1) % 4]):
            accum, format = 2 - number // 2 % 2, FORMATS[number % 3]
            case = Case(mode=mode, placement=placement, accum=accum, format=format, script=script)
            if case.possible:
                yield case
    for placement, format in (
        ("on the device", "fp32/bf16"),
        ("streamed, 2 slots", "split16/bf16"),
        ("weights on the disk", "fp32/bf16"),
    ):
        script = "loads older weights"
        yield Case(mode="delayed", placement=placement, format=format, script=script)
    for placement in ("streamed, inputs offloaded", "all on the disk"):
        yield Case(placement=placement, accum=2, script="a launch fails")
    for number, model in enumerate(("frozen", "unusual", "tied", "mixed reentrant", "groups")):
        for placement in ("all on the disk", "rounded sums on the device"):
            mode = ("exact", "delayed")[number % 2 and "all" not in placement]
            yield Case(model=model, mode=mode, placement=placement, accum=2, script="saves")


def _with_sum_shares() -> Iterator[Case]:
    """Sums of some buckets on the device and of others on the host, in one step."""
    on_both, streamed, rounded, on_disk = WITH_SUM_SHARES
    for placement, mode, more in (
        (on_both, "exact", {"script": "some steps skip"}),
        (on_both, "early", {"model": "unusual"}),
        (on_both, "speculative, wrong", {"format": "split16/bf16", "staging": "pieces"}),
        (on_both, "delayed", {"model": "tied", "script": "drops gradients"}),
        (on_both, "exact", {"model": "mixed reentrant", "backward": "plain"}),
        (on_both, "exact", {"script": "clips by hand", "rule": "muon"}),
        (streamed, "early", {"model": "frozen", "format": "int8/bf16"}),
        (streamed, "delayed", {"script": "saves", "staging": "pieces"}),
        (rounded, "exact", {"model": "groups", "script": "loads its state"}),
        (rounded, "delayed", {"format": "split16/bf16"}),
        (on_disk, "exact", {"script": "saves"}),
        (on_disk, "early", {"format": "int8/bf16", "staging": "pieces"}),
        (on_both, "exact", {"ranks": 2, "reduction": "fp32"}),
        (streamed, "exact", {"ranks": 2, "model": "tied"}),
        (rounded, "delayed", {"ranks": 2}),
    ):
        options: dict[str, Any] = more
        yield Case(placement=placement, mode=mode, accum=2, **options)


def _other_rules() -> Iterator[Case]:
    axes: dict[str, Sequence[Any]] = {
        "mode": ("exact", "early", "delayed"),
        "placement": (
            "on the device",
            "streamed, 1 slot",
            "state on the device",
            "half of the state on the device",
            "state and gradients on the disk",
            "rounded sums on the device",
        ),
        "format": ("fp32/bf16", "split16/bf16"),
        "accum": (1, 2),
    }
    for case in pairwise("muon", axes, lambda **values: Case(rule="muon", **values)):
        if case.format == "fp32/bf16" or "on the device" not in case.placement[5:]:
            yield case
    for rule, mode in product(("lamb", "lion"), ("exact", "speculative, wrong")):
        yield Case(rule=rule, mode=mode, placement="streamed, 2 slots")
    yield Case(rule="lamb", ranks=2, placement="stage 2", accum=2)
    yield Case(rule="muon", ranks=2, placement="stage 1")
    yield Case(rule="muon", mode="delayed", ranks=2, placement="stage 3, host")
    for mode in ("exact", "early", "speculative, wrong", "delayed"):
        for placement in (
            "streamed, 2 slots",
            "half of the state on the device",
            "all on the disk",
        ):
            accum = 1 + (mode in ("early", "delayed"))
            case = Case(model="experts to skip", mode=mode, placement=placement, accum=accum)
            if case.possible:
                yield case


def _divided() -> Iterator[Case]:
    """Several ranks: other tiers, rules and meshes."""
    runs: tuple[tuple[str, dict[str, Any]], ...] = (
        ("exact", {"accum": 2, "script": "saves"}),
        ("delayed", {"accum": 2, "format": "split16/bf16"}),
    )
    for mode, options in runs:
        for placement in ("rounded sums on the device", "all on the disk", "spill, streamed"):
            case = Case(ranks=2, mode=mode, placement=placement, **options)
            if case.possible:
                yield case
    yield Case(ranks=2, mode="speculative, wrong", placement="saved tensors offloaded, streamed")
    yield Case(ranks=2, model="experts to skip", placement="stage 2", accum=2)
    yield Case(ranks=2, model="experts to skip", mode="delayed", placement="stage 3, host")
    for mode, placement, accum in (
        ("exact", "stage 1", 2),
        ("speculative, wrong", "stage 2", 1),
        ("early", "stage 3, device", 1),
        ("delayed", "stage 3, host", 2),
    ):
        reduction = "fp32" if accum == 2 else "working"
        yield Case(
            ranks=4, mode=mode, placement=placement, accum=accum, reduction=reduction, mesh="hybrid"
        )
    for mode, placement, mesh in (
        ("speculative, wrong", "on the device", "2 groups of experts"),
        ("exact", "stage 2", "2 groups of experts, 2 replicas"),
        ("delayed", "stage 3, host", "2 groups of experts, 2 replicas"),
    ):
        ranks = 4 if "replicas" in mesh else 2
        yield Case(model="divided experts", ranks=ranks, mode=mode, placement=placement, mesh=mesh)
    for mode, placement, mesh in (
        ("exact", "on the device", "2 parts"),
        ("delayed", "parts of inputs offloaded", "2 parts"),
        ("speculative, wrong", "parts of inputs, streamed", "2 parts"),
        ("early", "parts of inputs, streamed", "2 parts, 2 replicas"),
    ):
        ranks = 4 if "replicas" in mesh else 2
        yield Case(model="divided", ranks=ranks, mode=mode, placement=placement, mesh=mesh)


def _pipelines() -> Iterator[Case]:
    for schedule, mode, placement, script in (
        ("gpipe", "exact", "streamed, recomputed", "four steps"),
        ("1f1b", "speculative, wrong", "on the device", "evaluates"),
        ("1f1b", "delayed", "streamed, inputs offloaded", "saves"),
        ("1f1b", "exact", "saved tensors offloaded", "four steps"),
        ("interleaved", "exact", "half of the state on the device", "saves"),
        ("interleaved", "speculative, wrong", "on the device", "some steps skip"),
        ("2bw", "delayed", "on the device", "evaluates"),
        ("2bw", "delayed", "streamed, 2 slots", "some steps skip"),
        ("2bw", "delayed", "streamed, inputs offloaded", "saves"),
        ("2bw", "delayed", "state on the device", "saves"),
        ("2bw", "delayed", "sums on the device", "some steps skip"),
        ("2bw", "delayed", "on the device", "loads older weights"),
    ):
        yield Case(
            model="staged",
            accum=2,
            ranks=2,
            mesh="2 stages",
            schedule=schedule,
            mode=mode,
            placement=placement,
            script=script,
        )
    for script in ("saves", "loads older weights"):
        yield Case(
            model="staged",
            accum=2,
            ranks=2,
            mesh="2 stages",
            schedule="2bw",
            mode="delayed",
            placement="streamed, 1 slot",
            format="split16/bf16",
            script=script,
        )
    for schedule, mode, placement in (
        ("1f1b", "exact", "stage 2"),
        ("2bw", "delayed", "stage 3, host"),
    ):
        yield Case(
            model="staged",
            accum=2,
            ranks=4,
            mesh="2 stages, 2 replicas",
            schedule=schedule,
            mode=mode,
            placement=placement,
        )


_SELDOM = (
    Case(
        model="unusual",
        mode="early",
        placement="state on the device",
        format="fp32/fp32",
        backward="plain",
    ),
    Case(
        model="mixed reentrant", placement="state on the device", staging="pieces", backward="plain"
    ),
    Case(
        model="unusual",
        mode="speculative, right",
        placement="partly streamed",
        format="split16/bf16",
        accum=2,
    ),
    Case(
        model="unusual",
        placement="streamed, 3 slots",
        format="fp32/fp32",
        accum=2,
        staging="pieces",
        backward="plain",
    ),
    Case(
        model="unusual",
        mode="delayed",
        placement="streamed, inputs offloaded",
        format="split16/bf16",
        accum=2,
        staging="pieces",
    ),
    Case(
        model="groups",
        mode="speculative, right",
        placement="streamed, recomputed",
        format="int8/fp16",
        accum=2,
        staging="pieces",
    ),
    Case(model="fp32 norms", mode="early", placement="state on the device, inputs offloaded"),
    Case(model="unusual", placement="state on the device", accum=2, staging="pieces"),
    Case(
        model="unusual",
        mode="speculative, right",
        placement="streamed, 1 slot",
        format="fp32/fp32",
        staging="pieces",
        backward="plain",
    ),
    Case(
        model="mixed reentrant",
        mode="delayed",
        placement="streamed, inputs offloaded",
        format="int8/bf16",
        backward="plain",
    ),
    Case(
        model="groups",
        mode="speculative, wrong",
        placement="streamed, 3 slots",
        format="fp32/fp32",
        accum=2,
        staging="pieces",
    ),
    Case(
        model="groups",
        mode="delayed",
        placement="streamed, inputs offloaded",
        format="int8/bf16",
        accum=2,
        backward="plain",
    ),
    Case(mode="delayed", placement="stage 3, partly", staging="pieces", ranks=2, reduction="fp32"),
    Case(
        model="unusual", placement="stage 1", format="int8/fp16", accum=2, staging="pieces", ranks=2
    ),
    Case(
        model="tied",
        mode="delayed",
        placement="streamed, inputs offloaded",
        format="fp32/fp32",
        staging="pieces",
        backward="plain",
    ),
    Case(
        model="unusual",
        mode="speculative, partly",
        placement="streamed, 2 slots",
        format="fp32/fp32",
        staging="pieces",
        backward="plain",
    ),
    Case(model="unusual", mode="delayed", format="fp32/fp32", staging="pieces"),
    Case(model="unusual", placement="partly streamed", accum=2),
    Case(
        model="groups",
        mode="speculative, wrong",
        placement="streamed, inputs offloaded",
        format="fp32/fp32",
        backward="plain",
    ),
    Case(
        model="unusual",
        mode="delayed",
        placement="stage 2",
        format="int8/fp16",
        ranks=2,
        reduction="fp32",
    ),
    Case(mode="early", format="fp32/fp32", script="loads its state"),
    Case(model="behind the hooks", mode="delayed", placement="streamed, inputs offloaded"),
    Case(model="fp32 norms", mode="delayed", placement="inputs offloaded"),
)
"""Orders of operations that none of the pairs contain."""
COVERING: dict[str, Case] = {case.name: case for case in _covering()}
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *_alone(),
        *_among_ranks(),
        *_special(),
        *_odd(),
        *_covering(),
        *_on_other_tiers(),
        *_with_sum_shares(),
        *_other_rules(),
        *_divided(),
        *_pipelines(),
        *_SELDOM,
    )
}
