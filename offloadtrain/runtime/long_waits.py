"""Says where this process waits for other ranks, if that takes long.

In a loop of the user's own, a call that only some of the ranks make leaves them waiting until the
process group gives up, after half an hour by torch's default, and silently. Jobs have the watchdog.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.user_code import called_from

_log = logging.getLogger(__name__)

LONG_S = 60.0
LOOK_EVERY_S = 5.0
_started = threading.Lock()


def tell_of_long_waits(rank: int) -> None:
    """Watch this process until it ends; once for all of its optimizers."""
    if _started.acquire(blocking=False):
        # A daemon: it holds nothing, and must not keep a process from ending.
        threading.Thread(target=_watch, args=(rank,), name="long waits", daemon=True).start()


def _watch(rank: int) -> None:
    known, since_s, warned = -1, time.monotonic(), False
    while True:
        # Concurrently with training, which it never delays.
        time.sleep(LOOK_EVERY_S)
        count, waits = HEARTBEAT.collectives, HEARTBEAT.waits and not HEARTBEAT.watched
        if count != known or not waits:
            known, since_s, warned = count, time.monotonic(), False
        elif not warned and (waited_s := time.monotonic() - since_s) >= LONG_S:
            warned = True
            _log.warning(
                "rank %d has waited %.0f s for other ranks, %s; its last collective was '%s'. "
                "Every rank must call backward, step, load_state_dict, master_weights and so on at "
                "the same point and as often, also where its loss is not finite or its data has "
                "ended: look for a call that only some make. In stage 3 (keep_whole) also for a "
                "module that only some use",
                rank,
                waited_s,
                _place(),
                HEARTBEAT.collective_of,
            )


def _place() -> str:
    """Name the line of the user's code that the training thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    called, line = called_from(frame)
    return f"in {called or 'a call'}(){' at ' + line if line else ''}"
