"""A trained run to convert, of the tests of training."""

from tests.train.conftest import trained_run

__all__ = ["trained_run"]
