"""What frameworks keep in a process, and what other tests have left there, is not seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.drawn_lanes import drawn_lanes
from tests.drawn_lanes import parametrize as pytest_generate_tests

__all__ = ["drawn_lanes", "pytest_generate_tests"]

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """Each module begins outside of any process group, and trainers that its tests share live as
    long. Lightning leaves the variables of its ranks in the process; Accelerate takes them for a
    launcher's, and wraps models in DistributedDataParallel."""
    with pytest.MonkeyPatch.context() as environment:
        for name in OF_RANKS:
            environment.delenv(name, raising=False)
        _leave_group()
        yield
        _leave_group()
        for name in OF_RANKS:
            os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The objects of Accelerate share their state in the process: each test begins without."""
    yield
    forget()


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    forget()


def forget() -> None:
    if (state := sys.modules.get("accelerate.state")) is None:
        return
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()
