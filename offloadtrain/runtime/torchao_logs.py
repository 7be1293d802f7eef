"""Two log messages of every import of torchao, which transformers imports too.

They are not for users: an extension of torchao for other GPUs was not loaded, and torch will one
day refuse a call of torchao's. All else that both loggers say goes on.
"""

from __future__ import annotations

import logging

_DROPPED = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass "}
"""Logger → how its message begins, before its arguments are filled in."""


def drop_import_messages() -> None:
    """Drop both from now on. A repeated call changes nothing."""
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_DROPPED[record.name])
