"""Device memory by the plan against torch's allocator on a GPU, with the measured figures kept
here, so that the plan is compared without one. `tests/gpu/test_plan_cuda.py` measures them again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from tests.plan.test_memory import job

SHAPES = {
    "gpt2-355m": SIZES["gpt2-355m"],
    "llama": ModelShape(
        vocab_size=32000, num_layers=8, d_model=1024, num_heads=16, max_seq_len=1024
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"offload__activation": "recompute"},
    "streamed": {"offload__activation": "offload", "offload__working": "host"},
    "int8, two microbatches": {"train__grad_accum_steps": 2, "offload__state": "int8"},
}
MEASURED_BYTES = {
    ("llama", "keep"): 1_697_063_424,
    ("llama", "recompute"): 975_513_088,
    ("llama", "streamed"): 796_200_000,
    ("llama", "int8, two microbatches"): 1_697_063_936,
    ("gpt2-355m", "keep"): 3_147_000_000,
    ("gpt2-355m", "streamed"): 986_437_632,
}
"""Peaks on an NVIDIA H200, commit 84537982, torch 2.11, bf16. The loss's backward kept one fp32
chunk more than it does now: the one of the rows before."""
CHUNK_BYTES = {"llama": 67_072_000, "gpt2-355m": 66_942_324}
"""64 MiB in whole rows of fp32 logits."""


def step_job(shape: str, options: str, precision: str = "bf16") -> Config:
    """A job of 4 x 512 tokens per microbatch."""
    config = job(data__seq_len=16, train__micro_batch=4, **OPTIONS[options])
    return replace(
        config,
        model=SHAPES[shape],
        data=replace(config.data, seq_len=512),
        offload=config.offload.replace(precision=precision),
        device=replace(config.device, kind="auto"),
    )


@pytest.mark.parametrize(("shape", "options"), MEASURED_BYTES)
def test_peak_of_a_step_on_a_gpu(shape: str, options: str) -> None:
    """Within 0.5 %, but for `keep` of the llama shape, where the plan is 1.1 % low: torch's
    allocator takes blocks above 10 MiB from the driver in multiples of 2 MiB and does not split off
    a rest of 1 MiB or less, and the MLPs of that shape save 16 tensors of 11 MiB.
    """
    plan = make(step_job(shape, options), *find("h200"))
    measured = MEASURED_BYTES[shape, options] - CHUNK_BYTES[shape]
    assert sum(plan.device.values()) == pytest.approx(measured, rel=0.02)
