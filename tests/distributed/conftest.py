"""One pool of ranks for each size, made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool, RankFailedError
from tests.train.small_job import write_text

Run = Callable[..., list[Any]]


_MADE: dict[int, Pool] = {}
"""Of all folders that take the fixtures from here."""


def _close() -> None:
    while _MADE:
        _MADE.popitem()[1].close()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    yield _MADE
    _close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """They end after the last test of ranks: idle, ten of them still take a share of a core."""
    yield
    if "pools" not in getattr(nextitem, "fixturenames", ()):
        _close()


@pytest.fixture
def ranks(pools: dict[int, Pool]) -> Run:
    """ranks(size, fn, …): call `fn` on so many ranks."""

    def run(size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if size not in pools:
            pools[size] = Pool(size)
        try:
            results = pools[size].run(fn, *args, **kwargs)
        except RankFailedError:
            pools.pop(size).close()  # its collectives do not match any more
            raise
        if pools[size].is_worn:
            pools.pop(size).close()
        return results

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write the text that small jobs train on."""
    write_text(tmp_path)
    return tmp_path


@pytest.fixture
def own_ranks() -> Iterator[Run]:
    """As `ranks`, in processes that end with the test: it leaves messages that nobody received,
    which would meet those of the next one."""
    made: list[Pool] = []

    def run(size: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        made.append(Pool(size))
        return made[-1].run(fn, *args, **kwargs)

    yield run
    for pool in made:
        pool.close()
