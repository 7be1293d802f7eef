"""Jobs without a flush between steps (PipeDream-2BW): the bits of `offload.update = "delayed"` of
ranks that hold the whole model, checkpoints of either."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.split_step import SplitStep
from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.plan.report import text
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train import dry_run, unflushed_trainer
from offloadtrain.train.saved.saved_run import open_saved
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trainer import Outcome, Trainer
from tests.distributed.conftest import Run
from tests.distributed.rank_faults import Job
from tests.distributed.test_jobs import CONSTANT, data, job_of, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import DEEP, assert_same_run, figures
from tests.train.small_job import write_text

DELAYED = DEEP | {"offload.update": '"delayed"'}
STAGES = {"ranks.pipeline": 2, "ranks.schedule": '"2bw"'}
DEEPER = {"model.num_layers": 8, "ranks.pipeline": 4}
REPLICAS = {"offload.state_on": '"device"', "offload.clip_norm": 0.5}
"""Of a job whose stages are on two ranks each."""
STREAMED = STAGES | {"offload.working": '"host"'}
MICROBATCHES = 4
EVAL = {"train.eval_every": 4}


def events(folder: Path, kind: type[Any], rank: int = 0) -> list[Any]:
    log = log_lines.read(folder / "events" / f"rank{rank:03d}.jsonl")
    return [record.event for record in log if isinstance(record.event, kind)]


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.val_loss) for event in events(folder, schema.Eval)]


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint holds of every parameter: state, and the weights in use."""
    from offloadtrain.train.checkpoint.restore import read_whole

    found = open_saved(folder).found
    entries = sorted(found.manifest.entries, key=lambda one: (one.name, one.kind, one.lo))
    parts: dict[str, list[torch.Tensor]] = {}
    for one in entries:
        parts.setdefault(f"{one.name} {one.kind}", []).append(read_whole(found, one).flatten())
    return {name: torch.cat(some) for name, some in parts.items()}


def assert_same_state(one: Path, other: Path) -> None:
    first, second = masters(one), masters(other)
    assert first.keys() == second.keys() and any(name.endswith(" working") for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)


def spoilt(run: Callable[..., Any], steps: set[int]) -> Any:
    """Run with losses of these steps, counted from 0, that are not finite."""
    scaled, calls = Engine.scaled, 0

    def with_nan(engine: Engine, loss: torch.Tensor, **more: Any) -> torch.Tensor:
        nonlocal calls
        step = calls // MICROBATCHES if torch.is_grad_enabled() else -1  # no evaluation
        calls += torch.is_grad_enabled()
        return scaled(engine, loss, **more) * (math.nan if step in steps else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "scaled", with_nan)
        return run()


def skipping(folder: Path, data: Path, steps: set[int], **changes: Any) -> dict[str, Any]:  # noqa: F811
    return spoilt(lambda: trained(folder, data, **changes), steps)


def counting(folder: Path, data: Path, **changes: Any) -> dict[str, Any]:  # noqa: F811
    """A run, and how often it has flushed."""
    drain, flushes = SplitStep.drain, 0

    def counted(step: SplitStep, *, newest: bool) -> None:
        nonlocal flushes
        flushes += 1
        drain(step, newest=newest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitStep, "drain", counted)
        return trained(folder, data, **changes) | {"flushes": flushes}


def flushed_steps(changes: dict[str, Any], steps: int = 12) -> set[int]:
    """Those behind which a job has something to do."""
    every = [changes.get(f"train.{key}_every", n) for key, n in (("eval", 4), ("checkpoint", 3))]
    due = {step for step in range(1, steps) if any(n and step % n == 0 for n in every)}
    return due | {steps}


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, EVAL | {"train.checkpoint_every": 3, "offload.precision": '"fp32"'}),
        (4, EVAL | {"offload.clip_norm": 0.5}),
        (
            4,
            DEEPER
            | {"offload.state_on": '"device"', "train.chunked_loss": "true"}
            | {"train.eval_every": 0, "train.checkpoint_every": 0},
        ),
        pytest.param(2, {"offload.state": '"split16"', "data.packing": '"isolated"'}),
        pytest.param(2, {"offload.sums_on": '"device"', **EVAL}, marks=pytest.mark.long),
        (4, DEEPER | {"offload.activation": '"recompute"', "offload.recompute_blocks": 1}),
        (2, STREAMED | EVAL | {"offload.state": '"split16"', "train.checkpoint_every": 3}),
        pytest.param(4, STREAMED | {"offload.clip_norm": 0.5, **EVAL}, marks=pytest.mark.long),
        pytest.param(2, {"offload.activation": '"offload"', **EVAL}, marks=pytest.mark.long),
        pytest.param(8, {"ranks.shard": 2, "train.grad_accum_steps": 16}, marks=pytest.mark.long),
        pytest.param(
            2,
            {"model.num_experts": 4, "model.router_aux_loss_coef": 0.0},
            marks=pytest.mark.long,
        ),
        pytest.param(
            4, {"offload.state": '"int8"', "offload.zero_stage": 1}, marks=pytest.mark.long
        ),
    ],
)
def test_a_job_without_flushes_has_the_bits_of_a_delayed_one(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    options: dict[str, Any],
) -> None:
    """Losses, norms, rates, evaluations and checkpoints, with a flush only where something is due;
    each rank holds what was planned of its stage, to the byte of each owner."""
    chosen = DELAYED | STAGES | options
    stages = chosen["ranks.pipeline"]
    one = chosen | {"ranks.pipeline": 1}
    plain = ranks(size // stages, trained, tmp_path / "whole", data, **one)
    staged = ranks(size, counting, tmp_path / "staged", data, **chosen)
    assert {found["flushes"] for found in staged} == {len(flushed_steps(options))}
    assert_same_run(tmp_path / "whole", tmp_path / "staged", size)
    assert_same_state(tmp_path / "whole", tmp_path / "staged")
    assert {found["val"] for found in staged} == {plain[0]["val"]}
    assert evaluations(tmp_path / "staged") == evaluations(tmp_path / "whole")
    for rank, found in enumerate(staged):
        for tier, owners in found["planned"].items():
            held = {owner: n for (where, owner), n in found["held"].items() if where == tier}
            assert {owner: n for owner, n in owners.items() if n} == held, (rank, tier)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{3, 4}, pytest.param({7, 11}, marks=pytest.mark.long)])
def test_a_skipped_step_repeats_its_rate(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    steps: set[int],
) -> None:
    """Also where a checkpoint, an evaluation or the end was due behind it."""
    chosen = DELAYED | EVAL | {"train.checkpoint_every": 4, "offload.precision": '"fp32"'}
    ranks(1, skipping, tmp_path / "whole", data, steps, **chosen)
    ranks(2, skipping, tmp_path / "staged", data, steps, **chosen | STAGES)
    assert sum(figure[-1] for figure in figures(tmp_path / "staged")) == len(steps)
    assert_same_run(tmp_path / "whole", tmp_path / "staged", 2)
    assert_same_state(tmp_path / "whole", tmp_path / "staged")
    assert evaluations(tmp_path / "staged") == evaluations(tmp_path / "whole")
    for name in ("whole", "staged"):
        told = [
            one.step for one in events(tmp_path / name, schema.Warning_) if "skipped" in one.code
        ]
        assert len(told) == len(steps)


def always_skipping(folder: Path, data: Path, **changes: Any) -> str:  # noqa: F811
    from offloadtrain.train import trainer
    from offloadtrain.train.saved.saving import TrainingError

    with pytest.MonkeyPatch.context() as patch:
        for module in (trainer, unflushed_trainer):
            patch.setattr(module, "MAX_SKIPS", 3)
        with pytest.raises(TrainingError) as told:
            skipping(folder, data, {2, 3, 4, 5, 6}, **changes)
    return str(told.value)


@pytest.mark.slow
def test_a_run_that_only_skips_ends_with_its_checkpoint(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    few = DELAYED | {"train.checkpoint_every": 0, "train.eval_every": 0}
    (plain,) = ranks(1, always_skipping, tmp_path / "whole", data, **few)
    staged = ranks(2, always_skipping, tmp_path / "staged", data, **few | STAGES)
    assert "3 steps in a row were skipped" in staged[0]
    assert re.sub(r"of .* are not", "are not", staged[0]) == re.sub(
        r"of .* are not", "are not", plain
    )
    assert_same_run(tmp_path / "whole", tmp_path / "staged", 2)
    assert_same_state(tmp_path / "whole", tmp_path / "staged")


@pytest.mark.slow
@pytest.mark.draws(0.4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STAGES, STAGES),
        (STAGES | REPLICAS, STAGES | REPLICAS),
        (STAGES, {}),
        ({}, STAGES),
        (STREAMED, STREAMED | {"ranks.pipeline": 4}),
        pytest.param(STREAMED, STAGES, marks=pytest.mark.long),
        pytest.param(STAGES, STREAMED, marks=pytest.mark.long),
        pytest.param(STAGES, {"ranks.pipeline": 2}, marks=pytest.mark.long),
        pytest.param(STAGES, STAGES | {"ranks.pipeline": 4}, marks=pytest.mark.long),
    ],
)
def test_a_job_goes_on_without_flushes_or_with(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """From the checkpoint that a run wrote beside its steps, and from its last one: the run of one
    process that never stopped, bit for bit."""
    chosen = DELAYED | CONSTANT | {"model.num_layers": 8, "train.checkpoint_every": 5}
    replicas = 2 if before.items() >= REPLICAS.items() else 1
    chosen |= REPLICAS if replicas > 1 else {}
    if "offload.working" in before | after:  # one of the versions is in the state
        chosen |= {"offload.state": '"split16"'}
    ranks(replicas, trained, tmp_path / "whole", data, **chosen)
    for stages, steps in ((before, 7), (after, 12)):
        size = replicas * stages.get("ranks.pipeline", 1)
        more = stages | {"train.steps": steps}
        ranks(size, trained, tmp_path / "run", data, resume=steps > 7, **chosen | more)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_checkpoint_written_beside_steps_is_gone_on_from(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    chosen = DELAYED | STAGES | {"train.checkpoint_every": 5}
    ranks(2, trained, tmp_path / "run", data, **chosen)
    before = figures(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000012").rename(tmp_path / "last")
    ranks(2, trained, tmp_path / "run", data, resume=True, **chosen)
    assert figures(tmp_path / "run") == before + before[10:]


def asked(folder: Path, data: Path, rank: int, what: str, **changes: Any) -> dict[str, Any]:  # noqa: F811
    """A run in which one rank is asked something behind its fifth step, as by a signal."""
    own, train = Ranks.of(None, torch.device("cpu")), Trainer.train

    def noticing(trainer: Trainer, requests: Any, stop: StopRequests) -> Outcome:
        log, step = trainer._log, trainer._log.step

        def told(number: int, *args: Any, **more: Any) -> None:
            step(number, *args, **more)
            if number == 5 and own.rank == rank:
                if what == "stop":
                    stop.requested = "SIGTERM"
                elif what == "save":
                    stop.wants_checkpoint = True
                else:
                    request = {"action": "checkpoint", "message": ""}
                    (folder / "control/a.json").write_text(json.dumps(request))

        log.step = told  # type: ignore[method-assign]
        return train(trainer, requests, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", noticing)
        found = trained(folder, data, **changes)
    own.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "what"), [(1, "stop"), (1, "save"), (0, "request")])
def test_what_a_rank_is_asked_is_done_behind_a_step(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    rank: int,
    what: str,
) -> None:
    """It is told with the step in flight, and known with the next one: all end that, and go on from
    there to the bit."""
    chosen = DELAYED | {"train.checkpoint_every": 0, "train.eval_every": 0}
    ranks(1, trained, tmp_path / "whole", data, **chosen)
    told = ranks(2, asked, tmp_path / "run", data, rank, what, **chosen | STAGES)
    saved = [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert saved[0] == "step-00000007"
    assert {found["status"] for found in told} == {"stopped" if what == "stop" else "done"}
    if what == "stop":
        assert saved == saved[:1]
        ranks(2, trained, tmp_path / "run", data, resume=True, **chosen | STAGES)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 2)
    assert_same_state(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_what_is_logged_of_a_step_is_its_own(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """A sampled step has the intervals of its own lanes: one whole step of all microbatches."""
    few = {"train.checkpoint_every": 0, "train.eval_every": 0}
    ranks(2, trained, tmp_path / "run", data, **DELAYED | STAGES | few)
    for rank in range(2):
        log = log_lines.read(tmp_path / f"run/events/rank{rank:03d}.jsonl")
        told = [record.event for record in log if isinstance(record.event, schema.Step)]
        assert [event.step for event in told] == [*range(1, 13)]
        spans = events(tmp_path / "run", schema.LaneSpan, rank)
        # Asked for behind the second step, it begins with the decision of the third.
        (step,) = {span.step for span in spans}
        assert step == 4
        norms = [span for span in spans if span.name.startswith("adam")]
        assert norms, sorted({span.name for span in spans})


@pytest.fixture
def unflushed_job(tmp_path: Path) -> Path:
    write_text(tmp_path)
    few = {"train.steps": 9, "train.checkpoint_every": 4}
    path = tmp_path / "job.toml"
    path.write_text(jobs.dump(job_of(tmp_path, **DELAYED | STAGES | few)))
    return path


@pytest.mark.long
@pytest.mark.parametrize(("rank", "working"), [("0", "device"), ("1", "device"), ("0", "host")])
def test_a_killed_stage_comes_back_to_the_same_bits(
    unflushed_job: Path, tmp_path: Path, rank: str, working: str
) -> None:
    least = ("--nproc", "2", "--set", "train.hang_timeout_s=15", f"offload.working={working}")
    fault = ("backward:kill", "6", rank)
    run = Job.start(unflushed_job, tmp_path / "run", *least, "--max-restarts", "1", fault=fault)
    assert run.ended() == 0, run.text
    number = int(rank) + 1
    named = rf"rank {rank} \(stage {number} of 2, pid \d+\) was killed by SIGKILL"
    assert re.search(named, run.text), run.text
    assert "2 stages of one rank each (2bw: no flush between steps) share" in run.text
    whole = Job.start(unflushed_job, tmp_path / "whole", *least)
    assert whole.ended() == 0, whole.text
    last = {figure[0]: figure for figure in figures(tmp_path / "run")}
    assert list(last.values()) == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offload.update": '"exact"'}, "and offload.update = 'exact': .* Set it, or"),
        ({"offload.warmup_steps": 2}, "Set offload.warmup_steps = 0, or"),
        ({"offload.working": '"disk"'}, "Set offload.working = 'host', or"),
        pytest.param(
            *({"offload.skip_unused": '["*.norm*"]'}, r"Set offload.skip_unused = \[\], or"),
            marks=pytest.mark.slow,
        ),
        ({"offload.state_on": '"disk"'}, "Set offload.state_on = 'host', or"),
        ({"offload.state_on": '"auto"'}, "Set offload.state_on = 'host', or"),
        ({"optim.name": '"muon"'}, "Set optim.name = 'adamw', or"),
        ({"train.on_spike": '"skip"'}, "Set train.on_spike = 'report', or"),
    ],
)
def test_what_does_not_go_without_a_flush_is_refused(
    data: Path,  # noqa: F811
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        job_of(data, **DELAYED | STAGES | changes)
    assert 'ranks.schedule = "1f1b"' in str(told.value)
    job_of(data, **DELAYED | STAGES | changes | {"ranks.schedule": '"1f1b"'})


def test_fewer_microbatches_than_stages_are_refused(data: Path) -> None:  # noqa: F811
    few = {"train.micro_batch": 1, "train.grad_accum_steps": 1}
    with pytest.raises(ConfigError, match="2bw needs a microbatch for each stage"):
        shared(job_of(data, **DELAYED | STAGES | few), 2)


OFFLOADED = {"offload.activation": '"offload"', "offload.recompute_blocks": 1}


@pytest.mark.parametrize(
    "changes", [{}, {"offload.zero_stage": 1, "offload.state": '"split16"', **OFFLOADED}]
)
def test_the_dry_run_of_each_stage_is_its_plan(data: Path, changes: dict[str, Any]) -> None:  # noqa: F811
    """Bytes are the Ledger's, and two steps at once have no race; the step has no bubble."""
    job = job_of(data, **DELAYED | STAGES | {"train.micro_batch": 4} | changes)
    plans = [make(job, *find("cpu2"), 4, stage=stage) for stage in range(2)]
    for plan in plans:
        assert "free of races" in dry_run.check(plan)
        assert "2bw: no flush" in text(plan)
    flushed = replace(job, ranks=replace(job.ranks, schedule="1f1b"))
    before = [make(flushed, *find("cpu2"), 4, stage=stage) for stage in range(2)]
    one, other = (
        [plan.placed.device()["working weights"] for plan in of_both] for of_both in (before, plans)
    )
    assert other == [2 * one[0], one[1]]
    one, other = (
        [plan.placed.host()["gradient sums"] for plan in of_both] for of_both in (before, plans)
    )
    assert other == [one[0], 2 * one[1]]
    assert plans[0].prediction.seconds < before[0].prediction.seconds


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_dry_run_of_streamed_stages_is_their_plan(data: Path, ranks: int) -> None:  # noqa: F811
    """Both versions are on the host, and what is on the device is there once."""
    job = job_of(data, **DELAYED | STREAMED | {"train.micro_batch": 4} | OFFLOADED)
    plans = [make(job, *find("cpu2"), ranks, stage=stage) for stage in range(2)]
    for plan in plans:
        assert "free of races" in dry_run.check(plan)
    spec, held = plans[0].placed.spec, plans[0].placed.host()
    of_loads = [one.shard_bytes for one in spec.buckets if spec.loads_in_turn(one)]
    assert of_loads and held["weights snapshot"] == held["pending weights"] == sum(of_loads)
