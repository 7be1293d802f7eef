"""Requests to stop a run: Ctrl-C, or SIGTERM from Slurm, Kubernetes or systemd."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class StopRequests:
    """While entered, the first signal is only noted and the second ends the process at once.

    The loop checks `requested` between two steps, where the state is consistent. A run that is
    ended at once (status 1, nothing is saved) keeps its last checkpoint, which is never half
    written. Outside the main thread signals are not handled, because Python does not allow it.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        # os.write, not print: the signal may have come in the middle of a print.
        if self.requested:
            os.write(_STDERR, b"\nended at once; the last checkpoint is intact\n")
            os._exit(1)
        self.requested = signal.Signals(number).name
        note = f"{self.requested}: stopping after this step, with a checkpoint; repeat: end at once"
        os.write(_STDERR, f"\n{note}\n".encode())
