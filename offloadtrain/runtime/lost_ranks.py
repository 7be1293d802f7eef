"""What an exchange among ranks says that has failed, as another rank has ended.

What torch's backends raise names an address. So a rank whose own code has failed says so in the
store of `init_process_group`, and the others, whose exchanges fail once its process has ended, look
there. That is for loops of users: jobs have the failure detector, which ends ranks that wait, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from offloadtrain.runtime.process_group import RankError


class LostRankError(RankError):
    """An exchange has failed, as another rank has ended."""


_FAILED = "offloadtrain: a rank's own code has failed"


def is_of_exchange(error: BaseException) -> bool:
    """Tell whether a backend of torch raised it. Gloo's are RuntimeErrors with a place in its
    source."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def lost(what: str) -> str:
    """Return a sentence on `what`, which has lost another rank, with that one's error if known."""
    with suppress(Exception):  # the store may have ended with the rank that hosts it
        store = dist.distributed_c10d._get_default_store()
        if store.check([_FAILED]):
            return f"{what} has lost another rank: {store.get(_FAILED).decode(errors='replace')}"
    return f"{what} has lost another rank, whose process has ended: its own output says why"


@contextmanager
def telling(who: str) -> Iterator[None]:
    """Exchanges with other ranks are inside, and code of the user.

    Args:
        who: this rank, for messages of others.

    Raises:
        LostRankError: an exchange has failed.
    """
    try:
        yield
    except Exception as error:
        if is_of_exchange(error):
            raise LostRankError(lost(who)) from error
        with suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.set(_FAILED, f"{who} has raised {type(error).__name__}: {error}")
        raise
