"""One system in training: its steps, what it tells of them, and the figures that follow."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.spec import Spec
from benchmarks.gpu.systems import System, make
from benchmarks.resident_memory import resident
from offloadtrain.config.model_shape import flops_per_token, num_params
from offloadtrain.engine import StepReport
from offloadtrain.events.chrome_trace import chrome_trace
from offloadtrain.events.log_lines import Record
from offloadtrain.events.schema import LaneSpan, Step
from offloadtrain.hardware.peak_flops import peak_flops
from offloadtrain.step.layout.tiers import Tier


class Running:
    """A system and the steps that it has made, all on the same random tokens.

    A step's time is from one return of the optimizer's step to the next, with each loss read, as a
    training loop has it; between steps nobody waits for the device.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        """Builds the system.

        Raises:
            MissingError: it is not installed, or cannot run here.
        """
        self.spec = spec
        self.device = device
        torch.manual_seed(0)
        torch.zeros(1, device=device)  # CUDA's context is the process's, not the system's
        self._anonymous_before, _ = resident()
        self._anonymous_bytes = 0
        self.system: System = make(spec, device)
        size = (spec.micro_batch, spec.seq_len)
        self._tokens = torch.randint(spec.shape.vocab_size, size, device=device)
        self.losses: list[float] = []
        self.reports: list[dict[str, Any]] = []
        self._exposed_ms: list[float] = []
        self._right_guesses: list[bool] = []
        """For each measured step, whether its update inside backward was right. A step that makes
        none, since too many were wrong before, counts as wrong."""
        self._exposed_by_lane: dict[str, float] = {}

    def steps(self, count: int) -> list[float]:
        """Seconds of each."""
        samples, last = [], time.perf_counter()
        for _ in range(count):
            self._step()
            now = time.perf_counter()
            samples.append(now - last)
            last = now
        return samples

    def measured(self, count: int) -> list[float]:
        """The same of steps that are like any other: no first one, none that is sampled. Only these
        count in how long compute waited and which guesses were right."""
        samples = self.steps(count)
        self._exposed_ms += [told["exposed_ms"] for told in self.reports[-count:]]
        self._right_guesses += [told["speculation_hit"] is True for told in self.reports[-count:]]
        return samples

    def sample(self, trace: Path | None = None) -> None:
        """Make a step more, where it is ours, and keep what compute waited for; `trace`: write its
        timeline there, for Perfetto."""
        if self.system.optimizer is None:
            return
        self.system.optimizer.sample_timeline()
        (step_s,) = self.steps(1)
        report = self._report()
        assert report is not None
        self._exposed_by_lane = report.exposed_by_lane
        step = Step(step=1, loss=0.0, lr=0.0, tokens=0, step_ms=1e3 * step_s)
        spans = [LaneSpan(step=1, **asdict(interval)) for interval in report.timeline]
        records = [Record(event, 0, 0.0) for event in (step, *spans)]
        if trace is not None:
            trace.write_text(json.dumps(chrome_trace(records)), encoding="utf-8")

    def found(self, samples: list[float], peak_bytes: int | None) -> dict[str, Any]:
        """Figures of these samples, with losses and reports of every step so far."""
        figures = _speed(self.spec, self.device, statistics.median(samples))
        figures |= {"device_peak_bytes": peak_bytes} | self._figures_of_ours()
        raw = {
            "spec": asdict(self.spec),
            "samples": samples,
            "losses": self.losses,
            "reports": self.reports,
        }
        return {"figures": figures, **raw}

    def _step(self) -> None:
        accum = self.spec.grad_accum_steps
        total = sum(self.system.micro(self._tokens, self._tokens) for _ in range(accum))
        self.system.step()
        self.losses.append(float(total) / accum)
        self._anonymous_bytes = max(self._anonymous_bytes, resident()[0])
        if (report := self._report()) is not None:
            self.reports.append(_told(report))

    def _report(self) -> StepReport | None:
        return self.system.optimizer.last_step if self.system.optimizer else None

    def _figures_of_ours(self) -> dict[str, Any]:
        report = self._report()
        if report is None or self.system.optimizer is None:
            return {}
        speculates = self.spec.options.get("update") == "speculative"
        params, ledger = num_params(self.spec.shape), self.system.optimizer.ledger
        host = ledger.total(Tier.HOST)
        return {
            "exposed_ms": statistics.median(self._exposed_ms),
            "exposed_by_lane": self._exposed_by_lane,
            "state_on_device": report.state_on_device,
            "host_bytes": host,
            "anonymous_bytes": self._anonymous_bytes - self._anonymous_before,
            "right_guesses": statistics.mean(self._right_guesses) if speculates else None,
            "host_bytes_per_param": host / params,
            "bus_bytes_per_param": (report.d2h_bytes + report.h2d_bytes) / params,
            "ledger": [asdict(row) for row in ledger.rows()],
        }


def _speed(spec: Spec, device: torch.device, step_s: float) -> dict[str, Any]:
    rate = spec.step_tokens / step_s
    flops = rate * flops_per_token(spec.shape, spec.seq_len)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops(name, spec.precision)
    params = num_params(spec.shape)
    return {
        "params": params,
        "step_tokens": spec.step_tokens,
        "step_s": step_s,
        "tokens_per_s": rate,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "mfu_6p": 6 * params * rate / peak if peak else None,
    }


def _told(report: StepReport) -> dict[str, Any]:
    return {
        "exposed_ms": report.exposed_ms,
        "speculation_hit": report.speculation_hit,
        "busy_ms": {str(lane): spent for lane, spent in report.busy_ms.items()},
        "d2h_bytes": report.d2h_bytes,
        "h2d_bytes": report.h2d_bytes,
    }
