"""Planned steps of the schedules of PipeDream-2BW's paper beside each other, and its ratios.

    python -m benchmarks.pipeline_ratios

GPT of 2.2B in 8 stages of 8 V100 of 16 GB, sequences of 512 tokens (arXiv:2006.09503, section 5),
batches of 512 and 2,048. The paper names neither width nor microbatch: these are assumed, and each
schedule is planned with microbatches of 1 to 8. State is on the GPUs. docs/systems.md has the
result.

The paper's GPipe gains nothing from a larger batch: 2BW over Flush (1.6, 1.15) times Flush over
GPipe (2.1, 3) is 3.4 at both. So it flushes after a fixed number of microbatches, however many a
step has. The last table plans that, with inputs of layers kept, and `FLUSH_EVERY` microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.ranks_options import RanksConfig, Schedule
from offloadtrain.config.sections import DataConfig, TrainConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.plan import make

STAGES, REPLICAS, TOKENS = 8, 8, 512
FLUSH_EVERY = 4
"""Microbatches between two flushes of the paper's GPipe: not stated, but what its ratios say."""

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "2bw")
GPT = ModelShape(
    vocab_size=50304,
    num_layers=32,
    d_model=2304,
    num_heads=24,
    max_seq_len=TOKENS,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    bias=True,
)


def machine() -> Machine:
    """Return a host of the paper's (p3.16xlarge): 8 V100 of 16 GB, 25 Gbit/s between hosts."""
    return replace(
        find("dgx2")[1],
        gpus=8,
        gpu_memory="16 GiB",
        host_memory="488 GiB",
        gpu_link_gbps=100.0,
        node_link_gbps=3.1,
    )


def step_s(schedule: Schedule, batch: int, micro_batch: int, *, recompute: bool) -> float | None:
    """Return the seconds of a planned step; None if it does not fit."""
    job = Config(
        name="gpt-2.2b",
        model=GPT,
        data=DataConfig(train="-", seq_len=TOKENS),
        train=TrainConfig(steps=1, micro_batch=micro_batch, grad_accum_steps=batch // micro_batch),
        offload=OffloadConfig(
            precision="fp16",
            state_on="device",
            activation="recompute" if recompute else "keep",
            update="delayed" if schedule == "2bw" else "exact",
        ),
        ranks=RanksConfig(pipeline=STAGES, schedule=schedule),
    )
    plan = make(job, "p3.16xlarge", machine(), STAGES * REPLICAS)
    return plan.prediction.seconds if plan.fits else None


def often_flushed_s(batch: int, micro_batch: int) -> float:
    """Return the seconds of a step of GPipe with a flush every few microbatches."""
    between = REPLICAS * FLUSH_EVERY * micro_batch
    seconds = step_s("gpipe", between, micro_batch, recompute=True)
    assert seconds is not None
    return seconds * batch / between


def often_flushed_lines() -> Iterator[str]:
    yield f"GPipe with a flush every {FLUSH_EVERY} microbatches, recomputed; the others kept"
    for batch in (512, 2048):
        for size in (1, 2, 4):
            gpipe = often_flushed_s(batch, size)
            times = (step_s(one, batch, size, recompute=False) for one in ("2bw", "1f1b"))
            unflushed, flushed = (gpipe / one for one in times if one)
            yield (
                f"  batch {batch} microbatch {size}  2bw over gpipe {unflushed:.2f}  "
                f"1f1b over gpipe {flushed:.2f}"
            )


def lines() -> Iterator[str]:
    for batch in (512, 2048):
        yield f"batch {batch}: seconds of a step"
        for size in (1, 4, 8):
            for recompute in (False, True):
                times = {one: step_s(one, batch, size, recompute=recompute) for one in SCHEDULES}
                told = [f"{name} {_seconds(found)}" for name, found in times.items()]
                flush, without = times["1f1b"], times["2bw"]
                ratio = f"  2bw over 1f1b {flush / without:.2f}" if flush and without else ""
                kept = "recompute" if recompute else "keep"
                yield f"  microbatch {size} {kept:9}  {'  '.join(told)}{ratio}"


def _seconds(found: float | None) -> str:
    return "does not fit" if found is None else f"{found:.2f}"


if __name__ == "__main__":
    print("\n".join([*lines(), *often_flushed_lines()]), flush=True)
