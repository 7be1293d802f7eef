"""Telling costs the training thread next to nothing."""

from __future__ import annotations

import io
import statistics
import time
from pathlib import Path

from offloadtrain.engine import StepReport
from offloadtrain.events import schema
from offloadtrain.train.build import assemble
from offloadtrain.train.console import Console
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.run_log import RunLog
from tests.train.small_job import small_job


def test_a_step_is_told_for_little_more_than_its_line(tmp_path: Path) -> None:
    """CPU time of this thread, in turn with that of making the JSON, which another thread does."""
    job = small_job(tmp_path)
    parts = assemble(job)
    report = StepReport(
        step=1,
        skipped=False,
        grad_norm=1.0,
        clip_coef=1.0,
        loss_scale=1.0,
        micro_steps=1,
        early_buckets=0,
        speculation_hit=None,
        exposed_ms=1.0,
        busy_ms={"host": 1.0},
        d2h_bytes=1,
        h2d_bytes=1,
        comm_bytes=0,
    )
    clock, told = StepClock(), StepStats(1.0, (1.0,), False, False, False)
    clock.lap("forward")
    folder = RunFolder.new(tmp_path, "timed")
    folder.begin("", "")
    ratios = []
    with folder, RunLog(folder, job, Console(io.StringIO(), every_s=1e3)) as log:
        log.started(parts, Progress())
        log.step(2, Progress(), report, clock, told, lr=1e-3)
        log._writer.flush()
        (step,) = (
            r.event for r in schema.read(folder.events()) if isinstance(r.event, schema.Step)
        )
        for number in range(3, 1003):
            began = time.thread_time_ns()
            log.step(number, Progress(), report, clock, told, lr=1e-3)
            between = time.thread_time_ns()
            schema.to_line(step, 0, 0.0)
            ratios.append((between - began) / (time.thread_time_ns() - between))
    parts.optimizer.close()
    assert statistics.median(ratios) < 3
