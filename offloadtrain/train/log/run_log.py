"""The log of a run: one record per event, and console lines.

`RunLog` is the interface for the trainer. `Pace` estimates the time left, and `Hindsight` compares
the plan with measurements. The first record of a start describes the job, the device and the plan.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any

import torch

from offloadtrain.config.batch_split import group_of, part_of
from offloadtrain.config.job import Config, as_tables
from offloadtrain.config.model_shape import flops_per_token
from offloadtrain.config.sections import TrainConfig
from offloadtrain.config.units import format_bytes, format_count, format_duration
from offloadtrain.engine import StepReport
from offloadtrain.events import oom_kills, schema
from offloadtrain.events.alerts import Alerts
from offloadtrain.events.control import Request
from offloadtrain.events.schema import MemoryRow, PlanRow
from offloadtrain.events.time_left import Pause, seconds_left
from offloadtrain.events.writer import EventWriter
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.peak_flops import peak_flops
from offloadtrain.hardware.telemetry import Sampler, SystemInfo, probe
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.plan.automatic import with_decisions_of
from offloadtrain.plan.plan import PROCESS, Plan
from offloadtrain.plan.run_cost import run_cost
from offloadtrain.runtime import kernels
from offloadtrain.runtime.device_memory import bandwidth
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.lanes import Timeline
from offloadtrain.step.layout.block_spec import BucketSpec
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.save import Saved
from offloadtrain.train.log.command_hooks import CommandHooks
from offloadtrain.train.log.console import Console, format_step
from offloadtrain.train.log.loggers import Loggers, Source
from offloadtrain.train.log.run_memory import RunMemory, gpu_uuid
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.signals import StoppedEarlyError

_RECENT_STEPS = 50


class _RunStart:
    """The start of a run, new or resumed.

    Attributes:
        hindsight: compares the plan with the measured steps.
        calibrated_gbps: measured bandwidth of the bus by direction; empty on the CPU.
        peak_flops: peak FLOP/s of the devices of all ranks; None if unknown.
    """

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        context: TrainingContext,
        machine: SystemInfo,
        step: int,
        waiting: str,
    ) -> None:
        """Read the device's properties and measure its bus.

        Args:
            config: the job of all ranks.
            step: completed optimizer steps.
            waiting: wait policy of torch's threads; "" for OpenMP's default.
        """
        self._run, self._config, self.context, self._machine = run, config, context, machine
        self._step, self._waiting = step, waiting
        measured_rates = config.device.machine.endswith(".toml")
        self.hindsight = Hindsight(context.plan, measured_rates=measured_rates)
        self._device_name, device = machine.cpu, context.optimizer.device
        self.calibrated_gbps: dict[str, float] = {}
        if device.type == "cuda":
            measured = bandwidth(device)
            self.calibrated_gbps = {"h2d": measured.h2d_gbps, "d2h": measured.d2h_gbps}
            self._device_name = torch.cuda.get_device_name(device)
        flops = peak_flops(self._device_name, context.precision)
        self.peak_flops = flops and flops * context.ranks.size

    def record(self) -> schema.RunStarted:
        """Return the first record of this start: the job, the device and the planned bytes."""
        config, context, device = self._config, self.context, self.context.optimizer.device
        ranks = context.ranks.world_size
        plan: dict[str, Any] = {
            "device": str(device),
            "precision": context.precision,
            "why": context.why,
        }
        if device.type == "cuda":
            plan |= {"gpu_uuid": gpu_uuid(device), "calibrated_gbps": self.calibrated_gbps}
        places = {
            "stage": context.plan.stage_names,
            "group": group_of(config, context.ranks.size, context.ranks.rank),
            "part": part_of(config, context.ranks.rank),
        }
        plan |= {key: place for key, place in places.items() if place}
        plan |= plan_facts(context.plan)
        plan |= {
            "update_rule": type(update_rule(config.optim)).__name__,
            "threads": torch.get_num_threads(),
            "waiting": self._waiting or "as OpenMP does",
        }
        return schema.RunStarted(
            run_id=self._run.run_id,
            name=config.name,
            num_params=config.num_params,
            pid=os.getpid(),
            config=as_tables(with_decisions_of(config, context.plan.job)),
            plan=plan,
            backend=asdict(kernels.backend()),
            machine=asdict(self._machine),
            start_step=self._step,
            world_size=ranks,
            nproc=ranks if context.plan.machine.gpus == ranks else 1,
            peak_flops=self.peak_flops,
        )

    def introduction(self) -> str:
        """Return the lines printed at the start of a run."""
        config, context, backend = self._config, self.context, kernels.backend()
        threads = f"{torch.get_num_threads()} threads {self._waiting}".rstrip()
        why = f" ({context.why})" if context.why else ""
        is_auto = config.offload.update == "auto"
        mode = f"; update = auto: {context.plan.job.offload.update} as planned" if is_auto else ""
        return (
            f"{config.name}: {format_count(config.num_params)} parameters, "
            f"{format_count(config.batch_tokens)} tokens per step, {config.train.steps} steps\n"
            f"compute: {self._device_name}, {context.precision}{why}, {threads}; updates: "
            f"{backend.name} {backend.isa}, {backend.threads} threads{mode}\n"
            f"data: {format_count(len(context.train_tokens))} tokens to train on"
            + (f", {format_count(len(context.val_tokens))} held out" if context.val_tokens else "")
            + f"\n{run_cost(context.plan, done=self._step).text}\nrun: {self._run.path}"
            + (f"; resuming after step {self._step}" if self._step else "")
        )

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield (code, message) of problems that are known before the first step."""
        documents, tokens = self.context.batches.cut_documents()
        if documents:
            yield (
                "documents-cut",
                f"{format_count(documents)} documents are longer than data.seq_len = "
                f"{self._config.data.seq_len} and lose their ends, {format_count(tokens)} of "
                f"{format_count(len(self.context.train_tokens))} tokens: raise data.seq_len, or "
                'set data.packing = "isolated"',
            )
        if problems := self.context.plan.problems:
            yield "plan", f"according to the plan the job may not fit: {' '.join(problems)}"


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the plan's part of `RunStarted.plan`: bytes by tier and owner, and times."""
    host = {owner: size for owner, size in plan.host.items() if owner != PROCESS}
    return {
        "machine": plan.name,
        "memory": {"device": plan.engine_device, "host": host},
        "process_bytes": plan.process_bytes,
        "activations": plan.activations.owners(),
        "step": asdict(plan.prediction),
        "adam_bytes_per_step": sum(_update_bytes(placed.spec) for placed in plan.placements),
    }


def _update_bytes(spec: StepSpec) -> int:
    """Return the bytes that updates read and write in one rank's host memory in a step."""

    def of_one(bucket: BucketSpec) -> float:
        gradient = 4 if spec.holds_sum(bucket) else bucket.weight_bytes
        moved = bucket.format.traffic_per_param(bucket.moments, bucket.weight_bytes, gradient)
        return moved * bucket.params

    return round(sum(map(of_one, spec.buckets)) / spec.ranks)


class Pace:
    """Recent durations of steps, evaluations and checkpoint pauses; estimates the time left."""

    def __init__(self, train: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._train, self._clock = train, clock
        self._step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluation_s = self._save_s = self._spent_s = 0.0
        self._since_s: float | None = None

    @property
    def is_first_step(self) -> bool:
        return not self._step_s

    def begin_step(self, done: int) -> None:
        """Measure how long a checkpoint after step `done` has delayed the run since then."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None and self._is_due(self._train.checkpoint_every, done):
            evaluated = self._is_due(self._train.eval_every, done)
            paused_s = self._clock() - since_s - (self._evaluation_s if evaluated else 0.0)
            self._save_s = max(paused_s, 0.0)

    def end_step(self, seconds: float) -> None:
        self._step_s.append(seconds)
        self._spent_s += seconds
        self._since_s = self._clock()

    def evaluated(self, seconds: float) -> None:
        self._evaluation_s = seconds

    def seconds_left(self, step: int) -> float:
        """Return the seconds from the end of `step` to the end of the run; NaN before the first."""
        if self.is_first_step:
            return math.nan
        evaluations = Pause(self._train.eval_every, self._evaluation_s)
        saves = Pause(self._train.checkpoint_every, self._save_s)
        usual_s = statistics.median(self._step_s)
        left_s = seconds_left(step, self._train.steps, usual_s, (evaluations, saves))
        limit_s = self._train.max_s
        return min(left_s, max(limit_s - self._spent_s, 0.0)) if limit_s else left_s

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0


APART = 0.10
"""Relative difference above which a warning is raised."""

_WARM_STEPS, _STEPS = 3, 200
_LEAST_S = 1e-3
"""Shortest time of a compared lane; a shorter one is launch overhead, which a plan ignores."""


class Hindsight:
    """Records a run's steps and compares them with its plan."""

    def __init__(self, plan: Plan, *, measured_rates: bool) -> None:
        """`measured_rates`: the plan uses measured rates, so times are compared too."""
        self._plan = plan
        self._measured_rates = measured_rates
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._busy: deque[Mapping[str, float]] = deque(maxlen=_STEPS)
        self._cold = _WARM_STEPS

    def step(self, report: StepReport, step_ms: float) -> None:
        """Record a step; the first few are warm-up."""
        if self._cold:
            self._cold -= 1
            return
        self._steps.append(step_ms / 1e3)
        self._busy.append(report.busy_ms)

    def rows(self, owners: Sequence[MemoryRow]) -> tuple[PlanRow, ...]:
        """Return one row per tier with bytes and, after the first steps, rows with times."""
        plan, rows = self._plan, []
        host = {owner: size for owner, size in plan.host.items() if owner != PROCESS}
        device = plan.engine_device if plan.machine.on_cpu else plan.device
        for tier, planned_bytes in ((Tier.HOST, host), (Tier.DEVICE, device)):
            measured = sum(row.peak_bytes for row in owners if row.tier == tier.value)
            row = PlanRow(f"{tier.value} bytes", sum(planned_bytes.values()), measured, "bytes")
            rows.append(row)
        if self._steps:
            predicted = plan.prediction
            rows.append(PlanRow("step", predicted.seconds, statistics.median(self._steps), "s"))
            for lane, planned in sorted(predicted.busy_s.items()):
                measured_s = statistics.median(busy.get(lane, 0.0) for busy in self._busy) / 1e3
                if planned > _LEAST_S and measured_s > 0:
                    rows.append(PlanRow(f"{lane} lane", planned, measured_s, "s"))
        return tuple(rows)

    def compare(self, rows: Sequence[PlanRow]) -> tuple[str, list[str]]:
        """Return a line with all rows, and descriptions of the rows that differ too much."""
        shown, apart = [], []
        for row in rows:
            ratio = row.measured / row.planned if row.planned else 1.0
            shown.append(f"{row.what} {ratio:.2f}")
            if abs(ratio - 1) > APART and (row.unit == "bytes" or self._measured_rates):
                form = format_bytes if row.unit == "bytes" else "{:.3g} s".format
                planned, measured = form(row.planned), form(row.measured)
                apart.append(f"{row.what}: planned {planned}, measured {measured}")
        return f"measured / planned ({self._plan.name}): {', '.join(shown)}", apart


def step_record(
    number: int,
    progress: Progress,
    report: StepReport,
    clock: StepClock,
    stats: StepStats,
    *,
    lr: float,
    rank: int,
    batch_tokens: int,
    scaling: bool,
    mfu: float | None,
    peaks: tuple[int, int],
) -> schema.Step:
    """Return the record of a step.

    Args:
        batch_tokens: tokens of all ranks in a step.
        scaling: True if the loss is scaled.
        peaks: peak bytes on (device, host) within the step.
    """
    many = len(stats.own_ms) > 1
    return schema.Step(
        step=number,
        loss=stats.loss,
        lr=lr,
        tokens=progress.tokens,
        grad_norm=report.grad_norm,
        clip_coef=report.clip_coef,
        loss_scale=report.loss_scale if scaling else None,
        skipped=report.skipped,
        tokens_per_s=1e3 * batch_tokens / clock.total_ms,
        step_ms=clock.total_ms,
        exposed_ms=report.exposed_ms,
        busy_ms=dict(report.busy_ms),
        d2h_bytes=report.d2h_bytes,
        h2d_bytes=report.h2d_bytes,
        comm_bytes=report.comm_bytes,
        disk_read_bytes=report.disk_read_bytes,
        disk_written_bytes=report.disk_written_bytes,
        own_ms=stats.own_ms[rank] if many else 0.0,
        ranks_ms=stats.own_ms if many and rank == 0 else (),
        early_buckets=report.early_buckets,
        speculation_hit=report.speculation_hit,
        mfu=mfu,
        device_peak_bytes=peaks[0],
        host_peak_bytes=peaks[1],
        **{f"{phase}_ms": spent for phase, spent in clock.milliseconds.items()},
    )


_TIMELINE_EVERY_S = 10.0
_TIMELINE_EVERY_STEPS = 20  # a sampled step times every operation: at most 1 step in 20


class _StartClock:
    """Time since a start began, and its durations by activity."""

    def __init__(self) -> None:
        self._began_s, self._spent_before_s = time.monotonic(), dict(HEARTBEAT.spent_s)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def set_up(self) -> schema.SetUp:
        """Return the durations of this start before its first step."""
        before = self._spent_before_s
        parts = {part: s - before.get(part, 0.0) for part, s in HEARTBEAT.spent_s.items()}
        longest = {part: spent_s for part, spent_s in parts.items() if spent_s > 0}
        return schema.SetUp(duration_s=self.seconds, parts_s=longest)


class _Timelines:
    """Decides which steps get a timeline in the log; `unlogged` is a step's timeline to be
    logged."""

    def __init__(self) -> None:
        self._not_before_s, self._not_before_step = 0.0, 2
        self._follows_next = False
        self.unlogged: tuple[int, Timeline] | None = None

    def before_step(self, done: int, optimizer: AnyOptimizer) -> bool:
        """Request a timeline of the next step, at most every _TIMELINE_EVERY_S seconds and
        _TIMELINE_EVERY_STEPS steps. Return True if the step that a timeline covers begins now."""
        sampled = time.monotonic() >= self._not_before_s and done >= self._not_before_step
        if sampled:
            self._not_before_s = time.monotonic() + _TIMELINE_EVERY_S
            self._not_before_step = done + _TIMELINE_EVERY_STEPS
            optimizer.sample_timeline()
        if optimizer.samples_late:
            sampled, self._follows_next = self._follows_next, sampled
        return sampled


class RunLog:
    """Turns a run's progress into events and console lines. Leaving the context closes it.

    Attributes:
        memory: bytes by owner; valid once training has started.
    """

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        console: Console,
        rank: int = 0,
        *,
        run_commands: bool = False,
    ) -> None:
        """`rank`: the rank that this log belongs to. Rank 0 evaluates alerts on steps, and every
        rank those on its machine. `run_commands`: on rank 0, run the job's commands for alerts and
        the end."""
        self._run, self._config, self._console = run, config, console
        self._rank = rank
        self._start_clock = _StartClock()
        self._writer = EventWriter(rank, say=console.say)
        self._loggers = Loggers(lambda message: self.warn("logger-failed", message))
        self._alerts = Alerts(self._alert, time.monotonic, config.train.spike_score)
        self._hooks = (
            CommandHooks(config, run.path, lambda message: self.warn("command-failed", message))
            if run_commands and rank == 0
            else None
        )
        self._sampler = Sampler(self._sampled)
        self.memory = RunMemory(self._writer.emit)
        self._progress = Progress()
        self._pace = Pace(config.train)
        self._timelines = _Timelines()
        self._start: _RunStart | None = None
        """None until training has started."""

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, StoppedEarlyError):
            self.ended("stopped", str(error))
        elif error is not None:
            self.ended("failed", f"{type(error).__name__}: {error}")
        self._console.end_line()
        self._close_samplers()
        self._writer.close()
        if (refused := self._writer.error) is not None:
            self._console.say(
                f"warning: the event log is incomplete: {self._writer.dropped} records were lost "
                f"({refused.strerror})"
            )

    # ---- start and end

    def started(self, context: TrainingContext, progress: Progress, waiting: str = "") -> None:
        """Log that training starts from `progress.step`.

        Args:
            waiting: wait policy of torch's threads; "" for OpenMP's default.
        """
        self._progress, optimizer = progress, context.optimizer
        config, machine = self._config, probe(self._sampler.nvml)
        start = _RunStart(self._run, config, context, machine, progress.step, waiting)
        self._alerts.calibrated_gbps = start.calibrated_gbps
        if self._rank == 0:
            killed = oom_kills.count(cgroup.oom_counters())
            facts = {"name": config.name, "num_params": config.num_params}
            self._run.write_run(facts | {"ranks": context.ranks.size, "oom_kills": killed})
        self._writer.open(self._run.events(self._rank))
        if self._rank == 0:
            self._loggers.open(self._run.path, config, progress.step)
        self._writer.emit(start.record())
        self._writer.emit(self._start_clock.set_up())
        self.memory.begin(optimizer, nvml=self._sampler.nvml, warn=self.warn)
        self._console.say(start.introduction())
        self._start = start
        for code, message in start.warnings():
            self.warn(code, message)
        if optimizer.device.type == "cuda" and config.offload.memory.pin and not optimizer.pinned:
            self._alerts.standing(
                "not-pinned",
                "host memory could not be page-locked: transfers are slow and do not overlap; "
                "raise `ulimit -l` or the container's limit",
            )

    def ended(self, status: str, message: str = "") -> None:
        """Log the last record of this start."""
        if status != "failed":  # after a failure the lanes may never finish
            self._log_timeline()
        if self._start is not None:
            rows = self._start.hindsight.rows(self.memory.rows())
            compared, apart = self._start.hindsight.compare(rows)
            self._writer.emit(schema.PlanCompared(rows=rows, message=compared))
            self._console.say(compared)
            if apart:
                self.warn("plan-differs", f"not as planned: {'; '.join(apart)}")
        self._close_samplers()  # before a wait that must not count as a stalled step
        if self._config.log.to:
            self.doing("ending the loggers")
        with HEARTBEAT.outside():  # a service may take long
            self._loggers.close(failed=status == "failed")
        self._writer.emit(self._sampler.sample())
        self._emit_end(status, message)

    def _close_samplers(self) -> None:
        self._sampler.close()
        self.memory.sampler.close()

    def _emit_end(self, status: str, message: str) -> None:
        end = schema.RunEnded(
            status=status,
            step=self._progress.step,
            message=message,
            val_loss=self._progress.val_loss,
            duration_s=self._start_clock.seconds,
        )
        self._writer.emit(end)
        self._writer.flush()  # before the command, so that it sees the end in the log
        if self._hooks is not None:
            self._hooks.end(end)
            with HEARTBEAT.outside():  # commands may run until their time limit
                self._hooks.close()

    # ---- steps

    def doing(self, what: str) -> None:
        """Set the current activity, which is printed if it takes long."""
        self._console.doing(what)

    def before_step(self, optimizer: AnyOptimizer) -> None:
        """Begin to record a step; `_Timelines.before_step` decides whether it has a timeline."""
        self._pace.begin_step(self._progress.step)
        compiles = self._pace.is_first_step and kernels.backend().name == "numba"
        why = " (Numba compiles the CPU kernels)" if compiles else ""
        self.doing(f"step {self._progress.step + 1}{why}")
        follow = self._timelines.before_step(self._progress.step, optimizer)
        self.memory.sampler.step_begins(self._progress.step + 1, follow=follow)

    def step(
        self,
        number: int,
        progress: Progress,
        report: StepReport,
        clock: StepClock,
        stats: StepStats,
        *,
        lr: float,
    ) -> None:
        """Log an attempted step; `number` counts from 1, and a skipped step repeats it."""
        start, config = self._start, self._config
        assert start is not None
        tokens_per_s = 1e3 * config.batch_tokens / clock.total_ms
        flops, peak = flops_per_token(config.model, config.data.seq_len), start.peak_flops
        step = step_record(
            number,
            progress,
            report,
            clock,
            stats,
            lr=lr,
            rank=self._rank,
            batch_tokens=config.batch_tokens,
            scaling=start.context.precision == "fp16",
            mfu=None if peak is None else tokens_per_s * flops / peak,
            peaks=self.memory.end_step(report),
        )
        self._tell(step)
        self._keep_run()
        if self._rank == 0:
            self._alerts.step(step)
        self._log_timeline()
        if report.sampled is not None:
            self._timelines.unlogged = number, report.sampled
        if rows := self.memory.news():
            self._tell(schema.Memory(step=number, rows=rows))
        self._pace.end_step(clock.total_ms / 1e3)
        start.hindsight.step(report, clock.total_ms)
        device_bytes, host_bytes = self.memory.engine_bytes()
        line = partial(
            format_step,
            step,
            steps=config.train.steps,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            eta_s=self._pace.seconds_left(step.step),
            now_s=time.time(),
        )
        self._console.step(line, force=number in (1, config.train.steps))

    def _log_timeline(self) -> None:
        """Log the timeline of a sampled step. Called one step later, when reading it does not
        wait."""
        if self._timelines.unlogged is None:
            return
        (number, timeline), self._timelines.unlogged = self._timelines.unlogged, None
        for interval in timeline.intervals:
            self._writer.emit(schema.LaneSpan(step=number, **asdict(interval)))

    def _keep_run(self) -> None:
        """Make the run folder permanent; if the link `latest` cannot be set, the run continues."""
        try:
            self._run.keep()
        except OSError as error:
            self.warn("latest-failed", f"runs_dir/latest does not point to this run: {error}")

    def _tell(self, event: Source) -> None:
        """Log an event, and pass its scalars to the loggers."""
        self._writer.emit(event)
        self._loggers.emit(event)

    # ---- between steps

    def evaluated(self, progress: Progress, tokens: int, duration_ms: float) -> None:
        assert progress.val_loss is not None
        self._pace.evaluated(duration_ms / 1e3)
        self._tell(
            schema.Eval(
                step=progress.step,
                val_loss=progress.val_loss,
                tokens=tokens,
                duration_ms=duration_ms,
            )
        )
        self._console.say(f"step {progress.step}: validation loss {progress.val_loss:.4f}")
        if not math.isfinite(progress.val_loss):
            message = f"the validation loss of step {progress.step} is {progress.val_loss}"
            self.warn("loss-not-finite", message, progress.step)

    def checkpoint_saved(self, step: int, saved: Saved) -> None:
        self._keep_run()
        self._alerts.checkpoint(saved.num_bytes)
        self._writer.emit(
            schema.Checkpoint(
                step=step,
                path=str(saved.path),
                num_bytes=saved.num_bytes,
                duration_ms=1e3 * saved.seconds,
            )
        )
        self._console.say(
            f"step {step}: checkpoint of {format_bytes(saved.num_bytes)} saved "
            f"in {format_duration(saved.seconds)}"
        )

    def checkpoint_failed(self, step: int, error: CheckpointError) -> None:
        path = self._run.checkpoints
        self._writer.emit(schema.Checkpoint(step=step, path=str(path), state="failed"))
        self.warn("checkpoint-failed", f"training continues without a checkpoint: {error}", step)

    def control(self, request: Request, state: str, step: int) -> None:
        """Log the state of a request; `state` is that of `schema.Control`."""
        text = request.refused or request.message
        self._writer.emit(
            schema.Control(
                id=request.id, action=request.action, state=state, message=text, step=step
            )
        )
        self._console.say(f"request: {request.action} {state}{f': {text}' if text else ''}")

    def decided(self, sentence: str, step: int) -> None:
        """Log and print a decision that the run made from its measured steps, unless ""."""
        if sentence:
            self._writer.emit(schema.Decided(step=step, message=sentence))
            self._console.say(f"step {step}: {sentence}")

    def sampled(self, step: int, prompt: str, text: str) -> None:
        self._writer.emit(schema.Sample(step=step, prompt=prompt, text=text))

    def hung(self, report: str) -> None:
        """Log the report of a hang and the end of the run. Called from another thread."""
        step = self._progress.step
        self._writer.emit(schema.Warning_(code="hung", message=report, step=step))
        self._emit_end("failed", report.partition("\n")[0])

    def warn(self, code: str, message: str, step: int | None = None) -> None:
        """Log and print a warning; `code` is short and stable."""
        self._writer.emit(schema.Warning_(code=code, message=message, step=step))
        self._console.say(f"warning: {message}")

    def _sampled(self, event: schema.Event) -> None:
        """Log a sample, on the sampler's thread."""
        self._writer.emit(event)
        if isinstance(event, schema.System):
            try:
                free_bytes = shutil.disk_usage(self._run.checkpoints).free
            except OSError:
                free_bytes = None
            self._alerts.system(event, free_bytes)

    def _alert(self, alert: schema.Alert) -> None:
        self._writer.emit(alert)
        if self._hooks is not None:
            self._hooks.alert(alert)
        sign = "alert" if alert.state == "raised" else "alert over"
        self._console.say(f"{sign}: {alert.code}: {alert.message}")
