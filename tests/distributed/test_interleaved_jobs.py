"""Jobs whose ranks hold several stages of a pipeline (interleaved 1F1B): the bits of ranks that
hold the whole model, checkpoints of either."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.plan.report import text
from offloadtrain.train import dry_run
from tests.distributed.conftest import Run
from tests.distributed.rank_faults import Job
from tests.distributed.test_jobs import CONSTANT, data, job_of, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import DEEP, assert_same_run, figures
from tests.distributed.test_unflushed_jobs import assert_same_state, evaluations, events
from tests.train.small_job import write_text

DEEPER = DEEP | {"model.num_layers": 8}
STAGES = {"ranks.pipeline": 2, "ranks.schedule": '"interleaved"', "ranks.stages_per_rank": 2}

NO_STAGES = {"ranks.pipeline": 1, "ranks.schedule": '"1f1b"', "ranks.stages_per_rank": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"train.eval_every": 4, "offload.precision": '"fp16"', "data.packing": '"isolated"'}),
        (2, {"offload.activation": '"offload"', "offload.working": '"host"'}),
        (4, {"offload.activation": '"recompute"', "offload.update": '"delayed"'}),
        pytest.param(
            4,
            {"ranks.pipeline": 4, "model.num_layers": 16, "train.chunked_loss": "true"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            {"model.num_layers": 12, "ranks.stages_per_rank": 3, "offload.state": '"split16"'},
            marks=pytest.mark.long,
        ),
        pytest.param(
            4, {"offload.state_on": '"device"', "offload.zero_stage": 1}, marks=pytest.mark.long
        ),
    ],
)
def test_an_interleaved_job_has_the_bits_of_one_without_stages(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    options: dict[str, Any],
) -> None:
    """Each rank holds what was planned of its stages together, to the byte of each owner."""
    chosen = DEEPER | STAGES | options
    ranks_of_one = size // chosen["ranks.pipeline"]
    one = chosen | NO_STAGES
    plain = ranks(ranks_of_one, trained, tmp_path / "whole", data, **one)
    staged = ranks(size, trained, tmp_path / "staged", data, **chosen)
    assert_same_run(tmp_path / "whole", tmp_path / "staged", size)
    assert {found["val"] for found in staged} == {plain[0]["val"]}
    if size == 2:  # the report of a rank is that of all its stages
        alone, one, other = (
            [event.d2h_bytes for event in events(tmp_path / run, schema.Step, rank)]
            for run, rank in (("whole", 0), ("staged", 0), ("staged", 1))
        )
        assert [sum(pair) for pair in zip(one, other, strict=True)] == alone
    for rank, found in enumerate(staged):
        for tier, owners in found["planned"].items():
            held = {owner: n for (where, owner), n in found["held"].items() if where == tier}
            assert {owner: n for owner, n in owners.items() if n} == held, (rank, tier)


@pytest.mark.slow
def test_all_stages_of_a_rank_evaluate_without_dropout(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    chosen = DEEPER | {"model.dropout": 0.5, "train.steps": 1, "train.eval_every": 1}
    ranks(1, trained, tmp_path / "whole", data, **chosen)
    ranks(2, trained, tmp_path / "staged", data, **chosen | STAGES)
    assert evaluations(tmp_path / "staged")[0] == evaluations(tmp_path / "whole")[0]


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STAGES, NO_STAGES),
        (NO_STAGES, STAGES),
        (STAGES, NO_STAGES | {"ranks.pipeline": 2}),
        pytest.param(STAGES, STAGES, marks=pytest.mark.long),
        pytest.param(NO_STAGES | {"ranks.pipeline": 4}, STAGES, marks=pytest.mark.long),
    ],
)
def test_an_interleaved_job_goes_on_in_another_division(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """Stopped after 7 steps and resumed: the run of one process that never stopped, bit for bit."""
    chosen = DEEPER | CONSTANT | {"train.checkpoint_every": 5, "offload.update": '"delayed"'}
    ranks(1, trained, tmp_path / "whole", data, **chosen)
    for stages, steps in ((before, 7), (after, 12)):
        more = stages | {"train.steps": steps}
        size = stages["ranks.pipeline"]
        ranks(size, trained, tmp_path / "run", data, resume=steps > 7, **chosen | more)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "whole", tmp_path / "run")


@pytest.mark.long
def test_a_killed_rank_of_two_stages_comes_back(tmp_path: Path) -> None:
    write_text(tmp_path)
    few = {"train.steps": 9, "train.checkpoint_every": 4}
    job = tmp_path / "job.toml"
    job.write_text(jobs.dump(job_of(tmp_path, **DEEPER | STAGES | few)))
    least = ("--nproc", "2", "--set", "train.hang_timeout_s=15")
    fault = ("backward:kill", "6", "1")
    run = Job.start(job, tmp_path / "run", *least, "--max-restarts", "1", fault=fault)
    assert run.ended() == 0, run.text
    named = r"rank 1 \(stages 2 and 4 of 4, pid \d+\) was killed by SIGKILL"
    assert re.search(named, run.text), run.text
    assert "2 ranks with 2 of 4 stages each share 8 sequences" in run.text
    whole = Job.start(job, tmp_path / "whole", *least)
    assert whole.ended() == 0, whole.text
    last = {figure[0]: figure for figure in figures(tmp_path / "run")}
    assert list(last.values()) == figures(tmp_path / "whole")
    log = log_lines.read(tmp_path / "run/events/rank001.jsonl")
    (plan, *_) = [r.event.plan for r in log if isinstance(r.event, schema.RunStarted)]
    assert plan["stage"] == "stages 2 and 4 of 4 (layers 2 to 3; layers 6 to 7, head)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks.stages_per_rank": 1}, '"interleaved" is for 2 and more stages on each rank'),
        ({"ranks.schedule": '"1f1b"'}, '"interleaved" is for 2 and more stages on each rank'),
        ({"model.num_layers": 6}, "each stage needs 2 layers; set it to at most 1"),
        ({"offload.update": '"speculative"'}, "Set offload.update = 'exact', or"),
        ({"offload.state_on": '"auto"'}, "Set offload.state_on = 'host', or"),
        ({"offload.state_on": '"disk"'}, "Set offload.state_on = 'host', or"),
        ({"offload.host_memory_limit": '"8 GiB"'}, "Set offload.host_memory_limit = 0, or"),
        ({"offload.device_memory_limit": '"8 GiB"'}, "Set offload.device_memory_limit = 0, or"),
        ({"ranks.stages_per_rank": 0}, "ranks.stages_per_rank = 0 must be at least 1"),
    ],
)
def test_what_does_not_go_with_several_stages_is_refused(
    data: Path,  # noqa: F811
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of(data, **DEEPER | STAGES | changes)


def test_microbatches_run_in_rounds(data: Path) -> None:  # noqa: F811
    """A rank takes smaller microbatches, or the job is refused."""
    job = job_of(data, **DEEPER | STAGES | {"ranks.pipeline": 4, "model.num_layers": 16})
    odd = {"micro_batch": 4, "grad_accum_steps": 9}
    part = shared(replace(job, train=replace(job.train, **odd)), 4).train
    assert (part.micro_batch, part.grad_accum_steps) == (3, 12)
    alone = {"micro_batch": 1, "grad_accum_steps": 9}
    with pytest.raises(ConfigError, match=r"train.grad_accum_steps to a multiple of 4"):
        shared(replace(job, train=replace(job.train, **alone)), 4)


@pytest.mark.parametrize("changes", [{}, {"offload.zero_stage": 1, "offload.state": '"split16"'}])
def test_the_dry_run_of_a_rank_is_the_sum_of_its_stages(
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    job = job_of(data, **DEEPER | STAGES | {"train.micro_batch": 4} | changes)
    plans = [make(job, *find("cpu2"), 4, stage=place) for place in range(2)]
    for place, plan in enumerate(plans):
        said = dry_run.check(plan)
        assert "laid out 4 blocks" in said and "free of races" in said
        four = replace(job, ranks=RanksConfig(pipeline=4))
        alone = [make(four, *find("cpu2"), 8, stage=number) for number in (place, place + 2)]
        for owner in ("master weights", "exp_avg", "gradient sums", "norms"):
            assert plan.host.get(owner, 0) == sum(one.host.get(owner, 0) for one in alone), owner
        weights = sum(one.engine_device["working weights"] for one in alone)
        assert plan.engine_device["working weights"] == weights
    assert "stages 1 and 3 of 4 (embedding, layers 0 to 1; layers 4 to 5)" in text(plans[0])
