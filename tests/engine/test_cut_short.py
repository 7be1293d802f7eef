"""An exception in the middle of a step: what is given up is that step, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.engine.interpreter import CutShortError
from offloadtrain.runtime.lanes import LaneEvent, Operation, Range, SequentialLanes, on_lanes
from offloadtrain.step.program.operations import Lane
from offloadtrain.step.proof.prove import prove
from tests.numerics.comparison import assert_equal, contents
from tests.numerics.models import Chain, batches, loss_of
from tests.recording_lanes import RecordingLanes

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "streamed": {"working": "host"},
    "one slot, recomputed": {"working": "host", "device_slots": 1, "activation": "recompute"},
    "two microbatches": {"grad_accum_steps": 2},
    "speculative": {"update": "speculative", "clip_norm": 1e9},
    "streamed, delayed": {"working": "host", "update": "delayed"},
}


class Interrupted(BaseException):
    """As KeyboardInterrupt is."""


class FailingLanes(RecordingLanes):
    """Raise in the n-th call from now on that launches or waits."""

    def __init__(self) -> None:
        super().__init__(SequentialLanes())
        self.left: int | None = None

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._count_down()
        super().launch(lane, name, fn, reads, writes)

    def wait(self, lane: Lane, event: LaneEvent, why: str) -> None:
        self._count_down()
        super().wait(lane, event, why)

    def _count_down(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Interrupted("planted")


def micro_steps(optimizer: ot.OffloadOptimizer, model: Chain, step: int, accum: int) -> None:
    for tokens in batches(4 * accum)[step * accum : (step + 1) * accum]:
        optimizer.backward(loss_of(model, tokens))


def trained(options: dict[str, Any], fails_after: int | None) -> tuple[dict[str, Any], bool, Any]:
    """Four steps, the third of which is begun twice; (bits, whether it failed, the program)."""
    torch.manual_seed(0)
    model, lanes = Chain(4), FailingLanes()
    accum = options.get("grad_accum_steps", 1)
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", **{"clip_norm": 0.5, **options})
    failed = False
    for step in range(4):
        if step == 2 and fails_after is not None:
            lanes.left = fails_after
            try:
                micro_steps(optimizer, model, step, accum)
            except Interrupted:
                failed = True
            lanes.left = None
            optimizer.zero_grad()
        micro_steps(optimizer, model, step, accum)
        optimizer.step()
    result = contents(optimizer, model)
    optimizer.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return result, failed, lanes.program


@pytest.mark.cover(0)
@pytest.mark.draws(0.6)
@pytest.mark.parametrize(
    ("name", "after"),
    [
        (name, after)
        for row, name in enumerate(sorted(set(OPTIONS) - {"streamed, delayed"}))
        for column, after in enumerate((0, 1, 3, 8, 20))
        if (row + column) % 2 == 0
    ],
)
def test_a_step_that_was_given_up_leaves_nothing_behind(name: str, after: int) -> None:
    expected, _, _ = trained(OPTIONS[name], None)
    actual, failed, program = trained(OPTIONS[name], after)
    assert failed or after > 10, "there are at least so many calls in a forward and a backward"
    assert prove(program) == []
    assert_equal(actual, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_runs_until_the_step_is_given_up(name: str) -> None:
    model, lanes = Chain(4), FailingLanes()
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", **{"clip_norm": 0.5} | OPTIONS[name])
    accum = OPTIONS[name].get("grad_accum_steps", 1)
    micro_steps(optimizer, model, 0, accum)
    optimizer.step()
    tokens = batches(1)[0]
    lanes.left = 0
    with pytest.raises(Interrupted):
        loss_of(model, tokens)
    with pytest.raises(CutShortError, match=r"Interrupted \(planted\).*zero_grad\(\) gives"):
        loss_of(model, tokens)
    optimizer.zero_grad()
    micro_steps(optimizer, model, 1, accum)
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_update_that_was_cut_short_cannot_go_on(name: str) -> None:
    model, lanes = Chain(4), FailingLanes()
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", **{"clip_norm": 0.5} | OPTIONS[name])
    accum = OPTIONS[name].get("grad_accum_steps", 1)
    micro_steps(optimizer, model, 0, accum)
    lanes.left = 3
    with pytest.raises(Interrupted):
        optimizer.step()
    with pytest.raises(CutShortError, match="offload again"):
        optimizer.zero_grad()
    optimizer.close()
    again = ot.offload(model, device="cpu", clip_norm=0.5)
    again.backward(loss_of(model, batches(1)[0]))
    again.step()
    again.close()
