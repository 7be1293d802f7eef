"""The log of a run: one record per event, and console lines."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import asdict
from types import TracebackType

import torch

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import flops_per_token
from offloadtrain.config.units import format_bytes, format_duration
from offloadtrain.engine import StepReport
from offloadtrain.events import oom_kills, schema
from offloadtrain.events.alerts import Alerts
from offloadtrain.events.control import Request
from offloadtrain.events.writer import EventWriter
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.hardware.telemetry import Sampler, probe
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.runtime import kernels
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.lanes import Timeline
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.save import Saved
from offloadtrain.train.log.command_hooks import CommandHooks
from offloadtrain.train.log.console import Console, StepLine
from offloadtrain.train.log.pace import Pace
from offloadtrain.train.log.plan_vs_actual import Hindsight
from offloadtrain.train.log.records import step_record
from offloadtrain.train.log.run_memory import RunMemory
from offloadtrain.train.log.run_start import RunStart
from offloadtrain.train.loggers.loggers import Loggers
from offloadtrain.train.loggers.row import Source
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.signals import StoppedEarlyError

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
            on_error=self._cannot_write,
            on_recovery=self._writes_again,
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
        start = RunStart.of(self._run, config, context, machine, progress.step, waiting)
        self._peak_flops = start.peak_flops
        self._alerts.calibrated_gbps = start.calibrated_gbps
        if self._rank == 0:
            killed = oom_kills.count(cgroup.oom_counters())
            self._run.write_run(start.facts | {"ranks": context.ranks.size, "oom_kills": killed})
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
        if start.pins_in_vain:
            self._alerts.standing(
                "not-pinned",
                "host memory could not be page-locked: transfers are slow and do not overlap; "
                "raise `ulimit -l` or the container's limit",
            )

    def _set_up(self) -> schema.SetUp:
        """What came before the first step, in this start."""
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
        message, apart = self._hindsight.told(rows)
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
        told: StepStats,
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
            told,
            lr=lr,
            rank=self._rank,
            batch_tokens=self._config.batch_tokens,
            scaling=scaling,
            mfu=self._mfu(tokens_per_s),
            peaks=self._memory.step_ends(report) if self._memory else (0, 0),
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
            step=step.step,
            steps=self._config.train.steps,
            loss=step.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            tokens_per_s=step.tokens_per_s,
            mfu=step.mfu,
            exposed_ms=step.exposed_ms,
            device_bytes=tier_bytes["device"],
            host_bytes=tier_bytes["host"],
            eta_s=self._pace.seconds_left(step.step),
            now_s=time.time(),
            skipped=step.skipped,
            loss_scale=step.loss_scale,
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

    def _cannot_write(self, error: OSError) -> None:
        """Report write errors, on the writer's thread like the next method."""
        self._console.say(
            f"warning: the event log cannot be written ({error.strerror}): training "
            "continues, and writes are retried until the run ends"
        )

    def _writes_again(self, lost: int) -> None:
        self._console.say(f"the event log is being written again; {lost} records were lost")
