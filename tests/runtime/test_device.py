"""In which precision a CPU computes: by what a product takes there, not by what is said of it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from offloadtrain.runtime import device
from offloadtrain.runtime.device import cpu_bf16_speedup, resolve_precision, speedup
from offloadtrain.train import saved_state

CPU = torch.device("cpu")
XEON = {torch.float32: 31.0, torch.bfloat16: 7.1}
"""GFLOP/s of a Xeon with AVX-512 and no instructions for bf16, of which oneDNN says it has bf16."""

CHOICE = """
import torch
from offloadtrain.runtime.device import resolve_precision
assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)
print(resolve_precision("auto", torch.device("cpu"))[0])
"""


def chosen_under(**environment: str) -> str:
    """ "auto" in a process of its own: oneDNN reads its limits once."""
    command = [sys.executable, "-c", CHOICE]
    return subprocess.run(
        command, env=os.environ | environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("times", "chosen"), [(0.13, "fp32"), (0.23, "fp32"), (1.1, "fp32"), (3.0, "bf16")]
)
def test_auto_takes_what_is_faster(
    times: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_bf16_speedup", lambda: times)
    precision, why = resolve_precision("auto", CPU)
    assert precision == chosen and f"{times:.2g} times" in why


def test_a_cpu_that_emulates_bf16_is_seen_through() -> None:
    """Whatever oneDNN calls supported: times as they were on such a machine."""
    assert speedup(lambda dtype: 1 / XEON[dtype]) == pytest.approx(0.23, abs=0.01)


def test_load_in_between_decides_nothing() -> None:
    """All but one measurement of each dtype met another program."""
    delays = {
        torch.float32: iter([9.0, 50.0, 1.0, 80.0]),
        torch.bfloat16: iter([9.0, 0.5, 70.0, 60.0]),
    }
    assert speedup(lambda dtype: next(delays[dtype], 90.0)) == 2.0


def test_measuring_draws_no_random_number_and_leaves_the_threads() -> None:
    """A job is seeded before its precision is known."""
    saved_state.seed_all(3)
    before, threads = saved_state.random_states().as_json, torch.get_num_threads()
    cpu_bf16_speedup.__wrapped__()
    assert saved_state.random_states().as_json == before and torch.get_num_threads() == threads


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limits are those of x86")
@pytest.mark.slow
def test_a_library_that_may_not_use_bf16_instructions_is_seen_through() -> None:
    """oneDNN says that it supports bf16 all the same, and emulates it."""
    assert chosen_under(ONEDNN_MAX_CPU_ISA="AVX512_CORE") == "fp32"


def test_bf16_instructions_are_used() -> None:
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("this CPU has none")
    assert resolve_precision("auto", CPU)[0] == "bf16"
