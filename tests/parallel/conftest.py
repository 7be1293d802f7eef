"""Ranks, as in tests/distributed; they end after the last test that needs them."""

from tests.distributed.conftest import own_ranks, pools, pytest_runtest_teardown, ranks

__all__ = ["own_ranks", "pools", "pytest_runtest_teardown", "ranks"]
