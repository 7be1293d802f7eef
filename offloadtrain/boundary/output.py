"""The one place where a command's text goes out: stdout and stderr of the whole process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from offloadtrain.boundary.sanitize import SanitizedStream


@contextmanager
def sanitized_output() -> Iterator[None]:
    """Let nothing that is printed meanwhile, by whomever, pass an escape sequence on."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _filtered(sys.stdout), _filtered(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _filtered(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, SanitizedStream) else cast(TextIO, SanitizedStream(stream))
