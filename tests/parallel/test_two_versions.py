"""Streamed weights without a flush between steps: the version that each load brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.parallel.pipeline.drive import Driven, Turn, order
from offloadtrain.parallel.pipeline.two_versions import TwoVersions
from offloadtrain.step.layout.placement import lay_out
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Operations
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.prove import prove_operations
from tests.step.contents import Contents, Version
from tests.step.specs import block

STAGES, MICROBATCHES, STEPS, BLOCKS = 3, 3, 5, 5
SET: Version = (0,)
"""The masters that a run begins with."""


def spec_of(ranks: int = 1, **keys: Any) -> StepSpec:
    """Of the first stage: five blocks alike between one before and one behind them."""
    config = OffloadConfig(
        update="delayed", grad_accum_steps=MICROBATCHES, **{"working": "host"} | keys
    ).checked()
    inner = [block(f"b{number}", config, ranks) for number in range(BLOCKS)]
    outer = [block(name, config, ranks, repeated=False, leaf=True) for name in ("in", "out")]
    return lay_out(
        [outer[0], *inner, outer[1]],
        config,
        ranks=ranks,
        num_tensors=BLOCKS + 2,
        available_bytes=None,
        weight_versions=2,
        update_policy=TwoVersions,
    )


def turns_of(spec: StepSpec) -> tuple[Operations, list[tuple[Turn, Operations]]]:
    """All operations, and those of each turn, behind the upload of the first weights."""
    program = Program(spec)
    before = program.upload_masters()
    driven, turns = Driven(program, "2bw", 64), []
    for turn in order("2bw", 0, STAGES, MICROBATCHES, STEPS):
        begin = len(driven.operations)
        driven.take(turn)
        turns.append((turn, driven.operations[begin:]))
    return [*before, *driven.operations], [(Turn("decide", -1), before), *turns]


def updates_read(spec: StepSpec) -> Iterator[tuple[Turn, set[int]]]:
    """For each forward and backward, the updates in the weights that it reads."""
    program = Program(spec)
    contents = Contents(program, 0)
    contents.set_state(SET)
    for turn, operations in turns_of(spec)[1]:
        contents.read.clear()
        contents.run(operations, turn.number)
        read = [value for values in contents.read.values() for value in values]
        if turn.kind in ("forward", "backward"):
            assert read and all(isinstance(value, tuple) for value in read)
            yield turn, {len(value) - 1 for value in read if isinstance(value, tuple)}


PLACES: list[dict[str, Any]] = [
    {},
    {"state": "split16", "device_slots": 1},
    {"state": "int8", "device_slots": 3},
    {"resident_blocks": 2, "activation": "recompute"},
    {"ranks": 2, "zero_stage": 3},
    {"ranks": 2, "zero_stage": 3, "working": "device", "state": "split16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_backward_reads_what_its_forward_has_read(place: dict[str, Any]) -> None:
    """W(t+1) = W(t) - u(grad f(W(t-1))): step t reads t - 1 updates, also behind the first forwards
    of step t + 1. No speed of the lanes changes that."""
    spec = spec_of(**place)
    assert any(spec.loads_in_turn(bucket) for bucket in spec.buckets)
    for turn, read in updates_read(spec):
        assert read == {max(0, turn.number // MICROBATCHES - 1)}, turn
    assert prove_operations(spec, turns_of(spec)[0]) == []
