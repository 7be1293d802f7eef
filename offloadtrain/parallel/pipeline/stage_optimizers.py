"""Presents several pipeline stages of one process as one model and one optimizer to callers that
step, save and log."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.saved_state import FlatState, OwnState, StateWriter
from offloadtrain.engine.step_report import StepReport
from offloadtrain.optim import LossScaleError
from offloadtrain.parallel.unused_experts import merged_steps
from offloadtrain.runtime.lanes import Timeline
from offloadtrain.runtime.process_group import Extent
from offloadtrain.step.program.operations import Written


class StageModules(nn.Module):
    """The stages of this process as one module, with the names of the complete model."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._stages = tuple(stages)  # not registered as children, which would change their names

    def train(self, mode: bool = True) -> StageModules:
        for stage in self._stages:
            stage.train(mode)
        self.training = mode
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for stage in self._stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        for stage in self._stages[:-1]:
            try:
                return stage.get_submodule(target)
            except AttributeError:
                continue  # belongs to another stage
        return self._stages[-1].get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return _merged(stage.state_dict(*args, **kwargs) for stage in self._stages)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise EngineError(
            "several stages in one process: load the weights of each into its own model, "
            "pipeline.optimizers[i].model.load_state_dict(…, strict=False)"
        )


class StageOptimizers:
    """The optimizers of this process's stages as one. See `OffloadOptimizer` for the methods that
    both have.

    Attributes:
        param_groups: parameter groups of all stages.
        ledger: shared by all stages.
    """

    def __init__(self, optimizers: Sequence[OffloadOptimizer]) -> None:
        first = optimizers[0]
        self._each, self._first = tuple(optimizers), first
        self.device, self.ranks, self.ledger = first.device, first.ranks, first.ledger
        self.working_dtype, self.config = first.working_dtype, first.config
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.samples_late = False

    @property
    def pinned(self) -> bool:
        return all(optimizer.pinned for optimizer in self._each)

    @property
    def tries(self) -> int:
        return self._first.tries

    @property
    def warns_of_skips(self) -> bool:
        return self._first.warns_of_skips

    @warns_of_skips.setter
    def warns_of_skips(self, value: bool) -> None:
        for optimizer in self._each:
            optimizer.warns_of_skips = value

    @property
    def last_step(self) -> StepReport | None:
        """Report of the last step, with the work and transfers of all stages."""
        reports = [optimizer.last_step for optimizer in self._each]
        known = [report for report in reports if report is not None]
        return _together(known) if len(known) == len(self._each) else None

    def lanes_state(self) -> str:
        return "; ".join(filter(None, (optimizer.lanes.state() for optimizer in self._each)))

    def step(self, *, skip: bool = False) -> None:
        failed: list[LossScaleError] = []
        for optimizer in self._each:
            try:
                optimizer.step(skip=skip)
            except LossScaleError as error:
                # All stages have the same loss scale. The others raise this error, too, once they
                # reach this step, so the saved state belongs to one step.
                failed.append(error)
        if failed:
            raise failed[0]

    def synchronize(self) -> None:
        for optimizer in self._each:
            optimizer.synchronize()

    def sample_timeline(self) -> None:
        for optimizer in self._each:
            optimizer.sample_timeline()

    def close(self) -> None:
        for optimizer in self._each:
            optimizer.close()

    # ---- state for checkpoints

    @property
    def saves_untrained(self) -> bool:
        return self._first.saves_untrained

    def extents(self) -> dict[str, Extent]:
        return _merged(optimizer.extents() for optimizer in self._each)

    def flat_states(self) -> list[FlatState]:
        return [state for optimizer in self._each for state in optimizer.flat_states()]

    def write_state(self, writer: StateWriter) -> None:
        shared = _SharedWriter(writer, len(self._each))
        for optimizer in self._each:
            optimizer.write_state(shared)

    def finish_writing(self) -> None:
        for optimizer in self._each:
            optimizer.finish_writing()

    def own_states(self) -> dict[str, list[OwnState]]:
        return _merged(optimizer.own_states() for optimizer in self._each)

    def own_weights(self) -> dict[str, list[OwnState]]:
        return _merged(optimizer.own_weights() for optimizer in self._each)

    def load_named_state(
        self, name: str, tensors: Mapping[str, Tensor], *, lo: int | None = None
    ) -> None:
        owner = next(
            (optimizer for optimizer in self._each if name in optimizer.extents()), self._first
        )
        owner.load_named_state(name, tensors, lo=lo)

    def scaler_state(self) -> dict[str, float] | None:
        return self._first.scaler_state()

    @property
    def expert_steps(self) -> dict[str, list[int]]:
        return merged_steps(optimizer.expert_steps for optimizer in self._each)

    def finish_load(self, **state: Any) -> None:
        for optimizer in self._each:
            optimizer.finish_load(**state)


AnyOptimizer: TypeAlias = OffloadOptimizer | StageOptimizers


class _SharedWriter:
    """A `StateWriter` that several engines share; each engine writes on its own lane."""

    def __init__(self, writer: StateWriter, engines: int) -> None:
        self._writer, self._left, self._lock = writer, engines, threading.Lock()

    def write(self, bucket: str, parts: Sequence[tuple[Written, Tensor]]) -> None:
        self._writer.write(bucket, parts)

    def finish(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:  # all engines have written all their buckets
            self._writer.finish()


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


_SUMS = ("exposed_ms", "d2h_bytes", "h2d_bytes", "comm_bytes")
_MORE_SUMS = ("disk_read_bytes", "disk_written_bytes", "early_buckets")


def _together(reports: Sequence[StepReport]) -> StepReport:
    """Return one report of a step from the reports of all stages."""
    first, *_ = reports
    guesses = [report.speculation_hit for report in reports if report.speculation_hit is not None]
    ranks = {
        name: where
        for report in reports
        for name, where in zip(report.nonfinite, report.nonfinite_ranks, strict=False)
        if where
    }
    nonfinite_ranks = first.nonfinite_ranks
    if nonfinite_ranks:
        nonfinite_ranks = tuple(ranks.get(name, ()) for name in first.nonfinite)
    return replace(
        first,
        busy_ms={lane: sum(report.busy_ms[lane] for report in reports) for lane in first.busy_ms},
        sampled=Timeline(lambda: [i for report in reports for i in report.timeline])
        if first.sampled
        else None,
        speculation_hit=all(guesses) if guesses else None,
        nonfinite_ranks=nonfinite_ranks,
        **{key: sum(getattr(report, key) for report in reports) for key in (*_SUMS, *_MORE_SUMS)},
    )
