"""The log of a run: one record per event, and console lines.

`RunLog` is what the trainer calls. `Pace` estimates the time left, and `Hindsight` compares the
plan with what was measured.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType

import torch

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import flops_per_token
from offloadtrain.config.sections import TrainConfig
from offloadtrain.config.units import format_bytes, format_duration
from offloadtrain.engine import StepReport
from offloadtrain.events import oom_kills, schema
from offloadtrain.events.alerts import Alerts
from offloadtrain.events.control import Request
from offloadtrain.events.schema import MemoryRow, PlanRow
from offloadtrain.events.time_left import Pause, seconds_left
from offloadtrain.events.writer import EventWriter
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.hardware.telemetry import Sampler, probe
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.plan.plan import Plan
from offloadtrain.runtime import kernels
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.lanes import Timeline
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.save import Saved
from offloadtrain.train.log.command_hooks import CommandHooks
from offloadtrain.train.log.console import Console, StepLine
from offloadtrain.train.log.loggers import Loggers, Source
from offloadtrain.train.log.run_memory import RunMemory
from offloadtrain.train.log.run_start import RunStart
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.signals import StoppedEarlyError

_RECENT_STEPS = 50


class Pace:
    """Steps, evaluations and pauses for checkpoints, as they were last."""

    def __init__(self, train: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._train, self._clock = train, clock
        self._step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluation_s = self._save_s = 0.0
        self._since_s: float | None = None

    @property
    def is_first_step(self) -> bool:
        return not self._step_s

    def begin_step(self, done: int) -> None:
        """Note what a checkpoint after step `done` has held the run up since then."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None and self._is_due(self._train.checkpoint_every, done):
            evaluated = self._is_due(self._train.eval_every, done)
            paused_s = self._clock() - since_s - (self._evaluation_s if evaluated else 0.0)
            self._save_s = max(paused_s, 0.0)

    def end_step(self, seconds: float) -> None:
        self._step_s.append(seconds)
        self._since_s = self._clock()

    def evaluated(self, seconds: float) -> None:
        self._evaluation_s = seconds

    def seconds_left(self, step: int) -> float:
        """Return the time from the end of `step` to the end of the run; NaN before a step."""
        if self.is_first_step:
            return math.nan
        evaluations = Pause(self._train.eval_every, self._evaluation_s)
        saves = Pause(self._train.checkpoint_every, self._save_s)
        usual_s = statistics.median(self._step_s)
        return seconds_left(step, self._train.steps, usual_s, (evaluations, saves))

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0


APART = 0.10
"""Relative difference above which a warning is raised."""

_WARM_STEPS, _STEPS = 3, 200
_LEAST_S = 1e-3
"""Least time of a compared lane; less is its launches, which a plan does not count."""


class Hindsight:
    """Records a run's steps and compares them with its plan."""

    def __init__(self, plan: Plan, *, measured_rates: bool) -> None:
        """`measured_rates`: the plan's machine was measured, so times are compared too."""
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
        """Return rows of bytes by tier and, if there were steps, of times."""
        return (*self._bytes(owners), *self._times())

    def compare(self, rows: Sequence[PlanRow]) -> tuple[str, list[str]]:
        """Return a line for all rows, and the rows to warn of."""
        shown = ", ".join(f"{row.what} {_ratio(row):.2f}" for row in rows)
        apart = [
            f"{row.what}: planned {_value(row, row.planned)}, found {_value(row, row.measured)}"
            for row in rows
            if abs(_ratio(row) - 1) > APART and (row.unit == "bytes" or self._measured_rates)
        ]
        return f"found / planned ({self._plan.name}): {shown}", apart

    def _bytes(self, rows: Sequence[MemoryRow]) -> Iterator[PlanRow]:
        on_cpu = self._plan.machine.on_cpu
        host = {k: v for k, v in self._plan.host.items() if k != "Python, torch"}
        device = self._plan.engine_device if on_cpu else self._plan.device
        for tier, planned in ((Tier.HOST, host), (Tier.DEVICE, device)):
            measured = sum(row.peak_bytes for row in rows if row.tier == tier.value)
            yield PlanRow(f"{tier.value} bytes", sum(planned.values()), measured, "bytes")

    def _times(self) -> Iterator[PlanRow]:
        if not self._steps:
            return
        predicted = self._plan.prediction
        yield PlanRow("step", predicted.seconds, statistics.median(self._steps), "s")
        for lane, planned in sorted(predicted.busy_s.items()):
            measured = statistics.median(busy.get(lane, 0.0) for busy in self._busy) / 1e3
            if planned > _LEAST_S and measured > 0:
                yield PlanRow(f"{lane} lane", planned, measured, "s")


def _ratio(row: PlanRow) -> float:
    return row.measured / row.planned if row.planned else 1.0


def _value(row: PlanRow, value: float) -> str:
    return format_bytes(value) if row.unit == "bytes" else f"{value:.3g} s"


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
        batch_tokens: of all ranks.
        scaling: the loss is scaled.
        peaks: most bytes on the device and on the host within the step.
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


class RunLog:
    """Turns a run's progress into events and console lines. Leaving the context closes it."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        console: Console,
        rank: int = 0,
        *,
        run_commands: bool = False,
    ) -> None:
        """`rank`: owner of the log. Rank 0 evaluates alerts on steps, each rank those on its
        machine. `run_commands`: run those that the job names for alerts and the end."""
        self._run, self._config, self._console = run, config, console
        self._rank = rank
        self._began_s = time.monotonic()
        self._spent_before_s = dict(HEARTBEAT.spent_s)
        self._nvml = Nvml()
        self._writer = EventWriter(
            None,
            rank,
            on_error=lambda error: console.say(
                f"warning: the event log cannot be written ({error.strerror}): training "
                "continues, and writes are retried until the run ends"
            ),
            on_recovery=lambda lost: console.say(
                f"the event log is being written again; {lost} records were lost"
            ),
            on_removed=lambda message: console.say(f"warning: {message}"),
        )
        self._loggers = Loggers(lambda message: self.warn("logger-failed", message))
        self._alerts = Alerts(self._alert, time.monotonic, config.train.spike_score)
        self._hooks = (
            CommandHooks(config, run.path, lambda message: self.warn("command-failed", message))
            if run_commands
            else None
        )
        self._sampler = Sampler(self._sampled, nvml=self._nvml)
        self._memory: RunMemory | None = None
        self._progress = Progress()
        self._peak_flops: float | None = None
        self._pace = Pace(config.train)
        self._next_timeline, self._follows_next = (0.0, 2), False
        self._sampled_step: tuple[int, Timeline] | None = None
        """A step whose timeline is not logged yet."""
        self._optimizer: AnyOptimizer | None = None
        self._hindsight: Hindsight | None = None

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
        """Log the start of training from `progress.step` on.

        Args:
            waiting: the wait policy of torch's threads, if not OpenMP's default.
        """
        self._progress, self._optimizer = progress, context.optimizer
        config, machine = self._config, probe(self._nvml)
        start = RunStart(self._run, config, context, machine, progress.step, waiting)
        self._peak_flops = start.peak_flops
        self._alerts.calibrated_gbps = start.calibrated_gbps
        if self._rank == 0:
            killed = oom_kills.count(cgroup.oom_counters())
            facts = {"name": config.name, "num_params": config.num_params}
            self._run.write_run(facts | {"ranks": context.ranks.size, "oom_kills": killed})
        self._writer.open(self._run.events(self._rank))
        if self._rank == 0:
            self._loggers.open(self._run.path, config, progress.step)
        self._writer.emit(start.record())
        self._writer.emit(self._set_up())
        self._memory = RunMemory(
            context.optimizer,
            self._writer.emit,
            self._run.events(self._rank).with_suffix(".ring"),
            nvml=self._nvml,
            warn=self.warn,
        )
        self._console.say(start.introduction())
        self._hindsight = Hindsight(
            context.plan, measured_rates=config.device.machine.endswith(".toml")
        )
        for code, message in start.warnings():
            self.warn(code, message)
        optimizer = context.optimizer
        if optimizer.device.type == "cuda" and config.offload.memory.pin and not optimizer.pinned:
            self._alerts.standing(
                "not-pinned",
                "host memory could not be page-locked: transfers are slow and do not overlap; "
                "raise `ulimit -l` or the container's limit",
            )

    def _set_up(self) -> schema.SetUp:
        """Return the durations of this start before its first step."""
        before = self._spent_before_s
        parts = {part: s - before.get(part, 0.0) for part, s in HEARTBEAT.spent_s.items()}
        return schema.SetUp(
            duration_s=time.monotonic() - self._began_s,
            parts_s={part: spent_s for part, spent_s in parts.items() if spent_s > 0},
        )

    def ended(self, status: str, message: str = "") -> None:
        """Log the last record of this start."""
        if status != "failed":  # the lanes of a failed run may never end
            self._log_timeline()
        self._compare_with_plan()
        self._close_samplers()  # before a wait that is no stalled step
        if self._config.log.to:
            self.doing("ending the loggers")
        with HEARTBEAT.outside():  # a service takes as long as it takes
            self._loggers.close(failed=status == "failed")
        self._writer.emit(self._sampler.sample())
        self._emit_end(status, message)

    def _close_samplers(self) -> None:
        self._sampler.close()
        if self._memory is not None:
            self._memory.close()

    def _emit_end(self, status: str, message: str) -> None:
        end = schema.RunEnded(
            status=status,
            step=self._progress.step,
            message=message,
            val_loss=self._progress.val_loss,
            duration_s=time.monotonic() - self._began_s,
        )
        self._writer.emit(end)
        self._writer.flush()  # first, so that a command finds the end in the log
        if self._hooks is not None:
            self._hooks.end(end)
            with HEARTBEAT.outside():  # the job's commands take their time, within their limit
                self._hooks.close()

    def _compare_with_plan(self) -> None:
        if self._hindsight is None or self._optimizer is None:
            return
        rows = self._hindsight.rows(self.memory_rows())
        message, apart = self._hindsight.compare(rows)
        self._writer.emit(schema.PlanCompared(rows=rows, message=message))
        self._console.say(message)
        if apart:
            self.warn("plan-differs", f"not as planned: {'; '.join(apart)}")

    # ---- steps

    def doing(self, what: str) -> None:
        """Set the current activity, which is printed if it takes long."""
        self._console.doing(what)

    def before_step(self, optimizer: AnyOptimizer) -> None:
        """Request the lanes' timeline of this step, now and then."""
        self._pace.begin_step(self._progress.step)
        compiles = self._pace.is_first_step and kernels.backend().name == "numba"
        why = " (Numba compiles the CPU kernels)" if compiles else ""
        self.doing(f"step {self._progress.step + 1}{why}")
        follow, (not_before_s, not_before_step) = False, self._next_timeline
        if time.monotonic() >= not_before_s and self._progress.step >= not_before_step:
            later_step = self._progress.step + _TIMELINE_EVERY_STEPS
            self._next_timeline = (time.monotonic() + _TIMELINE_EVERY_S, later_step)
            optimizer.sample_timeline()
            follow = True
        if optimizer.samples_late:
            follow, self._follows_next = self._follows_next, follow
        if self._memory is not None:
            self._memory.step_begins(self._progress.step + 1, follow=follow)

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
        tokens_per_s = 1e3 * self._config.batch_tokens / clock.total_ms
        scaling = self._optimizer is not None and self._optimizer.working_dtype is torch.float16
        step = step_record(
            number,
            progress,
            report,
            clock,
            stats,
            lr=lr,
            rank=self._rank,
            batch_tokens=self._config.batch_tokens,
            scaling=scaling,
            mfu=self._mfu(tokens_per_s),
            peaks=self._memory.end_step(report) if self._memory else (0, 0),
        )
        self._tell(step)
        self._keep_run()
        if self._rank == 0:
            self._alerts.step(step)
        self._log_timeline()
        if report.sampled is not None:
            self._sampled_step = number, report.sampled
        if self._memory is not None and (rows := self._memory.news()):
            self._tell(schema.Memory(step=number, rows=rows))
        self._pace.end_step(clock.total_ms / 1e3)
        if self._hindsight is not None:
            self._hindsight.step(report, clock.total_ms)
        self._console.step(self._line(step), force=number in (1, self._config.train.steps))

    def _log_timeline(self) -> None:
        """Log the timeline of a sampled step: after the step that follows it, when reading it waits
        for nothing."""
        if self._sampled_step is None:
            return
        (number, timeline), self._sampled_step = self._sampled_step, None
        for interval in timeline.intervals:
            self._writer.emit(schema.LaneSpan(step=number, **asdict(interval)))

    def _keep_run(self) -> None:
        """Keep the run folder; a missing or foreign link does not end the run."""
        try:
            self._run.keep()
        except OSError as error:
            self.warn("latest-failed", f"runs_dir/latest does not point to this run: {error}")

    def _line(self, step: schema.Step) -> StepLine:
        tier_bytes = {tier.value: 0 for tier in Tier}
        for row in self._memory.read if self._memory else ():
            tier_bytes[row.tier] += row.num_bytes
        return StepLine(
            record=step,
            steps=self._config.train.steps,
            device_bytes=tier_bytes["device"],
            host_bytes=tier_bytes["host"],
            eta_s=self._pace.seconds_left(step.step),
            now_s=time.time(),
            val_loss=self._progress.val_loss,
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self._peak_flops is None:
            return None
        per_token = flops_per_token(self._config.model, self._config.data.seq_len)
        return tokens_per_s * per_token / self._peak_flops

    def memory_rows(self) -> tuple[schema.MemoryRow, ...]:
        """Return the owners' bytes now."""
        assert self._memory is not None
        return self._memory.rows()

    def _tell(self, event: Source) -> None:
        """Log an event whose scalars other tools get too."""
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

    def saved(self, step: int, saved: Saved) -> None:
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

    def control(self, request: Request, state: str, step: int, message: str = "") -> None:
        """Log the state of a request; `state` as in `schema.Control`."""
        text = message or request.refused or request.message
        self._writer.emit(
            schema.Control(
                id=request.id, action=request.action, state=state, message=text, step=step
            )
        )
        self._console.say(f"request: {request.action} {state}{f': {text}' if text else ''}")

    def sampled(self, step: int, prompt: str, text: str) -> None:
        self._writer.emit(schema.Sample(step=step, prompt=prompt, text=text))

    def hung(self, report: str) -> None:
        """Log the report of a hang, and the end. Called from another thread."""
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
