"""The sampled steps' spans: compressed lines, decoded when one is shown, and each only once."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property

from offloadtrain.events import log_lines, schema
from offloadtrain_tui.reading.timed import pack, unpack

SAMPLED_STEPS = 256
"""Number of newest timelines kept."""


class Spans(tuple[schema.LaneSpan, ...]):
    """The spans of a step. What is computed over all of them is computed once."""

    @cached_property
    def end_ms(self) -> float:
        """When the last one ends."""
        return max((span.start_ms + span.duration_ms for span in self), default=0.0)

    @cached_property
    def waits_ms(self) -> dict[str, float]:
        """Lane → how long compute waited for it."""
        waits: dict[str, float] = {}
        for span in self:
            if span.lane == schema.WAIT:
                waits[span.name] = waits.get(span.name, 0.0) + span.duration_ms
        return waits


class Timelines:
    """Step → its spans. One thread adds, another one reads. Lines of the newest step are stored as
    they are, those of older steps are compressed."""

    def __init__(self) -> None:
        self._lines: OrderedDict[int, list[bytes] | bytes] = OrderedDict()
        self._newest: int | None = None
        self._open: list[bytes] = []
        self._shown: list[bytes] | bytes = []
        self._count = 0
        self._spans = Spans()

    def add(self, step: int, line: bytes) -> bool:
        """Add a line of the log; return whether it is the first of its step."""
        if step == self._newest:
            self._open.append(line)
            return False
        if self._newest is not None:
            self._lines[self._newest] = pack(self._open)
        self._newest, self._open = step, [line]
        self._lines[step] = self._open  # a resumed run may sample the same step again
        self._lines.move_to_end(step)
        while len(self._lines) > SAMPLED_STEPS:
            self._lines.popitem(last=False)
        return True

    def of(self, step: int) -> Spans | None:
        """Return the timeline of a sampled step; None if it was not sampled, or is too old."""
        stored = self._lines.get(step)
        if stored is None:
            return None
        if stored is not self._shown:
            self._shown, self._count, self._spans = stored, 0, Spans()
        if isinstance(stored, list) or not self._count:
            lines = unpack(stored) if isinstance(stored, bytes) else stored
            count = len(lines)  # another thread may append
            if count > self._count:
                records = map(log_lines.from_line, lines[self._count : count])
                fresh = (record.event for record in records if record is not None)
                spans = (event for event in fresh if isinstance(event, schema.LaneSpan))
                self._spans = Spans((*self._spans, *spans))
                self._count = count
        return self._spans
