"""Run folders of the 13B job on a V100, without a V100: for tests, pictures and benchmarks.

    python -m benchmarks.generated_runs FOLDER [--ranks 4] [--steps 2000] [--sample-s 60]

The job, its plan and its owners' bytes are those of `examples/gpt_13b_v100.toml`; what a step would
measure is the plan's prediction with noise from a seed. Every record is made by the trainer's own
functions and written by its own writer; only the clock is moved on instead of waited for.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from offloadtrain.config import job as job_files
from offloadtrain.config.job import Config, as_tables
from offloadtrain.engine import StepReport
from offloadtrain.events import schema
from offloadtrain.events.writer import EventWriter
from offloadtrain.hardware.machine import find
from offloadtrain.hardware.memory_sampler import Sizes, Window, thinned
from offloadtrain.plan.plan import Plan, make
from offloadtrain.train.log.run_log import plan_facts, step_record
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder

BEGIN_S = 1_795_000_000.0
GIB = 1 << 30
JOB = Path(__file__).parent.parent / "examples/gpt_13b_v100.toml"
SAMPLED_EVERY = 20
SAVED_EVERY = 500
_FLUSH_EVERY = 1000  # the writer's queue holds a few thousand records
_CONTEXT_BYTES = 600 << 20


@dataclass
class GeneratedRank:
    """One rank of a generated run, written record by record."""

    job: Config
    plan: Plan
    rank: int
    ranks: int
    writer: EventWriter
    draw: random.Random
    sample_s: float
    now_s: float = BEGIN_S
    window: Window = field(default_factory=Window)
    progress: Progress = field(default_factory=Progress)
    emitted: int = 0
    next_sample_s: float = BEGIN_S

    def emit(self, event: schema.Event) -> None:
        self.writer.emit(event)
        self.emitted += 1
        if self.emitted % _FLUSH_EVERY == 0:
            self.writer.flush()

    # ---- memory

    @cached_property
    def fixed_bytes(self) -> int:
        return sum(self.plan.placed.device().values())

    @cached_property
    def pinned_bytes(self) -> int:
        return sum(self.plan.with_copies.host().values())

    @cached_property
    def moving_bytes(self) -> int:
        return sum(self.plan.activations.owners().values())

    def memory(self, step: int) -> schema.Memory:
        """The Ledger after a step, when activations are gone."""
        owners_by_tier = [
            ("device", self.plan.placed.device()),
            ("host", self.plan.with_copies.host()),
        ]
        rows = [
            schema.MemoryRow(owner=owner, tier=tier, num_bytes=size, peak_bytes=size)
            for tier, owners in owners_by_tier
            for owner, size in owners.items()
        ]
        rest = schema.MemoryRow(
            owner="activations and gradients",
            tier="device",
            num_bytes=37 << 20,
            peak_bytes=self.moving_bytes,
        )
        return schema.Memory(step=step, rows=(*rows, rest))

    def sizes(self, share: float) -> Sizes:
        """A sample at `share` of a step: activations grow in forward, and go in backward."""
        planned_bytes = sum(self.plan.host.values())
        allocated = self.fixed_bytes + round(self.moving_bytes * self.activity(share))
        reserved = self.fixed_bytes + self.moving_bytes + (300 << 20)
        total = self.plan.machine.gpu_memory_bytes
        noise = self.draw.randrange(GIB // 8)
        return {
            "allocated": allocated,
            "reserved": reserved,
            "inactive": (120 << 20) + noise // 4,
            "free": total - reserved - _CONTEXT_BYTES,
            "pinned": self.pinned_bytes,
            "rss": planned_bytes + noise,
            "available": self.host_bytes - planned_bytes * self.ranks - 2 * GIB - noise,
            "swap": 0,
            "page_cache": GIB + noise,
        }

    def activity(self, share: float) -> float:
        """Share of the activations that live: microbatches go up for a third, and down for two."""
        within = share * self.microbatches % 1.0
        return min(3 * within, 1.5 * (1.0 - within))

    @property
    def microbatches(self) -> int:
        return self.plan.placed.config.train.grad_accum_steps

    @cached_property
    def host_bytes(self) -> int:
        """Of the host: of a V100 in a box of its own, or of all ranks."""
        return max(self.plan.host_room, round(self.plan.host_peaks["step"] * 1.08))

    def sample(self, step: int, share: float) -> None:
        """What the samplers write meanwhile: a record of memory, and one of the machine."""
        for near in (0.6, 0.3, 0.0):
            sizes = self.sizes(max(share - near / self.microbatches, 0.0))
            self.window.add(step, sizes, self.fixed_bytes + self.moving_bytes)
        self.emit(self.window.record())
        self.emit(self.system(sizes))

    def system(self, sizes: Sizes) -> schema.System:
        return schema.System(
            cpu_percent=1400.0,
            rss_bytes=sizes["rss"] or 0,
            host_available_bytes=sizes["available"] or 0,
            host_total_bytes=self.host_bytes,
            swap_used_bytes=0,
            gpus=tuple(self.gpu(index, sizes) for index in range(self.ranks)),
        )

    def gpu(self, index: int, sizes: Sizes) -> schema.GpuSample:
        total = self.plan.machine.gpu_memory_bytes
        return schema.GpuSample(
            index=index,
            name="Tesla V100-PCIE-32GB",
            uuid=f"GPU-{index}",
            memory_used_bytes=total - (sizes["free"] or 0),
            memory_total_bytes=total,
            utilization_percent=97.0 - abs(self.draw.gauss(0, 1)),
            clock_mhz=1380 - 15 * self.draw.randrange(4),
            clock_max_mhz=1530,
            power_w=240.0 + self.draw.uniform(0, 10),
            temperature_c=66.0,
            pcie_generation=3,
            pcie_generation_max=3,
            pcie_width=16,
            pcie_width_max=16,
            pcie_rx_bytes_per_s=2.1e9,
            pcie_tx_bytes_per_s=10.9e9,
        )

    # ---- steps

    def started(self, run_id: str) -> None:
        plan: dict[str, Any] = {
            "device": f"cuda:{self.rank}",
            "precision": "fp16",
            "why": "",
            "gpu_uuid": f"GPU-{self.rank}",
            "calibrated_gbps": {"h2d": 12.4, "d2h": 12.9},
            "update_rule": "AdamW",
            "threads": 16,
            "waiting": "as OpenMP does",
        }
        self.emit(
            schema.RunStarted(
                run_id=run_id,
                name=self.job.name,
                pid=4711 + self.rank,
                num_params=self.job.num_params,
                config=as_tables(self.job),
                plan=plan | plan_facts(self.plan),
                backend={"name": "native", "isa": "avx512", "threads": 16, "reason": ""},
                machine={"host": "v100-box", "cpu": "Intel Xeon", "gpus": []},
                world_size=self.ranks,
                peak_flops=self.plan.machine.peak_tflops * 1e12 * self.ranks,
            )
        )
        self.emit(self.memory(0))

    def step(self, number: int, slower: float, own_ms: tuple[float, ...]) -> None:
        """One step of `slower` times the predicted seconds."""
        planned = self.plan.prediction
        began_s, seconds = self.now_s, planned.seconds * slower
        self.pass_time(number, began_s, seconds)
        self.now_s = began_s + seconds
        self.progress.count(tokens=self.job.batch_tokens, skipped=False, seconds=seconds)
        loss = 3.0 + 7.0 * math.exp(-number / 150) + self.draw.gauss(0, 0.02)
        self.emit(
            step_record(
                number,
                self.progress,
                self.report(number, slower),
                self.clock(seconds),
                StepStats(loss, own_ms, False, False, False),
                lr=self.job.optim.lr * min(number / self.job.optim.warmup_steps, 1.0),
                rank=self.rank,
                batch_tokens=self.job.batch_tokens,
                scaling=True,
                mfu=(planned.mfu or 0.0) / slower,
                peaks=(self.fixed_bytes + self.moving_bytes, sum(self.plan.host.values())),
            )
        )
        if number % SAMPLED_EVERY == 2:
            self.timeline(number, seconds, slower)
        if number % SAVED_EVERY == 0:
            self.between(number)

    def pass_time(self, number: int, began_s: float, seconds: float) -> None:
        while self.next_sample_s < began_s + seconds:
            self.now_s = max(self.next_sample_s, began_s)
            self.sample(number, (self.now_s - began_s) / seconds)
            self.next_sample_s += self.sample_s

    def report(self, number: int, slower: float) -> StepReport:
        planned = self.plan.prediction
        return StepReport(
            step=number,
            skipped=False,
            grad_norm=1.0 + self.draw.random(),
            clip_coef=1.0,
            loss_scale=65536.0,
            micro_steps=self.microbatches,
            early_buckets=0,
            speculation_hit=None,
            exposed_ms=1e3 * planned.exposed * slower,
            busy_ms={lane: 1e3 * busy * slower for lane, busy in planned.busy_s.items()},
            d2h_bytes=planned.d2h_bytes,
            h2d_bytes=planned.h2d_bytes,
            comm_bytes=planned.comm_bytes,
        )

    def clock(self, seconds: float) -> StepClock:
        """A clock that has measured a step of so many seconds."""
        shares = {"data": 0.001, "forward": 0.25, "backward": 0.74, "optimizer": 0.009}
        phases = {phase: 1e3 * seconds * share for phase, share in shares.items()}
        return StepClock(phases)

    def timeline(self, number: int, seconds: float, slower: float) -> None:
        """The spans of a sampled step, whose sums are those of its record, and its memory."""
        for span in spans(self.plan, self.microbatches, slower):
            self.emit(replace(span, step=number))
        times = [i / 200 for i in range(200)]
        curve = [(1e3 * seconds * share, self.sizes(share)["allocated"] or 0) for share in times]
        at_ms, kib = zip(*thinned(curve), strict=True)
        self.emit(schema.StepMemory(step=number, tier="device", at_ms=at_ms, kib=kib))

    def between(self, number: int) -> None:
        """Evaluation and checkpoint."""
        self.progress.val_loss = 3.1 + 7.0 * math.exp(-number / 150)
        self.emit(schema.Eval(step=number, val_loss=self.progress.val_loss, duration_ms=9e4))
        if self.rank == 0:
            path, size = f"checkpoints/step-{number:08d}", self.plan.checkpoint_bytes
            self.emit(schema.Checkpoint(step=number, path=path, num_bytes=size, duration_ms=6e4))

    def ended(self) -> None:
        self.emit(
            schema.RunEnded(
                status="done",
                step=self.progress.step,
                val_loss=self.progress.val_loss,
                duration_s=self.now_s - BEGIN_S,
            )
        )


def spans(plan: Plan, microbatches: int, slower: float) -> Iterator[schema.LaneSpan]:
    """Forward and backward of every block and microbatch; gradients follow, and updates come back
    as weights before the first forward. Each lane works as long as the step's record says, compute
    waits for the rest, and what would end after the step is what the step before has left: all
    steps are alike."""
    blocks = len(plan.placed.spec.blocks)
    busy_ms = {lane: 1e3 * slower * busy for lane, busy in plan.prediction.busy_s.items()}
    step_ms = 1e3 * slower * plan.prediction.seconds
    wait_ms = 1e3 * slower * plan.prediction.exposed
    compute_ms = busy_ms["compute"] / microbatches
    each_ms = (step_ms - wait_ms) / microbatches
    forward_ms, backward_ms = compute_ms / 4 / blocks, compute_ms * 3 / 4 / blocks
    down_ms = busy_ms.get("d2h", 0.0) / microbatches / blocks
    host_ms = busy_ms.get("host", 0.0) / microbatches / blocks
    up_ms = busy_ms.get("h2d", 0.0) / blocks
    yield _span(schema.WAIT, "host", 0.0, wait_ms)
    for micro in range(microbatches):
        first_ms = wait_ms + micro * each_ms
        for block in range(blocks):
            yield _span("compute", f"forward {block}", first_ms + block * forward_ms, forward_ms)
            back_ms = first_ms + each_ms / 4 + (blocks - 1 - block) * backward_ms
            yield _span("compute", f"backward {block}", back_ms, backward_ms)
            down_at_ms = back_ms + backward_ms
            yield from _within("d2h", f"d2h {block}", down_at_ms, down_ms, step_ms)
            yield from _within("host", f"add {block}", down_at_ms + down_ms, host_ms, step_ms)
    end_ms = math.inf
    for block in reversed(range(blocks)):  # each before its forward, and before the next one's
        end_ms = min(end_ms, wait_ms + block * forward_ms)
        end_ms -= up_ms
        yield from _within("h2d", f"h2d {block}", end_ms, up_ms, step_ms)


def _within(
    lane: str, name: str, start_ms: float, spent_ms: float, step_ms: float
) -> Iterator[schema.LaneSpan]:
    """A span, of which the part outside of the step is that of the step before or after."""
    start_ms %= step_ms
    inside_ms = min(spent_ms, step_ms - start_ms)
    yield _span(lane, name, start_ms, inside_ms)
    if spent_ms > inside_ms:
        yield _span(lane, name, 0.0, spent_ms - inside_ms)


def _span(lane: str, name: str, start_ms: float, spent_ms: float) -> schema.LaneSpan:
    return schema.LaneSpan(
        step=0, lane=lane, name=name, start_ms=round(start_ms, 3), duration_ms=round(spent_ms, 3)
    )


def generate(
    path: Path,
    *,
    ranks: int = 1,
    steps: int = 2000,
    sample_s: float = 60.0,
    host: str = "v100-box",
    end_s: float | None = None,
    seed: int = 0,
) -> Path:
    """Make the folder of a run, and return it.

    Args:
        sample_s: between records of memory and of the machine; a real log has them every 2 and 5 s.
        host: of run.json; another than this one's says nothing about its process.
        end_s: when the last step ended, and the run goes on; None: it ended, long ago.
    """
    job = replace_steps(job_files.load(JOB), steps)
    name, machine = find(str(job.device.machine))
    plan = make(job, name, replace(machine, gpus=max(ranks, machine.gpus)), ranks)
    begin_s = BEGIN_S
    draw = random.Random(seed)
    slower = [draw.gauss(1.0, 0.01) for _ in range(steps)]
    if end_s is not None:
        begin_s = end_s - plan.prediction.seconds * sum(slower)
    with RunFolder.new(path.parent, job.name, path) as folder:
        folder.begin("", "")
        folder.write_run({"name": job.name, "ranks": ranks, "host": host})
        for rank in range(ranks):
            _write_rank(folder, job, plan, rank, ranks, slower, begin_s, sample_s, end_s is None)
        folder.keep()
    return path


def _write_rank(
    folder: RunFolder,
    job: Config,
    plan: Plan,
    rank: int,
    ranks: int,
    slower: list[float],
    begin_s: float,
    sample_s: float,
    ends: bool,
) -> None:
    writer = EventWriter(rank, clock=lambda: made.now_s)
    made = GeneratedRank(
        job, plan, rank, ranks, writer, random.Random(rank), sample_s, begin_s,
        next_sample_s=begin_s,
    )  # fmt: skip
    writer.open(folder.events(rank))
    made.started(folder.run_id)
    for number, factor in enumerate(slower, start=1):
        own_ms = tuple(1e3 * plan.prediction.seconds * factor for _ in range(ranks))
        made.step(number, factor, own_ms)
    if ends:
        made.ended()
    writer.close()


def replace_steps(job: Config, steps: int) -> Config:
    return replace(job, train=replace(job.train, steps=steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sample-s", type=float, default=60.0)
    chosen = parser.parse_args()
    generate(chosen.folder, ranks=chosen.ranks, steps=chosen.steps, sample_s=chosen.sample_s)


if __name__ == "__main__":
    main()
