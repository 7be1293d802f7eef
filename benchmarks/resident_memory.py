"""What a process holds, and what its main thread does, sampled by a thread."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

EVERY_S = 0.001


def resident() -> tuple[int, int]:
    """Bytes of anonymous memory and of mapped files."""
    text = Path("/proc/self/status").read_text()
    anonymous, file = (re.search(rf"{key}:\s+(\d+) kB", text) for key in ("RssAnon", "RssFile"))
    assert anonymous is not None and file is not None
    return int(anonymous[1]) << 10, int(file[1]) << 10


class Watch:
    """Samples this process while the main thread is in its context.

    Attributes:
        peak_bytes: the most anonymous memory.
        mapped_bytes: the most memory of mapped files.
        shares: name of a phase → its share of the samples; "" for the rest.
    """

    def __init__(self, phases: Mapping[str, str] | None = None) -> None:
        """`phases`: name of a function → name of the phase that begins with its call."""
        self.peak_bytes, self.mapped_bytes = resident()
        self._phases = phases or {}
        self._seen: Counter[str] = Counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def shares(self) -> dict[str, float]:
        total = self._seen.total() or 1
        return {name: count / total for name, count in self._seen.most_common()}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()  # the last sample
        self._sample()

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            self._sample()

    def _sample(self) -> None:
        anonymous, mapped = resident()
        self.peak_bytes = max(self.peak_bytes, anonymous)
        self.mapped_bytes = max(self.mapped_bytes, mapped)
        self._seen[self._phase()] += 1

    def _phase(self) -> str:
        """The innermost phase that the main thread is in."""
        ident = threading.main_thread().ident
        assert ident is not None
        frame: FrameType | None = sys._current_frames()[ident]
        while frame is not None:
            if frame.f_code.co_name in self._phases:
                return self._phases[frame.f_code.co_name]
            frame = frame.f_back
        return ""
