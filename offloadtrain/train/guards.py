"""What guards the process of a run: it stops when asked, and ends when it hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offloadtrain.config.job import Config
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.launcher_link import Link
from offloadtrain.runtime.watchdog import Watchdog
from offloadtrain.train.signals import StopRequests

ALONE = RankInfo()


@dataclass(frozen=True, slots=True)
class Guards:
    stop: StopRequests
    watchdog: Watchdog

    @contextmanager
    def reporting(self, log: Callable[[str], None]) -> Iterator[None]:
        """Log the report of a hang while inside. `log`: may be called from another thread."""
        self.watchdog.log = log
        try:
            yield
        finally:
            self.watchdog.log = None


@contextmanager
def guarded(
    config: Config, *, hung_code: int, rank_info: RankInfo = ALONE, link: Link | None = None
) -> Iterator[Guards]:
    """Guard this process; begins before torch is loaded.

    Args:
        hung_code: exit code of a process that hangs.
        rank_info: this process among the ranks.
        link: to the launcher of this rank, which judges hangs and ends it after a second stop.

    Raises:
        StoppedEarlyError: a stop was requested before the first step.
    """
    watchdog = Watchdog(
        HEARTBEAT,
        least_limit_s=config.train.hang_timeout_s,
        hung_code=hung_code,
        link=link,
        judges=rank_info.size == 1,
    )
    with StopRequests(aborts=link is None, quiet=rank_info.rank > 0) as stop, watchdog:
        yield Guards(stop, watchdog)
