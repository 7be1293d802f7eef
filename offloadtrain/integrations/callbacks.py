"""Callbacks of frameworks that may read weights: these wait for the newest ones before them.

After `step()` new weights are still on their way, concurrently with what the training thread does
next. A callback that averages or copies parameters would read old ones, and NaN where they are
streamed. Waiting for them costs that overlap. So they are waited for only before callbacks that are
not the framework's own, at the events that these handle, unless a callback says `reads_weights =
False`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from offloadtrain.engine import OffloadOptimizer

_FRAMEWORKS = {"transformers", "lightning", "pytorch_lightning"}
"""Packages whose own callbacks read weights by `state_dict()` alone, if at all."""
_READERS = ("weight_averaging", "stochastic_weight_avg")
"""Modules of Lightning whose callbacks read parameters."""


def synchronize(optimizer: OffloadOptimizer, callbacks: Iterable[object], event: str) -> None:
    """Make parameters hold the newest weights if a callback of `event` may read them.

    Not in update mode "delayed", whose delay that would end.
    """
    if optimizer.config.update != "delayed" and any(
        _reads(callback, event) for callback in callbacks
    ):
        optimizer.synchronize()


def synchronize_before(handler: Any) -> None:
    """Synchronize before the callbacks of a `CallbackHandler` of transformers."""
    alive = weakref.ref(handler)  # a cycle would keep the trainer, and with it the host's memory

    def call_event(event: str, *args: Any, **kwargs: Any) -> Any:
        handler = alive()
        assert handler is not None, "it calls this function"
        if isinstance(handler.optimizer, OffloadOptimizer):
            synchronize(handler.optimizer, handler.callbacks, event)
        return type(handler).call_event(handler, event, *args, **kwargs)

    handler.call_event = call_event


def _reads(callback: object, event: str) -> bool:
    handles = getattr(callback, event, None)
    if handles is None or not getattr(callback, "reads_weights", True):
        return False
    package, _, module = handles.__module__.partition(".")
    return package not in _FRAMEWORKS or module.endswith(_READERS)
