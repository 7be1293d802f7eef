"""Jobs with `ranks.tensor` beside `ranks.pipeline` (PTD-P): the bits of the same job without
stages, checkpoints of any division, and the plan of each rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import explain, replicas, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import make
from offloadtrain.plan.report import text
from offloadtrain.train import dry_run
from tests.distributed.conftest import Run
from tests.distributed.staged_job import (
    INTERLEAVED,
    UNFLUSHED,
    assert_goes_on_alone,
    assert_same_as_alone,
    assert_same_in_both,
)
from tests.distributed.test_jobs import data, job_of, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import DEEP, STAGES
from tests.distributed.test_tensor_jobs import BF16, GPT2, PARTS, WIDE, assert_comes_back, written

BOTH = WIDE | DEEP | STAGES | PARTS
LEARNED = GPT2 | {"model.tie_embeddings": "false"}
PARTITIONED = {"offload.partition_activations": "true"}


@pytest.mark.slow
@pytest.mark.draws(0.6)
@pytest.mark.parametrize(
    "changes",
    [
        {"offload.precision": '"fp16"', "train.eval_every": 4},
        LEARNED | BF16 | {"offload.activation": '"recompute"'} | PARTITIONED,
        pytest.param(
            BF16 | {"offload.working": '"host"', "offload.activation": '"offload"'} | PARTITIONED,
            marks=pytest.mark.long,
        ),
        UNFLUSHED | {"offload.state": '"split16"'} | BF16,
        pytest.param(INTERLEAVED | {"train.chunked_loss": "true"}, marks=pytest.mark.long),
        pytest.param(
            {"ranks.schedule": '"gpipe"', "offload.update": '"speculative"'}, marks=pytest.mark.long
        ),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_job_in_stages_has_the_bits_of_one_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    assert_same_as_alone(ranks, tmp_path, data, BOTH | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((4, STAGES | PARTS), (1, {})),
        pytest.param(*((4, STAGES | PARTS), (2, STAGES)), marks=pytest.mark.long),
        ((2, PARTS), (4, STAGES | PARTS)),
    ],
)
def test_a_checkpoint_is_the_same_in_every_division(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: tuple[int, dict[str, Any]],
    then: tuple[int, dict[str, Any]],
) -> None:
    chosen = WIDE | DEEP | LEARNED | BF16
    assert_same_in_both(ranks, tmp_path, data, chosen, first, then)
    assert main(["checkpoints", f"{tmp_path}/run", "--verify"]) == 0


@pytest.mark.slow
def test_a_job_goes_on_without_stages(ranks: Run, tmp_path: Path, data: Path) -> None:  # noqa: F811
    assert_goes_on_alone(ranks, tmp_path, data, WIDE | DEEP | PARTS, STAGES)


@pytest.mark.slow
def test_a_part_of_a_stage_that_is_killed_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path, **BOTH)
    assert_comes_back(path, tmp_path, ranks=4, killed=3, role="stage 2 of 2, part 2 of 2")


@pytest.mark.slow
def test_ranks_of_each_stage_are_divided(data: Path) -> None:  # noqa: F811
    job = job_of(data, **BOTH)
    every = [f"stage {one} of 2, part {two} of 2" for one in (1, 2) for two in (1, 2)]
    assert roles(job, 4) == tuple(every)
    assert replicas(job, 8) == 2
    assert "2 stages of 4 ranks each, every 2 of which divide its matrices" in explain(
        job, shared(job, 8), 8
    )
    with pytest.raises(ConfigError, match=r"each part of each stage .* Start a multiple of 4"):
        shared(job, 6)
    experts = {"model.num_experts": 4, "model.router_aux_loss_coef": 0.0, "ranks.expert": 2}
    with pytest.raises(ConfigError, match="Set one of the three to 1"):
        job_of(data, **BOTH | experts)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, INTERLEAVED, UNFLUSHED], ids=("1f1b", "x2", "2bw"))
def test_traffic_by_hand(data: Path, changes: dict[str, Any]) -> None:  # noqa: F811
    """Each part sends its whole activations to the next stage, and two sums forward and two
    backward of every layer that it holds to the other part; every stage is proved."""
    job = job_of(data, **BOTH | changes)
    plan = make(job, *find("cpu2"), 4)
    part = plan.placed.config.train
    tensor = part.micro_batch * 32 * 32 * 4  # tokens, d_model, fp32
    of_step = 4 * (job.model.num_layers // 2) * tensor * part.grad_accum_steps
    assert plan.prediction.parts_bytes == of_step
    assert plan.pipeline is not None and plan.ranks == 4
    assert {link.nbytes for link in plan.pipeline.links} == {tensor}
    assert "tensor parallel: each rank holds 1/2 of the layers' matrices" in text(plan)
    for stage in (0, 1):
        assert "as planned" in dry_run.check(make(job, *find("cpu2"), 4, stage=stage))


@pytest.mark.slow
def test_parts_of_a_stage_fill_hosts_one_by_one(data: Path) -> None:  # noqa: F811
    """Stages of 2 replicas in 2 parts, on hosts of 2 and of 4: where each link lies."""
    auto = {"offload.precision": '"bf16"', "device.kind": '"auto"'}
    job = job_of(data, **BOTH | auto)
    name, machine = find("h100")
    for gpus, between, sharing in ((8, False, 0), (4, True, 4), (2, True, 2)):
        some = replace(machine, gpus=gpus, node_link_gbps=1.0)
        plan = make(job, name, some, 8)
        assert plan.pipeline is not None
        (link,) = plan.pipeline.links
        assert link.between_hosts is between
        if between:
            assert link.seconds == pytest.approx(link.nbytes * sharing / 1e9)


@pytest.mark.slow
def test_a_search_keeps_the_parts(
    data: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = data / "job.toml"
    path.write_text(jobs.dump(job_of(data, **BOTH)))
    asked = ["plan", str(path), "--machine", "cpu2", "--search", "--json"]
    assert main([*asked, "--gpus", "4"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["stages"], row["replicas"]) for row in rows} == {(1, 2), (2, 1)}
    assert main([*asked, "--gpus", "3"]) == 2
    assert "ranks.tensor = 2 and 3 ranks" in capsys.readouterr().err


@pytest.mark.slow
def test_the_log_says_what_each_rank_holds(ranks: Run, tmp_path: Path, data: Path) -> None:  # noqa: F811
    """And the plan that the command prints is of the same stages."""
    steps = {"train.steps": 1, "train.eval_every": 0, "optim.warmup_steps": 0}
    ranks(4, trained, tmp_path / "run", data, **BOTH | steps)
    for rank in range(4):
        log = log_lines.read(tmp_path / "run/events" / f"rank{rank:03d}.jsonl")
        (plan,) = [r.event.plan for r in log if isinstance(r.event, schema.RunStarted)]
        held = ("embedding, layers 0 to 1", "layers 2 to 3, head")[rank // 2]
        assert plan["stage"] == f"stage {rank // 2 + 1} of 2 ({held})"
        assert plan["part"] == f"part {rank % 2 + 1} of 2"
