"""Lanes that launch nothing, for a step over fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.engine.autograd.forward_hooks import in_backward
from offloadtrain.runtime.lanes import Lane, Operation, Range, SequentialLanes, Span
from offloadtrain.sizing.meter import Meter, Place

FORWARD, BACKWARD = "forward ", "backward "
"""The engine's names of spans begin so, followed by the module's or the block's."""


class InertLanes(SequentialLanes):
    """Counts the bytes of copies, and tells the meter whose forward or backward is running.

    The function of a launch is dropped without a call, and with it the tensors that only the launch
    refers to: gradients are freed where a real gather would free them.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter
        self._spans: list[tuple[Span, Place]] = []

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._count(lane, name, writes)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        span = super().open_span(name, reads, writes)
        self._spans.append((span, self._meter.place))
        block = name.removeprefix(FORWARD).removeprefix(BACKWARD)
        self._meter.place = Place(block, in_backward())
        return span

    def close_span(self, span: Span) -> None:
        for number in reversed(range(len(self._spans))):
            if self._spans[number][0] is span:
                self._meter.place = self._spans[number][1]
                del self._spans[number:]
                break
        super().close_span(span)
