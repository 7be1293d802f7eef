"""What a call raises, and what the package warns of, as text: ranks send it to the test."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


def message_of(call: Callable[[], object]) -> str:
    """The error of a call as "TypeName: text", or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Collect the messages of a logger: pytest's caplog does not see those of other processes."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def assert_messages(of_ranks: Sequence[Mapping[str, str]], expected: Mapping[str, str]) -> None:
    """Every rank has these messages: name → a regular expression."""
    for messages in of_ranks:
        assert messages.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, messages[name]), f"{name}: {messages[name]}"
