"""The kernels' threads: their number, their CPUs, other threads that call, and forks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offloadtrain.hardware.cpus import CpuPlan, local_plan
from offloadtrain.runtime import kernels
from tests.runtime.kernels.format_cases import differing, gradient, random_state, stepped
from tests.runtime.kernels.kernel_cases import BACKENDS

NUMEL = 200_000
needs_native = pytest.mark.skipif(BACKENDS[0].name != "native", reason="no native kernels")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with kernels.use(BACKENDS[0]):
        kernels.set_threads(None)
        yield
        kernels.place(local_plan())


def workers() -> dict[str, str]:
    """Name → CPUs of the pool's threads."""
    result = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("ot-kernel-"):
            lines = (task / "status").read_text().splitlines()
            allowed = next(line for line in lines if line.startswith("Cpus_allowed_list"))
            result[name] = allowed.split()[1]
    return result


def run_a_loop() -> None:
    kernels.accumulate(torch.zeros(NUMEL), torch.ones(NUMEL), True)


@needs_native
def test_bound_threads_do_all_the_work() -> None:
    cpu = min(os.sched_getaffinity(0))
    kernels.place(CpuPlan(3, (cpu,), "a test"))
    run_a_loop()
    assert workers() == {f"ot-kernel-{i}": str(cpu) for i in range(3)}
    assert kernels.backend().threads == 3 and kernels.backend().where == "a test"


@needs_native
def test_unbound_threads_leave_one_part_to_the_caller() -> None:
    kernels.place(CpuPlan(3, (), "a test"))
    run_a_loop()
    assert set(workers()) == {"ot-kernel-1", "ot-kernel-2"}


@needs_native
def test_a_number_asked_for_wins_over_the_plan() -> None:
    with kernels.use(BACKENDS[0]):
        kernels.set_threads(2)
        kernels.place(CpuPlan(5, (), "a test"))
        run_a_loop()
        assert set(workers()) == {"ot-kernel-1"}
        assert kernels.backend().where == "as asked for"


@needs_native
def test_bound_or_not_the_bits_are_the_same() -> None:
    layout = kernels.Layout.of_one(NUMEL)
    state, grad = random_state("int8", NUMEL, torch.bfloat16), gradient(NUMEL, torch.bfloat16)
    expected = stepped(state, grad, layout, BACKENDS[0])
    kernels.place(CpuPlan(4, tuple(os.sched_getaffinity(0)), "a test"))
    assert differing(stepped(state, grad, layout, BACKENDS[0]), expected) == {}


def test_several_threads_may_call_at_once() -> None:
    def total(value: float) -> float:
        result = torch.zeros(NUMEL)
        for _ in range(20):
            kernels.accumulate(result, torch.full((NUMEL,), value), False)
        return float(result.sum())

    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(total, [1.0, 2.0, 3.0, 4.0])) == [
            20.0 * NUMEL * value for value in (1.0, 2.0, 3.0, 4.0)
        ]


@pytest.mark.slow
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = """
import os, torch
torch.set_num_threads(1)
from offloadtrain.runtime import kernels
kernels.set_threads(3)
kernels.accumulate(torch.zeros(200_000), torch.ones(200_000), True)
child = os.fork()
total = torch.zeros(200_000)
kernels.accumulate(total, torch.ones(200_000), True)
assert float(total.sum()) == 200_000
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
