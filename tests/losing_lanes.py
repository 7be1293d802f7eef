"""Lanes that lose their device at a chosen operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offloadtrain.runtime.lanes import LaneEvent, Lanes, Operation, Range
from offloadtrain.step.program.operations import Lane
from tests.recording_lanes import RecordingLanes


class LosingLanes(RecordingLanes):
    """Lose the device at the n-th operation from `left` on: at its launch, or, where it runs on a
    thread or a queue of its own, when it runs."""

    def __init__(self, inner: Lanes) -> None:
        super().__init__(inner)
        self.left: int | None = None
        self.seen = 0
        self.error: type[Exception] = torch.AcceleratorError

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        fails = self._is_the_one()
        if fails and lane in (Lane.COMPUTE, Lane.HOST):
            self._lose(name)
        super().launch(lane, name, (lambda *_: self._lose(name)) if fails else fn, reads, writes)

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        if self._is_the_one():
            self._lose(str(why))
        super().wait(lane, event, why)

    def record(self, lane: Lane) -> LaneEvent:
        if self._is_the_one():
            self._lose(f"record on {lane}")
        return super().record(lane)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        if self._is_the_one():
            self._lose(str(why))
        super().host_wait(event, why)

    def _is_the_one(self) -> bool:
        self.seen += 1
        if self.left is None:
            return False
        self.left -= 1
        return self.left == -1

    def _lose(self, what: str) -> None:
        raise self.error(f"CUDA error: unspecified launch failure ({what})")
