"""Jobs whose experts are divided among the ranks of each stage of a pipeline: the bits of the same
job without stages, and its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.config.batch_split import explain, replicas, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.plan.report import text
from offloadtrain.plan.search.choices import choices_of
from offloadtrain.train import dry_run
from tests.distributed.conftest import Run
from tests.distributed.staged_job import (
    INTERLEAVED,
    UNFLUSHED,
    assert_goes_on_alone,
    assert_same_as_alone,
    assert_same_in_both,
)
from tests.distributed.test_expert_jobs import EXPERTS, STAGE_3
from tests.distributed.test_jobs import data, job_of  # noqa: F401
from tests.distributed.test_pipeline_jobs import DEEP, STAGES
from tests.distributed.test_tensor_jobs import BF16, assert_comes_back, written

STAGED = DEEP | EXPERTS | {"model.router_aux_loss_coef": 0.0, "ranks.expert": 2}


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    "changes",
    [
        {"offload.precision": '"fp16"', "train.eval_every": 4},
        STAGE_3 | {"offload.activation": '"recompute"', "train.chunked_loss": "true"},
        BF16 | {"offload.working": '"host"', "offload.state": '"split16"'},
        UNFLUSHED,
        INTERLEAVED | STAGE_3,
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_job_in_stages_has_the_bits_of_one_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    assert_same_as_alone(ranks, tmp_path, data, STAGED | STAGES | changes)


@pytest.mark.slow
@pytest.mark.draws(0.4)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((4, STAGES | STAGE_3), (2, {})),
        ((4, STAGES), (1, {"ranks.expert": 1})),
        ((2, STAGES | {"ranks.expert": 1}), (4, STAGES | STAGE_3)),
    ],
)
def test_a_checkpoint_is_the_same_in_every_division(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: tuple[int, dict[str, Any]],
    then: tuple[int, dict[str, Any]],
) -> None:
    assert_same_in_both(ranks, tmp_path, data, STAGED, first, then)


@pytest.mark.slow
def test_a_job_goes_on_without_stages(ranks: Run, tmp_path: Path, data: Path) -> None:  # noqa: F811
    assert_goes_on_alone(ranks, tmp_path, data, STAGED, STAGES | STAGE_3)


@pytest.mark.slow
def test_experts_of_a_stage_that_are_killed_come_back(tmp_path: Path) -> None:
    path = written(tmp_path, **STAGED | STAGES)
    role = "stage 2 of 2, experts 0 to 1"
    assert_comes_back(path, tmp_path, ranks=4, killed=2, role=role)


@pytest.mark.slow
def test_ranks_of_each_stage_are_divided(data: Path) -> None:  # noqa: F811
    job = job_of(data, **STAGED | STAGES)
    held = ("experts 0 to 1", "experts 2 to 3")
    assert roles(job, 4) == tuple(f"stage {one} of 2, {two}" for one in (1, 2) for two in held)
    assert replicas(job, 8) == 4
    assert "2 stages of 2 ranks each, every 2 of which hold all experts" in explain(
        job, shared(job, 4), 4
    )
    with pytest.raises(ConfigError, match=r"experts of a stage\. Start a multiple of 4"):
        shared(job, 6)
    with pytest.raises(ConfigError, match="passes on no load-balancing loss"):
        job_of(data, **STAGED | STAGES | {"model.router_aux_loss_coef": 0.01})
    assert choices_of(replace(job, ranks=replace(job.ranks, expert=1)), 4)["ranks.expert"] == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, INTERLEAVED, UNFLUSHED])
def test_tokens_of_a_rank_are_those_of_its_stages(
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    """Two all-to-alls forward and two backward in each of its layers, half of the rows leave."""
    job = job_of(data, **STAGED | STAGES | changes)
    plan = make(job, *find("cpu2"), 4)
    part = plan.placed.config.train
    rows = part.micro_batch * part.grad_accum_steps * 32 * 2
    sent = 4 * (job.model.num_layers // 2) * rows * 32 * 4 // 2
    assert plan.prediction.experts_bytes == sent
    assert "each rank holds 2 of 4 experts of a layer" in text(plan)
    assert "as planned" in dry_run.check(plan)
