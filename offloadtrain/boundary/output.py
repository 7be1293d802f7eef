"""Output of a command: stdout and stderr of the process, without foreign escape sequences."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

from offloadtrain.boundary.sanitize import SanitizedStream, sanitize


@contextmanager
def sanitized_output() -> Iterator[None]:
    """Filter escape sequences from everything that the process prints inside."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _filtered(sys.stdout), _filtered(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def tell(text: str, file: TextIO | None = None) -> None:
    """Print the result of finished work. A closed pipe or a full disk does not fail the work: from
    then on the stream's output is dropped.

    Args:
        file: the stream; default: stdout.
    """
    stream = sys.stdout if file is None else file
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):  # ValueError: the stream is closed
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_on_stderr(text: str) -> None:
    """Print a message with visible control characters. If it cannot be written, it is lost; later
    messages are tried again."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        print(sanitize(text), file=sys.stderr, flush=True)


def _filtered(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, SanitizedStream) else cast(TextIO, SanitizedStream(stream))
