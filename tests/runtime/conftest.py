"""Ranks, as in tests/distributed."""

from tests.distributed.conftest import pools, ranks

__all__ = ["pools", "ranks"]
