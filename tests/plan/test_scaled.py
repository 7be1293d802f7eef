"""13B on a 32 GB GPU at a thousandth of its size: the same blocks and microbatches, matrices 32
times narrower and shorter, rings 1024 times smaller. What the large plan says divided by 1024 is
what the small model is measured to take, under a device limit divided by 1024."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from offloadtrain.cli.commands.jobs import shipped_jobs
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.hardware.machine import find
from offloadtrain.model import loss
from offloadtrain.plan.placement import place
from offloadtrain.plan.plan import make
from offloadtrain.plan.tracing.tracer import activations, traced_microbatch
from offloadtrain.step.layout import step_spec as spec
from tests.plan.test_activations import most_allocated
from tests.plan.test_memory import booked, planned

SCALE, SIDE = 1024, 32


@pytest.fixture(autouse=True)
def small_rings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "STAGING_BYTES", spec.STAGING_BYTES // SCALE)
        patch.setattr(loss, "_ROWS_BYTES_CPU", loss._ROWS_BYTES_DEVICE // SCALE)
        traced_microbatch.cache_clear()
        yield
        traced_microbatch.cache_clear()


def scaled(config: Config) -> Config:
    model = config.model
    small = replace(
        model,
        d_model=model.d_model // SIDE,
        num_heads=model.num_heads // SIDE,
        vocab_size=model.vocab_size // SIDE,
        max_seq_len=model.max_seq_len // SIDE,
    )
    spill = config.offload.memory.checkpoint_spill // SCALE
    train = replace(config.train, grad_accum_steps=2, global_batch_tokens=0)
    # bf16: as many bytes as fp16, faster on CPUs
    offload = config.offload.replace(precision="bf16", checkpoint_spill=spill)
    return replace(
        config,
        model=small,
        data=replace(config.data, seq_len=config.data.seq_len // SIDE),
        offload=offload,
        train=replace(train, checkpoint_spill=spill),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_13b_v100", "gpt_13b_32gb", "gpt_13b_streamed"])
def test_a_thousandth_of_13b(name: str) -> None:
    job = jobs.load(shipped_jobs()[name])
    machine = find(job.device.machine)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "STAGING_BYTES", spec.STAGING_BYTES * SCALE)
        large = make(job, "large", machine)
        assert large.fits
        device, host = sum(large.device.values()), large.placed.host()
        engine = large.placed.device()
    small = scaled(large.job)
    if name == "gpt_13b_streamed":  # its one microbatch
        small = replace(small, train=replace(small.train, grad_accum_steps=1))
    measured, plan = booked(small, steps=1), planned(small)
    assert measured == plan
    for owners in (host, measured["host"]):
        del owners["padding"]  # what separates neighbours has a size of its own
    assert sum(measured["host"].values()) == pytest.approx(sum(host.values()) / SCALE, rel=0.05)

    assert sum(measured["device"].values()) == pytest.approx(sum(engine.values()) / SCALE, rel=0.05)

    device_bytes = sum(measured["device"].values()) + most_allocated(small)
    assert device_bytes <= large.device_room / SCALE
    if name != "gpt_13b_streamed":  # next to nothing beside the CPU's scratch for 16-bit products
        total = sum(plan["device"].values()) + activations(place(small), on_cpu=True).total
        assert device_bytes == pytest.approx(total, rel=0.05)
        assert device_bytes == pytest.approx(device / SCALE, rel=0.05)
