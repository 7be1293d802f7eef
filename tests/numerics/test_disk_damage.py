"""Bytes that change in the scratch file are noticed before they are used; writes through views of
the state, which the engine cannot see, are not taken for damage."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.errors import DiskError
from offloadtrain.engine.bucket import Bucket
from offloadtrain.runtime.lanes import LaneError, Lanes, SequentialLanes, on_lanes
from offloadtrain.step.layout.buffers import Memory
from tests import levels
from tests.harsh_lanes import PausingLanes
from tests.numerics.comparison import assert_equal, train
from tests.numerics.models import Chain, batches, loss_of
from tests.seeded_lanes import SeededLanes

LANES: dict[str, Callable[[], Lanes]] = {
    "in order": SequentialLanes,
    "threads": lambda: PausingLanes(1.0, seed=3),
    "seeded": lambda: SeededLanes(7),
    "late": lambda: SeededLanes(8, late=True),
}
ALL_ON_DISK = {"working": "disk", "grad_on": "disk"}
OWNERS = {"master": "master weights", "weight": "host weights", "gradient": "gradients"}
"""Field → its owner, where that is not its name."""
FIELDS = {
    "fp32": ["master", "exp_avg", "exp_avg_sq", "gradient", "streamed weights"],
    "split16": ["weight", "low", "exp_avg", "exp_avg_sq", "gradient"],
    "int8": ["weight", "correction", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale",
             "gradient"],
}  # fmt: skip
CASES = [(state, field) for state, fields in FIELDS.items() for field in fields]

pytestmark = pytest.mark.default_lanes  # tests choose the lanes on which bytes change


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """Options of `offload`; the folder of temporary files may be in memory."""
    return {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}


@pytest.mark.parametrize(
    ("case", "lanes"), list(zip(CASES, itertools.cycle(LANES), strict=False)), ids=str
)
def test_one_flipped_bit_is_reported_with_bucket_field_and_file(
    disk: dict[str, Any], case: tuple[str, str], lanes: str
) -> None:
    state, field = case
    with on_lanes(LANES[lanes]()):
        optimizer = offloaded(Chain(6), state=state, **disk, **ALL_ON_DISK)
    model, tokens = optimizer.model, batches(3)
    for batch in tokens[:2]:
        train(optimizer, model, [batch])
    if field == "gradient":  # written during backward, read for the update
        optimizer.backward(loss_of(model, tokens[2]))
    # The lanes alone: nobody has asked for the state, so it cannot have been written past them.
    optimizer.lanes.synchronize()
    name = flip_a_bit(optimizer, field)
    with pytest.raises((DiskError, LaneError)) as raised:
        if field == "gradient":
            optimizer.step()
        else:
            train(optimizer, model, [tokens[2]])
        optimizer.lanes.synchronize()
    message = str(raised.value)
    assert f"{OWNERS.get(field, field)} of bucket '{name}'" in message
    assert f"scratch_dir = '{disk['scratch_dir']}'" in message
    assert "--resume" in message and "drive or memory" in message
    optimizer.close()


def test_damaged_frozen_weights_are_reported_although_no_step_writes_them(
    disk: dict[str, Any],
) -> None:
    model = Chain(6)
    for block in model.layers[1:4]:
        block.requires_grad_(False)
    optimizer = offloaded(model, **disk, **ALL_ON_DISK)
    for batch in batches(2):
        train(optimizer, model, [batch])
    optimizer.lanes.synchronize()
    frozen = next(bucket for block in optimizer._blocks for bucket in block.frozen)
    _flip(frozen.buffer(Memory.WEIGHT_FILE).flat)
    with pytest.raises(DiskError, match=f"frozen weights of bucket '{re.escape(frozen.name)}'"):
        train(optimizer, model, [batches(1)[0]])
    optimizer.close()


@pytest.mark.parametrize(("state", "lanes", "seed"), levels.array([*FIELDS], [*LANES], range(3)))
def test_writes_through_views_of_the_state_are_no_damage(
    disk: dict[str, Any], state: str, lanes: str, seed: int
) -> None:
    """The same calls in the same order have the bits of state on the host."""
    expected = _states_after_calls(SequentialLanes(), seed, state=state, working="host")
    actual = _states_after_calls(LANES[lanes](), seed, state=state, **disk, **ALL_ON_DISK)
    assert_equal(actual, expected)


def _states_after_calls(lanes: Lanes, seed: int, **options: Any) -> dict[str, Tensor]:
    """Return a copy of the state after a dozen calls, drawn by seed, that use it."""
    random = Random(seed)
    with on_lanes(lanes):
        optimizer = offloaded(Chain(5), **options)
    model, tokens = optimizer.model, batches(12)
    train(optimizer, model, [tokens[0]])
    views = list(optimizer.named_state())
    saved = _copied(optimizer.state_dict())

    def reset_moments() -> None:
        optimizer.synchronize()
        views[random.randrange(len(views))][1]["exp_avg"].zero_()

    calls: list[Callable[[], object]] = [
        reset_moments,
        lambda: optimizer.load_state_dict(saved),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: optimizer.zero_grad(),
        lambda: model(tokens[0]).detach(),
    ]
    for batch in tokens[1:]:
        random.choice(calls)()
        train(optimizer, model, [batch])
    result = {
        f"{name} {key}": value.clone()
        for name, fields in optimizer.named_state()
        for key, value in fields.items()
    }
    optimizer.close()
    return result


def offloaded(model: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    rule = ot.AdamW(lr=1e-2)
    return ot.offload(model, rule, device="cpu", precision="bf16", clip_norm=0.5, **options)


def flip_a_bit(optimizer: ot.OffloadOptimizer, field: str) -> str:
    """Flip one bit of a field of the last bucket of a repeated block: its state is in no slot.
    Returns the bucket's name."""
    bucket = [b for block in optimizer._blocks if block.spec.repeated for b in block.buckets][-1]
    _flip(_file_of(bucket, field))
    return bucket.name


def _file_of(bucket: Bucket, field: str) -> Tensor:
    if field == "gradient":
        return bucket.buffer(Memory.GRADIENT_FILE).flat
    if field == "streamed weights":
        return bucket.home.flat
    names = [item.name for item in bucket.format.fields(bucket.spec.moments)]
    return bucket.state[names.index(field)].flat


def _flip(mapped: Tensor) -> None:
    """Flip a bit in the file, through its mapping: a direct read sees it."""
    mapped.view(torch.uint8)[mapped.nbytes // 3] ^= 8


def _copied(saved: Any) -> Any:
    if isinstance(saved, Tensor):
        return saved.clone()
    if isinstance(saved, dict):
        return {key: _copied(value) for key, value in saved.items()}
    return saved
