"""What many steps must not do: wait more than once, or hold more memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.runtime.lanes import LaneEvent, SequentialLanes, on_lanes
from tests import levels
from tests.numerics.models import Chain, batches, loss_of

OPTIONS: list[dict[str, Any]] = [
    {"clip_norm": 0.5},
    {"skip_nonfinite": False},
    {"update": "speculative", "clip_norm": 1e9},
    {"update": "delayed", "working": "host", "activation": "offload"},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))


class CountingLanes(SequentialLanes):
    waits = 0

    def host_wait(self, event: LaneEvent, why: str) -> None:
        self.waits += 1
        super().host_wait(event, why)


@each_option
@pytest.mark.parametrize("accum", [1, 3])
def test_the_training_thread_waits_once_per_step(accum: int, options: dict[str, Any]) -> None:
    lanes = CountingLanes()
    model = Chain(4)
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", grad_accum_steps=accum, **options)
    lanes.waits = 0
    for number, tokens in enumerate(batches(5 * accum), 1):
        optimizer.backward(loss_of(model, tokens))
        if number % accum == 0:
            optimizer.step()
    assert lanes.waits == 5


@pytest.fixture
def nothing_before() -> Iterator[None]:
    """What exists already is no longer listed: earlier tests' caches may lose it at any time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive() -> tuple[int, int, int]:
    """Objects, tensors, and the tensors' bytes, of what was made since ``nothing_before``."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if issubclass(type(x), torch.Tensor)]
    return len(objects), len(tensors), sum(x.nbytes for x in tensors)


@pytest.mark.cover(0, levels.ALL)
@each_option
@pytest.mark.usefixtures("nothing_before")
@pytest.mark.parametrize(
    ("few", "many"), [(70, 160), pytest.param(70, 400, marks=pytest.mark.slow)]
)
def test_many_steps_hold_no_more_than_few(few: int, many: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Chain(2)
    optimizer = ot.offload(model, device="cpu", **options)
    tokens = batches(1)[0]
    counts = []  # the scalars of the last 64 steps are kept: "few" is more
    for number in range(1, many + 1):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        if number in (few, many):
            counts.append(alive())
    optimizer.close()
    objects, tensors, nbytes = zip(*counts, strict=True)
    assert tensors[0] > 0
    assert tensors[0] == tensors[1] and nbytes[0] == nbytes[1]
    assert objects[1] - objects[0] < 20
