"""Whole jobs on ranks: the same batch on any number of them, evaluation, checkpoints, logs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.events import log_lines, schema
from offloadtrain.events.control import Requests
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.process_group import RankError, Ranks
from offloadtrain.train import token_files
from offloadtrain.train.build import assemble
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.log.console import Console
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.progress import StepStats
from offloadtrain.train.resume import open_run
from offloadtrain.train.saved.saved_run import open_saved
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trainer import Trainer
from offloadtrain.train.unflushed_trainer import trainer_of
from tests.distributed.conftest import Run
from tests.train.small_job import JOB, write_text

FP32 = {"offload.precision": '"fp32"', "model.dropout": 0.0}
CONSTANT = {"optim.schedule": '"constant"'}


def job_of(folder: Path, **changes: Any) -> Config:
    """The small job, its data in `folder`."""
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return jobs.loads(JOB.format(folder=folder), "small", overrides)


def trained(folder: Path, data: Path, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """Run a small job in `folder` on this pool's ranks; what this rank has logged."""
    ranks = Ranks.of(None, torch.device("cpu"))
    job = job_of(data, **changes)
    text = jobs.dump(job)
    asks = str(folder) if resume else "never"
    opened = open_run(job, run_dir=folder, resume=asks, say=print, ranks=ranks)
    run = opened.run
    with run, RunLog(run, job, Console(quiet=True), ranks.rank) as log:
        context = assemble(job, ranks=ranks)
        trainer = trainer_of(job, context, run, log)
        if opened.found is not None:
            trainer.resume(opened.found)
        assert opened.begin(job=text, resolved=text, ranks=ranks) == []
        log.started(context, trainer.progress)
        outcome = trainer.train(Requests(folder) if ranks.rank == 0 else None, StopRequests())
        log.ended(outcome.status)
        context.optimizer.close()
    told = [record.event for record in log_lines.read(run.events(ranks.rank))]
    steps = [event for event in told if isinstance(event, schema.Step)]
    (plan,) = [event.plan for event in told if isinstance(event, schema.RunStarted)][-1:]
    rows = [event for event in told if isinstance(event, schema.Memory)][-1].rows
    ranks.close()
    return {
        "status": outcome.status,
        "losses": {step.step: step.loss for step in steps},
        "val": outcome.val_loss,
        "tokens": steps[-1].tokens,
        "comm": steps[-1].comm_bytes,
        "ranks_ms": steps[-1].ranks_ms,
        "busy": steps[-1].busy_ms,
        "planned": plan["memory"],
        "held": {(row.tier, row.owner): row.num_bytes for row in rows},
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_text(tmp_path)
    return tmp_path


def close(one: dict[int, float], other: dict[int, float], rel: float) -> bool:
    assert one.keys() == other.keys()
    return all(math.isclose(one[step], other[step], rel_tol=rel) for step in one)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_batch_does_not_depend_on_the_ranks(
    ranks: Run, tmp_path: Path, data: Path, size: int
) -> None:
    chosen = FP32 | {"train.eval_every": 4, "train.eval_batches": 4, "log.to": '["jsonl"]'}
    (alone,) = ranks(1, trained, tmp_path / "1", data, **chosen)
    found = ranks(size, trained, tmp_path / str(size), data, **chosen)
    assert all(one["losses"] == found[0]["losses"] for one in found)  # the mean of all
    assert close(found[0]["losses"], alone["losses"], 1e-4)
    assert found[0]["val"] == pytest.approx(alone["val"], rel=1e-4)
    assert found[0]["tokens"] == alone["tokens"]
    assert len(found[0]["ranks_ms"]) == size and found[0]["comm"] > 0
    assert found[1]["ranks_ms"] == () and found[1]["busy"]["comm"] > 0
    assert alone["comm"] == 0 and alone["ranks_ms"] == ()
    rows = [
        json.loads(row) for row in (tmp_path / f"{size}/metrics.jsonl").read_text().splitlines()
    ]
    assert {row["step"]: row["loss"] for row in rows if "loss" in row} == found[0]["losses"]
    assert sum("loss" in row for row in rows) == len(found[0]["losses"]), "of rank 0 alone"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_holds_what_was_planned(
    ranks: Run, tmp_path: Path, data: Path, stage: int
) -> None:
    """By owner; what alignment adds to this small model is below a sixth."""
    wide = {"offload.zero_stage": stage, "model.d_model": 128, "train.steps": 2}
    for found in ranks(2, trained, tmp_path / "run", data, **wide):
        for tier, states in found["planned"].items():
            for owner, planned in states.items():
                held = found["held"][tier, owner]
                assert planned <= held <= 1.17 * planned, (owner, planned, held)


@pytest.mark.parametrize(
    ("first", "then"),
    [(1, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (2, 4), (4, 2)))],
)
def test_another_number_of_ranks_goes_on(
    ranks: Run, tmp_path: Path, data: Path, first: int, then: int
) -> None:
    """The same tokens in the same order: the losses are those of a run that was not stopped."""
    chosen = FP32 | CONSTANT | {"train.steps": 8, "train.checkpoint_every": 4}
    unbroken = ranks(1, trained, tmp_path / "whole", data, **chosen)[0]["losses"]
    ranks(first, trained, tmp_path / "run", data, **chosen | {"train.steps": 4})
    for found in ranks(then, trained, tmp_path / "run", data, resume=True, **chosen):
        later = {step: found["losses"][step] for step in range(5, 9)}
        assert close(later, {step: unbroken[step] for step in later}, 1e-4)


def test_the_same_ranks_go_on_to_the_bit(ranks: Run, tmp_path: Path, data: Path) -> None:
    chosen = CONSTANT | {"train.checkpoint_every": 3, "train.steps": 6}  # with dropout
    whole = ranks(2, trained, tmp_path / "whole", data, **chosen)
    ranks(2, trained, tmp_path / "run", data, **chosen | {"train.steps": 3})
    again = ranks(2, trained, tmp_path / "run", data, resume=True, **chosen)
    for one, other in zip(whole, again, strict=True):
        assert {step: other["losses"][step] for step in (4, 5, 6)} == {
            step: one["losses"][step] for step in (4, 5, 6)
        }


def asked_to_stop(folder: Path, data: Path, asked: int) -> dict[str, Any]:
    """One rank gets the signal, in its second step."""
    ranks = Ranks.of(None, torch.device("cpu"))
    rank, count = ranks.rank, 0
    ranks.close()
    step = Trainer._step

    def noted(trainer: Trainer, stop: StopRequests) -> Any:
        nonlocal count
        count += 1
        if rank == asked and count == 2:
            stop.requested = "SIGTERM"
        return step(trainer, stop)

    Trainer._step = noted  # type: ignore[method-assign]
    try:
        return trained(folder, data, **FP32)
    finally:
        Trainer._step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("asked", [0, 1])
def test_all_stop_at_the_same_step(ranks: Run, tmp_path: Path, data: Path, asked: int) -> None:
    for found in ranks(2, asked_to_stop, tmp_path / "run", data, asked):
        assert found["status"] == "stopped"
        assert set(found["losses"]) == {1, 2}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("micro", "accum", "ranks", "becomes"),
    [(8, 1, 2, (4, 1)), (8, 4, 2, (8, 2)), (8, 4, 8, (4, 1)), (6, 2, 4, (3, 1)), (4, 3, 2, (3, 2))],
)
def test_a_batch_is_shared(micro: int, accum: int, ranks: int, becomes: tuple[int, int]) -> None:
    job = job_of(Path("x"), **{"train.micro_batch": micro, "train.grad_accum_steps": accum})
    part = shared(job, ranks).train
    assert (part.micro_batch, part.grad_accum_steps) == becomes
    assert part.micro_batch * part.grad_accum_steps * ranks == micro * accum


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    job = job_of(Path("x"), **{"train.micro_batch": 4, "train.grad_accum_steps": 1})
    with pytest.raises(ConfigError, match="take 2, or a batch that 3 divides"):
        shared(job, 3)


def another_job(data: Path) -> str:
    """One rank was given another learning rate."""
    ranks = Ranks.of(None, torch.device("cpu"))
    job = job_of(data, **{"optim.lr": 1e-3 * (1 + ranks.rank)})
    try:
        assemble(job, ranks=ranks)
    except RankError as error:
        return str(error)
    finally:
        ranks.close()
    return ""


def test_ranks_with_other_jobs_are_refused(ranks: Run, data: Path) -> None:
    for said in ranks(2, another_job, data):
        assert "rank 1 has another job than rank 0: optim differ" in said


def chosen_where_ranks_measure(data: Path, speedups: tuple[float, ...]) -> str:
    """What "auto" becomes on a rank whose own measurement says otherwise than its neighbour's."""
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


@pytest.mark.parametrize(("speedups", "chosen"), [((4.0, 0.2), "bf16"), ((0.2, 4.0), "fp32")])
def test_ranks_compute_in_one_precision(
    ranks: Run, data: Path, speedups: tuple[float, ...], chosen: str
) -> None:
    assert ranks(2, chosen_where_ranks_measure, data, speedups) == [chosen] * 2


def verified_here(data: Path) -> int:
    """How many token files this rank reads through, all ranks being on one host."""
    ranks, seen = Ranks.of(None, torch.device("cpu")), []
    rank_info = RankInfo(ranks.rank, ranks.size, ranks.rank, ranks.size)
    real, token_files.verify = token_files.verify, lambda tokens, _: seen.append(tokens)
    try:
        assemble(job_of(data), ranks=ranks, rank_info=rank_info).optimizer.close()
    finally:
        token_files.verify = real
        ranks.close()
    return len(seen)


def test_tokens_are_verified_once_on_each_host(ranks: Run, data: Path) -> None:
    assert ranks(2, verified_here, data) == [2, 0]


def test_blocks_can_stay_where_shards_are_gathered(data: Path) -> None:
    asked = {"offload.resident_blocks": 1}
    assert job_of(data, **asked | {"offload.zero_stage": 3}).offload.weights.resident_blocks == 1
    with pytest.raises(ConfigError, match=r"or zero_stage = 3: otherwise all blocks stay"):
        job_of(data, **asked)


def test_who_arrives_last_is_seen() -> None:
    """Each took 100 ms; rank 2 came last and so waited least."""
    told = StepStats.of(
        [
            [1.0, 100.0, 40.0, 0, 0, 0, 1],
            [2.0, 100.0, 38.0, 0, 1, 0, 0],
            [3.0, 100.0, 5.0, 0, 0, 1, 1],
        ],
        replicas=3,
    )
    assert told.loss == 2.0 and told.asks and told.saves and not told.written
    assert told.own_ms == (65.0, 67.0, 100.0)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["int8", "fp32"])
def test_weights_are_read_from_the_shards_of_a_checkpoint(
    ranks: Run, tmp_path: Path, data: Path, state: str
) -> None:
    """As an engine of one rank has them that was restored from it."""
    small = {"train.steps": 2, "train.eval_every": 0, "offload.state": state}
    ranks(2, trained, tmp_path / "run", data, **small)
    saved = open_saved(tmp_path / "run")
    assert any(
        entry.hi - entry.lo < math.prod(entry.shape) for entry in saved.found.manifest.entries
    )
    context = assemble(job_of(data, **small))
    delayed = restore(saved.found, context.model.module, context.optimizer)
    context.optimizer.finish_load(**saved.found.state["optimizer"], delayed=delayed)
    found = dict(saved.weights())
    masters = dict(context.optimizer.master_weights())
    assert found.keys() == masters.keys()
    for name, master in masters.items():
        assert torch.equal(found[name], master), name
    context.optimizer.close()
