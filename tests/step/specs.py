"""Specs of small models with any options, for tests that need no model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from offloadtrain.config.offload import PRECISIONS, STATE_PRECISIONS, OffloadConfig, Precision
from offloadtrain.step.layout import step_spec as spec_module
from offloadtrain.step.layout.block_spec import BlockSpec, BucketSpec, padded
from offloadtrain.step.layout.formats import ADAM_MOMENTS, format_for
from offloadtrain.step.layout.placement import lay_out
from offloadtrain.step.layout.state_tiers import candidates, first_on_device
from offloadtrain.step.layout.step_spec import SPILL_BLOCK, STAGING_BYTES, StepSpec
from offloadtrain.step.program.operations import Kind, Lane, Launch, Operation, Operations
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps

UPDATES: dict[str, dict[str, Any]] = {
    "exact": {"clip_norm": 1.0},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative"},
    "delayed": {"update": "delayed"},
}
PIECES = 1
"""`STAGING_BYTES` for which a slot holds the least it can: buckets go down in pieces."""


@dataclass(frozen=True)
class Case:
    """One rank's spec, and how large its staging may be."""

    spec: StepSpec
    rank: int = 0
    staging: int = STAGING_BYTES

    def driven(self, count: int, **after: Container[int]) -> Operations:
        """`after`: see `steps`."""
        with staging_of(self.staging):
            return steps(Program(self.spec, self.rank), count, **after)


@contextmanager
def staging_of(size: int) -> Iterator[None]:
    """What is computed inside of it has slots of at most so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec_module, "STAGING_BYTES", size)
        yield


def bucket(name: str, params: int, config: OffloadConfig, ranks: int = 1) -> BucketSpec:
    dtype = PRECISIONS[config.precision]
    state_format = format_for(config.state.format, dtype)
    return BucketSpec(
        name, padded([params], ranks), params, dtype, state_format, ranks, ADAM_MOMENTS
    )


def block(
    name: str,
    config: OffloadConfig,
    ranks: int = 1,
    *,
    sizes: tuple[int, ...] = (300,),
    frozen: tuple[int, ...] = (),
    repeated: bool = True,
    leaf: bool = False,
) -> BlockSpec:
    """With a bucket per size: trained ones, and frozen ones."""
    trained = tuple(bucket(f"{name}.{i}", size, config, ranks) for i, size in enumerate(sizes))
    still = tuple(bucket(f"{name}.f{i}", size, config, ranks) for i, size in enumerate(frozen))
    return BlockSpec(name, trained, still, repeated, leaf)


def laid_out(blocks: list[BlockSpec], config: OffloadConfig, ranks: int = 1) -> StepSpec:
    return lay_out(
        blocks,
        config.checked(),
        ranks=ranks,
        num_tensors=sum(len(item.buckets) for item in blocks),
        available_bytes=None,
    )


def chain(
    count: int, mode: str = "exact", ranks: int = 1, *, sizes: tuple[int, ...] = (300,), **keys: Any
) -> StepSpec:
    """So many blocks of one kind; of "speculative", all of them have a second copy."""
    config = OffloadConfig(**(UPDATES[mode] | keys))
    spec = laid_out(
        [block(f"b{i}", config, ranks, sizes=sizes) for i in range(count)], config, ranks
    )
    copied = [item.name for item in spec.blocks] if mode == "speculative" else []
    return replace(spec, second_copies=frozenset(copied))


@st.composite
def configs(draw: st.DrawFn, ranks: int, mode: str) -> OffloadConfig:
    """Any that `offload` takes."""
    options = dict(UPDATES[mode])
    if mode == "delayed":
        options["warmup_steps"] = draw(st.integers(0, 2))
    options["state"] = draw(st.sampled_from(sorted(STATE_PRECISIONS)))
    places = ["host", "device", *([] if mode == "speculative" else ["disk"])]
    options["working"] = draw(st.sampled_from(places))
    fits: list[Precision] = list(STATE_PRECISIONS[options["state"]])
    if mode == "early":
        fits = [fit for fit in fits if fit != "fp16"]
    options["precision"] = draw(st.sampled_from(fits))
    options["zero_stage"] = draw(st.sampled_from([0, 1, 2, 3]))
    if ranks > 1 and options["working"] != "device":
        options["zero_stage"] = 3
    if options["working"] != "device" or options["zero_stage"] == 3:
        options["resident_blocks"] = draw(st.sampled_from([0, 0, 1, 2]))
    often = 1 if options["working"] == "disk" else 3
    if mode != "speculative" and draw(st.integers(0, often)) == 0:
        options["state_on"] = draw(st.sampled_from(["disk", {"disk": 0.5}]))
        if mode != "delayed":
            options["grad_on"] = draw(st.sampled_from(["host", "disk"]))
    if options.get("state_on", "host") not in ("disk", "device"):
        options["checkpoint_spill"] = SPILL_BLOCK * draw(st.sampled_from([0, 1, 2, 5, 50]))
    options["device_slots"] = draw(st.integers(1, 3))
    options["grad_accum_steps"] = draw(st.sampled_from([1, 1, 2, 3]))
    options["sums_on"] = draw(st.sampled_from(["host", "host", "device", {"device": 0.4}]))
    if options["sums_on"] != "host":
        options["sums_down"] = draw(st.sampled_from(["fp32", "working"]))
    options["reduction"] = draw(st.sampled_from(["working", "fp32"]))
    return OffloadConfig(**options).checked()


@st.composite
def cases(draw: st.DrawFn, *, most_blocks: int = 4, most_ranks: int = 4) -> Case:
    """Any rank of any spec. Blocks are of any size, some partly or wholly frozen; some or all have
    their state on the device; where staging holds little, most buckets go down in pieces."""
    ranks = draw(st.sampled_from([1, 1, *range(2, most_ranks + 1)]))
    mode = draw(st.sampled_from(sorted(UPDATES)))
    config = draw(configs(ranks, mode))
    size = st.sampled_from([1, 128, 300, 900])
    blocks = []
    for number in range(draw(st.integers(1, most_blocks))):
        repeated = draw(st.integers(0, 3)) > 0
        leaf = not repeated and config.zero_stage_among(ranks) == 3 and draw(st.booleans())
        frozen = tuple(draw(st.lists(size, max_size=1))) if repeated or leaf else ()
        least = 0 if number and frozen else 1  # every block holds something, one is trained
        sizes = tuple(draw(st.lists(size, min_size=least, max_size=2)))
        kind = {"repeated": repeated, "leaf": leaf}
        blocks.append(block(f"b{number}", config, ranks, sizes=sizes, frozen=frozen, **kind))
    spec = laid_out(blocks, config, ranks)
    count = draw(st.sampled_from([0, 0, 1, 2, len(candidates(spec))]))
    spec = first_on_device(spec, count)
    if mode == "speculative":
        names = st.sampled_from([item.name for item in blocks])
        spec = replace(spec, second_copies=draw(st.frozensets(names)))
    if ranks > 1:
        spec = replace(spec, copies=draw(st.sampled_from([1, 1, 2])))
    rank = draw(st.integers(0, ranks - 1))
    return Case(spec, rank, draw(st.sampled_from([STAGING_BYTES, PIECES])))


# Parts of what a program has said.


def launches(operations: Iterable[Operation], *kinds: Kind) -> list[Launch]:
    return [op for op in operations if isinstance(op, Launch) and op.kind in kinds]


def lane(operations: Iterable[Operation], which: Lane) -> list[str]:
    return [op.name for op in operations if isinstance(op, Launch) and op.lane is which]


def by_step(operations: Operations) -> list[Operations]:
    """Each ends with the `DECIDE` of its step; what comes behind the last one is the last."""
    result: list[Operations] = [[]]
    for op in operations:
        result[-1].append(op)
        if isinstance(op, Launch) and op.kind is Kind.DECIDE:
            result.append([])
    return result
