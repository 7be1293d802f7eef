"""Whole jobs in stages: the bits of ranks that hold the whole model, checkpoints of either."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import of_stage, replicas, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.events import alerts, log_lines, schema
from offloadtrain.train.saved.saved_run import language_model, open_saved
from tests.distributed.conftest import Run
from tests.distributed.rank_faults import HANG_S, Job
from tests.distributed.test_faults import ended, started
from tests.distributed.test_jobs import CONSTANT, data, job_of, trained  # noqa: F401
from tests.train.small_job import write_text

DEEP = {
    "model.tie_embeddings": "false",
    "model.num_layers": 4,
    "model.dropout": 0.0,
    "train.micro_batch": 2,
    "train.grad_accum_steps": 4,
    "log.to": '["jsonl"]',
}
STAGES = {"ranks.pipeline": 2}


def figures(folder: Path, rank: int = 0) -> list[tuple[Any, ...]]:
    """What is exact about each step, as this rank has logged it."""
    log = log_lines.read(folder / "events" / f"rank{rank:03d}.jsonl")
    steps = [record.event for record in log if isinstance(record.event, schema.Step)]
    return [
        # As text, in which a norm that is no number equals itself.
        (e.step, e.loss, str(e.grad_norm), e.clip_coef, e.lr, e.loss_scale, e.skipped)
        for e in steps
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint, of the whole model."""
    module = language_model(open_saved(folder), torch.device("cpu")).module
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_run(one: Path, other: Path, ranks_of_other: int) -> None:
    for rank in range(ranks_of_other):
        assert figures(other, rank) == figures(one), rank
    whole, staged = weights(one), weights(other)
    assert whole.keys() == staged.keys()
    assert all(torch.equal(whole[name], staged[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"train.eval_every": 4, "offload.precision": '"fp16"'}),
        pytest.param(
            2,
            {"ranks.schedule": '"gpipe"', "data.packing": '"isolated"'},
            marks=pytest.mark.long,
        ),
        (2, {"train.chunked_loss": "true", "offload.working": '"host"'}),
        (4, {"train.eval_every": 4, "offload.activation": '"recompute"'}),
    ],
)
def test_a_job_in_stages_has_the_bits_of_one_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    options: dict[str, Any],
) -> None:
    """Also its plan is of one stage, to the byte, and the log names it."""
    plain = ranks(size // 2, trained, tmp_path / "whole", data, **DEEP, **options)
    staged = ranks(size, trained, tmp_path / "staged", data, **DEEP, **STAGES, **options)
    assert_same_run(tmp_path / "whole", tmp_path / "staged", size)
    assert {found["val"] for found in staged} == {plain[0]["val"]}
    for rank, found in enumerate(staged):
        for tier, owners in found["planned"].items():
            for owner in ("master weights", "exp_avg", "weights"):
                held = found["held"].get((tier, owner), 0)
                assert owners.get(owner, 0) == held, (rank, tier, owner)
        log = log_lines.read(tmp_path / "staged/events" / f"rank{rank:03d}.jsonl")
        (plan,) = [r.event.plan for r in log if isinstance(r.event, schema.RunStarted)]
        first = rank < size // 2
        held = "embedding, layers 0 to 1" if first else "layers 2 to 3, head"
        assert plan["stage"] == f"stage {1 if first else 2} of 2 ({held})"


@pytest.mark.slow
def test_stages_of_different_sizes_are_the_same_run(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """Balanced by the plan: of 5 layers, the stage with the head has 2. The second half of the run
    is in stages as they are by default, of 2 and 3."""
    five = DEEP | {"model.num_layers": 5, "optim.schedule": '"constant"'}
    five |= {"train.checkpoint_every": 6}
    ranks(1, trained, tmp_path / "whole", data, **five)
    for auto, steps in ((True, 6), (False, 12)):
        stages = STAGES | ({"ranks.layers_per_stage": '"auto"'} if auto else {})
        stages |= {"train.steps": steps}
        staged = ranks(2, trained, tmp_path / "run", data, resume=not auto, **five, **stages)
        for rank, found in enumerate(staged):
            for tier, owners in found["planned"].items():
                held = found["held"].get((tier, "weights"), 0)
                assert owners.get("weights", 0) == held, (rank, tier)
    assert_same_run(tmp_path / "whole", tmp_path / "run", 2)
    log = log_lines.read(tmp_path / "run/events/rank001.jsonl")
    plans = [r.event.plan["stage"] for r in log if isinstance(r.event, schema.RunStarted)]
    assert plans == [f"stage 2 of 2 (layers {first} to 4, head)" for first in (3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(2, 2), (2, 1), pytest.param(1, 2, marks=pytest.mark.long)]
)
def test_a_job_goes_on_in_other_stages(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    before: int,
    after: int,
) -> None:
    """Stopped after 6 steps and resumed: the run that never stopped, bit for bit."""
    constant = DEEP | {"optim.schedule": '"constant"', "train.checkpoint_every": 6}
    if before == after:
        constant |= {"offload.update": '"delayed"'}
    ranks(1, trained, tmp_path / "whole", data, **constant)
    for size, steps in ((before, 6), (after, 12)):
        stages = {"ranks.pipeline": size, "train.steps": steps}
        ranks(size, trained, tmp_path / "run", data, resume=steps > 6, **constant, **stages)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"model.num_experts": 4},
            "set model.router_aux_loss_coef = 0",
            marks=pytest.mark.slow,
        ),
        ({"model.num_layers": 3}, "each stage needs 2 layers; set it to at most 1"),
        ({"model.tie_embeddings": "true"}, "set model.tie_embeddings = false"),
        ({"train.sample_tokens": 5}, "no process holds the whole model"),
        ({"ranks.pipeline": 0}, "ranks.pipeline = 0 must be at least 1"),
        ({"ranks.schedule": '"zb"'}, "ranks.schedule"),
    ],
)
def test_jobs_that_cannot_be_divided(data: Path, changes: dict[str, Any], message: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=message):
        job_of(data, **DEEP | STAGES | changes)


def deep(data: Path, **changes: Any) -> Config:  # noqa: F811
    return job_of(data, **DEEP | STAGES | changes)


def test_ranks_are_divided_into_stages(data: Path) -> None:  # noqa: F811
    job = deep(data)
    assert replicas(job, 4) == 2
    assert roles(job, 4) == ("stage 1 of 2",) * 2 + ("stage 2 of 2",) * 2
    assert [of_stage(job, index).model.num_layers for index in range(2)] == [2, 2]
    assert of_stage(job, 1).stage is not None and shared(job, 4).train.grad_accum_steps == 2
    with pytest.raises(ConfigError, match=r"ranks.pipeline = 2 and 3 ranks"):
        shared(job, 3)
    # A microbatch for each stage, if need be of fewer sequences.
    part = shared(deep(data, **{"train.micro_batch": 4, "train.grad_accum_steps": 1}), 2).train
    assert (part.micro_batch, part.grad_accum_steps) == (2, 2)
    with pytest.raises(ConfigError, match=r"1 sequences per step .* a microbatch for each stage"):
        shared(deep(data, **{"train.micro_batch": 1, "train.grad_accum_steps": 1}), 2)


@pytest.fixture
def staged_job(tmp_path: Path) -> Path:
    write_text(tmp_path)
    made = job_of(tmp_path, **DEEP | STAGES | {"train.steps": 9, "train.checkpoint_every": 4})
    path = tmp_path / "job.toml"
    path.write_text(jobs.dump(made))
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("backward:kill", r"rank 1 \(stage 2 of 2, pid \d+\) was killed by SIGKILL"),
        ("forward:stop", r"rank 1 \(stage 2 of 2, pid \d+\) makes no progress"),
    ],
)
def test_a_stage_that_fails_is_named_and_the_job_comes_back(
    staged_job: Path, tmp_path: Path, fault: str, message: str
) -> None:
    """Restarted from its checkpoint, it has the bits of a run that was left alone."""
    least = ("--nproc", "2", "--set", f"train.hang_timeout_s={HANG_S}")
    started = Job.start(
        staged_job, tmp_path / "run", *least, "--max-restarts", "1", fault=(fault, "5", "1")
    )
    assert started.ended() == 0, started.text
    assert re.search(message, started.text), started.text
    whole = Job.start(staged_job, tmp_path / "whole", *least)
    assert whole.ended() == 0, whole.text
    last = {figure[0]: figure for figure in figures(tmp_path / "run")}
    assert list(last.values()) == figures(tmp_path / "whole")


@pytest.mark.slow
def test_the_other_stage_ends_and_says_why(staged_job: Path, pools: object) -> None:
    with started(staged_job, "backward", 1) as processes:
        codes = [ended(process) for process in processes]
    assert codes == [1, -signal.SIGKILL]
    said = (staged_job.parent / "said0").read_text()
    assert "another rank has failed: rank 1 (stage 2 of 2, pid" in said


def spiking(folder: Path, data: Path) -> None:  # noqa: F811
    """A run in stages whose 11th batch has a loss far above the others."""
    from offloadtrain.train.pipelined import PipelinedModel

    run, calls = PipelinedModel.run, 0

    def spoilt(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return run(*given) * (80.0 if calls == 11 else 1.0)

    changes = {"train.on_spike": '"rollback"', "train.steps": 14, "train.checkpoint_every": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "SPIKE_AFTER", 6)
        patch.setattr(PipelinedModel, "run", spoilt)
        trained(folder, data, **DEEP | STAGES | CONSTANT | changes)


@pytest.mark.long
def test_all_stages_go_back_from_a_spike(ranks: Run, tmp_path: Path, data: Path) -> None:  # noqa: F811
    ranks(2, spiking, tmp_path / "run", data)
    tried = [[figure[0] for figure in figures(tmp_path / "run", rank)] for rank in range(2)]
    assert tried[0] == tried[1] == [*range(1, 12), 10, 11, 12, 13, 14]
