"""Ranks, as in tests/distributed; they end behind the last test that needs them."""

from tests.distributed.conftest import pools, pytest_runtest_teardown, ranks

__all__ = ["pools", "pytest_runtest_teardown", "ranks"]
