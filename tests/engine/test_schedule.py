"""One description of a step: what `schedule.program` says is what the engine is recorded to do."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offloadtrain as ot
from offloadtrain.schedule import DECIDE, BlockShape, Op, StepShape, simulate
from offloadtrain.schedule import program as scheduled
from offloadtrain.step import spec
from offloadtrain.step.memory import HostMemoryError
from offloadtrain.transfer import SequentialLanes, on_lanes
from offloadtrain.transfer.recorder import RecordingLanes
from offloadtrain.transfer.virtual import operations
from tests.numerics.models import Chain, batches, loss_of

STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"clip_norm": 0.5},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative", "clip_norm": 1e9},
    "delayed": {"update": "delayed"},
}


@pytest.fixture(autouse=True, params=[spec.STAGING_BYTES, 4096], ids=["whole", "pieces"])
def staging(request: pytest.FixtureRequest) -> Iterator[int]:
    """Bytes of a staging slot: as they are, and so few that every layer goes in two pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "STAGING_BYTES", request.param)
        yield request.param


def engine_program(
    depth: int,
    mode: str,
    accum: int,
    slots: int | None,
    resident: int = 0,
    host_memory_limit: int | None = None,
) -> tuple[list[Op], int, StepShape]:
    """Recorded from a real run, where its first step begins, and the shape of what ran."""
    torch.manual_seed(0)
    model, lanes = Chain(depth), RecordingLanes(SequentialLanes())
    streaming = {} if slots is None else {"working": "host", "device_slots": slots}
    with on_lanes(lanes):
        optimizer = ot.offload(
            model,
            device="cpu",
            grad_accum_steps=accum,
            resident_blocks=resident,
            host_memory_limit=host_memory_limit,
            **OPTIONS[mode],
            **streaming,
        )
    begun = len(operations(lanes.program))
    for number, tokens in enumerate(batches(STEPS * accum), 1):
        optimizer.backward(loss_of(model, tokens))
        if number % accum == 0:
            optimizer.step()
    found = operations(lanes.program)
    shape = shape_of(optimizer, mode, accum, slots)
    optimizer.close()
    return found, begun, shape


def shape_of(
    optimizer: ot.OffloadOptimizer,
    mode: str,
    accum: int,
    slots: int | None,
    *,
    whole_gradients: bool = False,
) -> StepShape:
    """Of an engine that has run."""
    order = optimizer._engine.forward_order
    buckets = [bucket for block in order for bucket in block.buckets]
    reduction = optimizer._engine._gradients._reduction
    return StepShape(
        blocks=tuple(
            BlockShape(b.name, tuple(bucket.name for bucket in b.buckets), b.streamer is not None)
            for b in order
        ),
        mode=mode,  # type: ignore[arg-type]
        micro_steps=accum,
        slots=slots or 1,
        staging_slots=staging_slots(optimizer),
        pieces={bucket.name: len(reduction.pieces(bucket)) for bucket in buckets},
        among_ranks=not optimizer.ranks.alone,
        kept_on_device=any(bucket.kept_on_device for bucket in buckets),
        whole_gradients=whole_gradients,
        staged_up=frozenset(
            b.name
            for b in buckets
            if b.grad is None and b.pending is None and b.host_weight is None and not b.from_host
        ),
        unguessed=frozenset(b.name for b in buckets if mode == "speculative" and not b.other),
    )


def staging_slots(optimizer: ot.OffloadOptimizer) -> int:
    """From what is booked."""
    held = {row.owner: row.bytes for row in optimizer.ledger.rows()}
    return held.get("gradient staging", 0) // optimizer._engine._gradients._reduction._piece_bytes


def by_lane(ops: list[Op], kinds: set[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for op in ops:
        if op.name.split()[0] in kinds:
            found[op.lane].append(op.name)
    return dict(found)


KINDS = {"gather", "d2h", "norm", "accumulate", "adam", "h2d", "load", "show", DECIDE}
KINDS |= {"reduce-scatter", "all-gather"}
each_mode = pytest.mark.parametrize("mode", OPTIONS)


@pytest.mark.parametrize("slots", [None, 1, 2, 3])
@pytest.mark.parametrize("accum", [1, 3])
@each_mode
def test_every_lane_does_the_same_in_the_same_order(
    mode: str, accum: int, slots: int | None, staging: int
) -> None:
    recorded, begun, shape = engine_program(5, mode, accum, slots)
    assert (max(shape.pieces.values()) > 1) == (staging == 4096)
    assert by_lane(scheduled(shape, STEPS), KINDS) == by_lane(recorded[begun:], KINDS)


def speeds(seed: int) -> Callable[[Op], float]:
    """Seconds by name, the same for the same name: each lane has a speed, each operation varies."""
    draw = random.Random(seed)
    lanes = ("compute", "d2h", "host", "h2d", "load", "comm")
    lane = {name: 10 ** draw.uniform(-1, 1) for name in lanes}
    heavy = {"forward": 1.0, "backward": 2.0, "gather": 0.05, "norm": 0.1, "adam": 1.0}

    def seconds(op: Op) -> float:
        kind = op.name.split()[0]
        if op.name in (DECIDE, "forward root", "backward embed", "backward root"):
            return 0.0
        return (
            lane[op.lane]
            * heavy.get(kind, 0.5)
            * random.Random(f"{seed} {op.name}").uniform(0.5, 1)
        )

    return seconds


def period(ops: list[Op], seconds: Callable[[Op], float]) -> float:
    """Virtual time from the decision of the second last step to that of the last."""
    ends = simulate(ops, seconds)
    decided = [end for op, end in zip(ops, ends, strict=True) if op.name == DECIDE]
    return decided[-1] - decided[-2]


@settings(max_examples=80, deadline=None)
@given(
    depth=st.integers(2, 9),
    mode=st.sampled_from(sorted(OPTIONS)),
    accum=st.integers(1, 3),
    slots=st.sampled_from([None, 1, 2, 3]),
    resident=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_the_engine_takes_the_time_of_its_schedule(
    depth: int, mode: str, accum: int, slots: int | None, resident: int, seed: int
) -> None:
    recorded, _, shape = engine_program(depth, mode, accum, slots, resident)
    seconds = speeds(seed)
    expected = period(scheduled(shape, STEPS), seconds)
    assert period(recorded, seconds) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("accum", [1, 2])
def test_blocks_that_are_not_guessed(accum: int) -> None:
    """There is memory for a second copy of some blocks' state."""
    _, _, whole = engine_program(5, "speculative", accum, None)
    some = 0
    for limit in range(300_000, 900_000, 100_000):
        try:
            found = engine_program(5, "speculative", accum, None, host_memory_limit=limit)
        except HostMemoryError:
            continue
        recorded, begun, shape = found
        some += 0 < len(shape.unguessed) < len(shape.pieces)
        assert by_lane(scheduled(shape, STEPS), KINDS) == by_lane(recorded[begun:], KINDS)
        expected = period(scheduled(shape, STEPS), speeds(limit))
        assert period(recorded, speeds(limit)) == pytest.approx(expected, rel=1e-9)
    assert some and not whole.unguessed
