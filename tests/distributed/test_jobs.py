"""Ranks of one job: what they agree on, what each does alone, and when all of them stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offloadtrain.engine import build
from offloadtrain.events import alerts, schema
from offloadtrain.parallel.pipeline.language_model import PipelinedModel
from offloadtrain.plan import automatic
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.process_group import RankError, Ranks
from offloadtrain.runtime.tensor_parts import is_distributed
from offloadtrain.train.build import assemble
from offloadtrain.train.losses import loss_of
from offloadtrain.train.progress import StepStats
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trainer import Trainer
from tests.distributed.conftest import Run
from tests.distributed.divisions import DEEPER, INTERLEAVED, SMALL, TENSOR
from tests.distributed.rank_jobs import (
    CONSTANT,
    FP32,
    RankRun,
    evaluations,
    events_of_rank,
    figures,
    job_of,
    train,
)
from tests.train.small_job import tensor_hashes
from tests.train.test_spikes import STEPS, plant


def train_until_stopped(folder: Path, data: Path, stopped: int) -> RankRun:
    """Train; rank `stopped` gets the signal in its second step."""
    ranks = Ranks.of(None, torch.device("cpu"))
    rank, count = ranks.rank, 0
    ranks.close()
    step = Trainer._step

    def counted(trainer: Trainer, stop: StopRequests) -> Any:
        nonlocal count
        count += 1
        if rank == stopped and count == 2:
            stop.requested = "SIGTERM"
        return step(trainer, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", counted)
        return train(folder, data, **FP32)


@pytest.mark.parametrize("stopped", [0, 1])
def test_all_ranks_stop_at_the_same_step(
    ranks: Run, tmp_path: Path, data: Path, stopped: int
) -> None:
    for run in ranks(2, train_until_stopped, tmp_path / "run", data, stopped):
        assert run.status == "stopped"
        assert set(run.losses) == {1, 2}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def refusal_of_other_jobs(data: Path) -> str:
    """Each rank has another learning rate."""
    ranks = Ranks.of(None, torch.device("cpu"))
    try:
        assemble(job_of(data, **{"optim.lr": 1e-3 * (1 + ranks.rank)}), ranks=ranks)
    except RankError as error:
        return str(error)
    finally:
        ranks.close()
    return ""


def test_ranks_with_other_jobs_are_refused(ranks: Run, data: Path) -> None:
    for message in ranks(2, refusal_of_other_jobs, data):
        assert "rank 1 has another job than rank 0: optim differ" in message


def resolved_precision(data: Path, speedups: tuple[float, ...]) -> str:
    """Resolve "auto" on ranks that measure different speedups of bf16."""
    ranks = Ranks.of(None, torch.device("cpu"))
    job = job_of(data, **{"offload.precision": '"auto"'})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "offloadtrain.runtime.device.cpu_bf16_speedup", lambda: speedups[ranks.rank]
            )
            context = assemble(job, ranks=ranks)
        context.optimizer.close()
        return context.precision
    finally:
        ranks.close()


@pytest.mark.parametrize(("speedups", "expected"), [((4.0, 0.2), "bf16"), ((0.2, 4.0), "fp32")])
def test_ranks_compute_in_one_precision(
    ranks: Run, data: Path, speedups: tuple[float, ...], expected: str
) -> None:
    assert ranks(2, resolved_precision, data, speedups) == [expected] * 2


def test_the_rank_that_arrives_last_is_visible() -> None:
    """Each took 100 ms; rank 2 came last and so waited least."""
    stats = StepStats.of(
        [
            [1.0, 100.0, 40.0, 0, 0, 0, 1],
            [2.0, 100.0, 38.0, 0, 1, 0, 0],
            [3.0, 100.0, 5.0, 0, 0, 1, 1],
        ],
        replicas=3,
    )
    assert stats.loss == 2.0 and stats.asks and stats.saves and not stats.written
    assert stats.own_ms == (65.0, 67.0, 100.0)


@dataclass(frozen=True)
class PartRun:
    """Three steps of one rank: its losses, and the masters of parameters that are not divided."""

    losses: list[float]
    shared_masters: dict[str, Any]


def train_part(data: Path, **options: Any) -> PartRun:
    ranks = Ranks.of(None, torch.device("cpu"))
    place = RankInfo(ranks.rank, ranks.size, ranks.rank, ranks.size)
    context = assemble(job_of(data, **options), ranks=ranks, rank_info=place)
    optimizer, losses = context.optimizer, []
    for _ in range(3):
        loss = loss_of(context.model, context.batches.next(), None)
        optimizer.backward(loss)
        losses.append(loss.item())
        optimizer.step()
    params = dict(context.model.module.named_parameters())
    masters = dict(optimizer.master_weights())
    shared = {name: x.tolist() for name, x in masters.items() if not is_distributed(params[name])}
    parts = {block.attention.part for block in context.model.module.blocks}
    assert parts == {ranks.rank % 2}, "attention draws its own dropout"
    optimizer.close()
    ranks.close()
    return PartRun(losses, shared)


@pytest.mark.slow
def test_parts_do_not_drift_apart(ranks: Run, data: Path) -> None:
    """With dropout; replicas of the same part get different batches."""
    options = SMALL | TENSOR | {"model.norm": '"layernorm"', "model.bias": "true"}
    options |= {"model.mlp": '"gelu"', "model.positions": '"learned"'}
    options |= {"model.dropout": 0.2, "offload.activation": '"recompute"'}
    runs: list[PartRun] = ranks(4, train_part, data, **options)
    assert runs[0] == runs[1] and runs[2] == runs[3]
    assert runs[0].losses != runs[2].losses and len(runs[0].shared_masters) > 8


@pytest.mark.slow
def test_all_stages_of_a_rank_evaluate_without_dropout(
    ranks: Run, tmp_path: Path, data: Path
) -> None:
    options = DEEPER | {"model.dropout": 0.5, "train.steps": 1, "train.eval_every": 1}
    ranks(1, train, tmp_path / "expected", data, **options)
    ranks(2, train, tmp_path / "run", data, **options | INTERLEAVED)
    assert evaluations(tmp_path / "run")[0] == evaluations(tmp_path / "expected")[0]


def train_with_spike(
    folder: Path, data: Path, policy: str, steps: int, *, resume: bool = False, **options: Any
) -> None:
    """Train with a spike at step 11, in the loss of rank 1 or, of stages, of their batch."""
    run, calls = PipelinedModel.run, 0

    def spoilt(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return run(*args) * (80.0 if calls == 11 else 1.0)

    changes = {"train.on_spike": f'"{policy}"', "train.steps": steps, "train.eval_every": 0}
    with pytest.MonkeyPatch.context() as patch:
        if "ranks.pipeline" in options:
            patch.setattr(alerts, "SPIKE_AFTER", 6)
            patch.setattr(PipelinedModel, "run", spoilt)
        else:
            plant(patch, 11, times=80.0 if dist.get_rank() == 1 else 1.0)
        train(folder, data, resume=resume, **CONSTANT | options | changes)


def tried(run: Path, rank: int) -> list[tuple[int, bool]]:
    """The number of each step, and whether it was skipped."""
    return [(figure[0], figure[-1]) for figure in figures(run, rank)]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "again"), [("skip", [11]), ("rollback", [10, 11])])
def test_all_ranks_decide_alike_about_a_spike_and_resume_to_the_bit(
    ranks: Run, tmp_path: Path, data: Path, policy: str, again: list[int]
) -> None:
    """One of them sees it."""
    complete, parted = tmp_path / "complete", tmp_path / "parted"
    ranks(2, train_with_spike, complete, data, policy, STEPS)
    assert tried(complete, 0) == tried(complete, 1)
    expected = [*range(1, 12), *again, *range(12, STEPS + 1)]
    assert [step for step, _ in tried(complete, 0)] == expected
    assert [step for step, skipped in tried(complete, 0) if skipped] == [11]
    ranks(2, train_with_spike, parted, data, policy, 12)
    ranks(2, train_with_spike, parted, data, policy, STEPS, resume=True)
    assert tried(parted, 0) == tried(complete, 0)
    assert tensor_hashes(parted, STEPS) == tensor_hashes(complete, STEPS)


def train_with_choice(folder: Path, data: Path, update: str, *, resume: bool = False) -> None:
    """Train; by its own clock rank 0 would choose "speculative", and the other rank "exact". The
    other rank has no room for second copies."""
    rank = dist.get_rank()
    times = {"speculative": (1.0, 5.0)[rank], "exact": (2.0, 3.0)[rank]}
    row_of = Trainer._row

    def row(trainer: Trainer, *arguments: Any) -> list[float]:
        values = row_of(trainer, *arguments)
        step_ms = times[trainer.saving.update_choice._mode]
        return [values[0], step_ms, 0.0, *values[3:]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "GAIN", -1.0)
        patch.setattr(Trainer, "_row", row)
        if rank == 1:
            patch.setattr(build, "available_bytes", lambda: 0)
        steps = {"train.steps": 23 + 2 * resume, "offload.clip_norm": 1e9}
        quiet = {"train.eval_every": 0, "train.checkpoint_every": 0}
        mode = {"offload.update": f'"{update}"'}
        train(folder, data, resume=resume, **FP32 | CONSTANT | steps | quiet | mode)


@pytest.mark.slow
def test_all_ranks_choose_one_update_mode(ranks: Run, tmp_path: Path, data: Path) -> None:
    """By the slowest of them, once; the bits are those of exact updates."""
    auto, exact = tmp_path / "auto", tmp_path / "exact"
    for path, update in ((auto, "auto"), (exact, "exact")):
        ranks(2, train_with_choice, path, data, update)
        ranks(2, train_with_choice, path, data, update, resume=True)
    for rank in (0, 1):
        event, resumed = events_of_rank(auto, schema.Decided, rank)
        assert resumed.message == "offload.update = auto: exact, as measured in an earlier start"
        assert "exact from here on; a step took 5 ms with speculative and 3 ms" in event.message
        early = [step.early_buckets > 0 for step in events_of_rank(auto, schema.Step, rank)]
        assert early == [False, *[rank == 0] * 10, *[False] * 14]
    assert figures(auto) == figures(exact)
    assert tensor_hashes(auto, 25) == tensor_hashes(exact, 25)
