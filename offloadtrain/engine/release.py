"""What an optimizer gives back when it goes out of scope."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

from offloadtrain.engine.engine import Engine
from offloadtrain.runtime.arena import Arena
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.lanes import Lanes
from offloadtrain.runtime.process_group import Ranks

_log = logging.getLogger(__name__)


class Release:
    """The finalizer of an optimizer.

    An optimizer that goes out of scope gives the model its weights back, as `close()` does. At the
    end of the process it does not: nobody reads the weights any more, and the host may have no room
    for a copy of them. Its reference to the optimizer is dead in the first case only.

    Attributes:
        engine: weak, as the engine refers to the model, which may refer to the optimizer. A hook of
            the model keeps the engine alive until it is closed.
    """

    engine: Callable[[], Engine | None] = staticmethod(lambda: None)

    def __init__(
        self,
        optimizer: object,
        lanes: Lanes,
        arena: Arena,
        disk: DiskArena,
        joined: Sequence[Ranks],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lanes, self._arena, self.disk, self._joined = lanes, arena, disk, joined

    def __call__(self) -> None:
        """Give back the lanes, the memory that they use, and process groups whose world is gone."""
        try:
            engine = self.engine()
            if self._optimizer() is None and engine is not None and not engine.guard.closed:
                # Gathering shards takes a collective, and ranks drop their optimizers at different
                # times.
                if engine.residency.gathers:
                    _log.warning(
                        "an optimizer whose weights are in shards (zero_stage = 3) went out of "
                        "scope: the weights of its layers are gone, and their parameters are "
                        "empty. Keep a reference to it, take dict(optimizer.full_weights()) on all "
                        "ranks, then call optimizer.close()"
                    )
                engine.close()
        finally:
            # Drains first: copies and kernels in flight use the arena's memory and the file.
            self._lanes.close()
            self._arena.close()
            self.disk.close()
            for ranks in self._joined:
                ranks.let_go()
