"""Hides two log messages of every import of torchao, which transformers imports too.

Users can do nothing about them: an extension of torchao for other GPUs (`_C_mxfp8`, and not `_C`)
was not loaded, and torch has deprecated a function that torchao calls. Other messages of both
loggers are shown.
"""

from __future__ import annotations

import logging
import re

_DROPPED = {
    "torchao": re.compile(r"Failed to load \S*/_C_"),
    "torch.utils._pytree": re.compile("%s is an Enum subclass "),
}
"""Logger → beginning of its message, before arguments are formatted."""


def drop_import_messages() -> None:
    """Hide both messages from now on. Idempotent."""
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not _DROPPED[record.name].match(str(record.msg))
