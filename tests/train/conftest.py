"""Ways to stop a run in-process at a chosen step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offloadtrain.train import trainer

StopAfter = Callable[[int | None], None]


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> StopAfter:
    """Return a function that makes later runs act as if a signal came during their n-th step."""

    class Counted:
        def __init__(self, limit: int | None) -> None:
            self._left = limit

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *exception: object) -> None:
            return None

        @property
        def requested(self) -> bool:
            if self._left is None:
                return False
            self._left -= 1
            return self._left < 0

    def arm(limit: int | None) -> None:
        monkeypatch.setattr(trainer, "StopRequests", lambda: Counted(limit))

    return arm
