"""Plans of divided jobs: traffic by hand, hosts, memory limits, and searches.

Planned and allocated bytes of each division are compared in `test_divisions.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from offloadtrain.config.batch_split import shared
from offloadtrain.config.job import problems_of_ranks
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.parallel import expert_parallel
from offloadtrain.parallel.pipeline.plan import times_of
from offloadtrain.plan.plan import make
from offloadtrain.plan.report import as_json, text
from offloadtrain.plan.search.suggest import applied, choices_of, nearest, single_changes
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.process_group import Ranks, all_to_all_single
from offloadtrain.train import dry_run
from offloadtrain.train.build import assemble
from offloadtrain.train.losses import loss_of
from tests.distributed.conftest import Run
from tests.distributed.divisions import DIVISIONS, INTERLEAVED, TWO_VERSIONS
from tests.distributed.rank_jobs import ANY_DEVICE, BF16, Options, job_of, newest, train
from tests.distributed.test_division_rules import divided_job
from tests.distributed.test_divisions import GPT2
from tests.plan.test_memory import GPT, booked, job, planned
from tests.plan.tracing.measured import most_allocated

DEEP_INTERLEAVED: Options = INTERLEAVED | {"model.num_layers": 8}
OFFLOADED: Options = {"offload.activation": '"offload"', "offload.recompute_blocks": 1}


def test_traffic_among_copies_by_hand() -> None:
    """A shard is summed over R copies: 2 (R - 1) / R of it leave a rank in each microbatch; within
    the group, traffic is that of a single group."""
    job = divided_job("groups", **{"train.grad_accum_steps": 8})
    grouped = make(job, *find("cpu2"), 4)
    alone = make(replace(job, ranks=RanksConfig()), *find("cpu2"), 2)
    shard = sum(bucket.shard_numel for bucket in grouped.placed.spec.buckets)
    traffic = grouped.prediction
    micro_steps = grouped.placed.config.train.grad_accum_steps
    assert micro_steps == 2 and traffic.sent.copies.num_bytes == micro_steps * 4 * shard * 2 // 2
    halves = alone.placed.config.train.grad_accum_steps // micro_steps
    of_gathers = sum(bucket.shard_numel * 4 for bucket in alone.placed.spec.buckets)
    within = (alone.prediction.comm_bytes - of_gathers) // halves + of_gathers
    assert traffic.comm_bytes == within + traffic.sent.copies.num_bytes
    assert traffic.sent.copies.seconds == pytest.approx(
        traffic.sent.copies.num_bytes / (grouped.machine.gpu_link_gbps * 1e9)
    )
    assert "2 copies of the state, each in 2 shards" in text(grouped)
    assert as_json(grouped)["state_copies"] == 2 and as_json(alone)["state_copies"] == 1
    assert alone.prediction.sent.copies.num_bytes == 0


def two_gpus(machine: Machine) -> Machine:
    return replace(machine, gpus=2, gpu_link_gbps=100.0, node_link_gbps=5.0)


def test_state_that_does_not_fit_in_every_host_is_divided_among_all() -> None:
    """The plan suggests to give up the copies."""
    job = divided_job("groups", **BF16 | ANY_DEVICE)
    name, machine = find("rtx4090")
    ample = make(job, name, two_gpus(machine), 4)
    least = max(ample.host_peaks.values()) + machine.host_reserved_bytes
    short = replace(two_gpus(machine), host_memory=f"{least - 1} B")
    changes = nearest(job, name, short, 4)
    assert not make(job, name, short, 4).fits
    assert any(change.keys == {"ranks.shard": 0} and change.plan.fits for change in changes)


def test_tokens_on_their_way_by_hand() -> None:
    """Two all-to-alls forward and two backward in each of 2 layers, and two when forward runs
    again; half of a microbatch's tokens leave, once for each of the 2 experts that they chose."""
    job = divided_job("experts")
    for activation, exchanges in (("keep", 8), ("recompute", 12)):
        policy = {"offload.activation": f'"{activation}"'}
        plan = make(divided_job("experts", **policy), *find("cpu2"), 2)
        part = plan.placed.config.train
        rows = part.micro_batch * 32 * 2
        sent = exchanges * rows * 32 * 4 // 2 * part.grad_accum_steps  # d_model, fp32
        assert plan.prediction.sent.experts.num_bytes == sent
        assert plan.prediction.sent.experts.seconds == pytest.approx(
            sent / (plan.machine.gpu_link_gbps * 1e9)
        )
        assert "each rank holds 2 of 4 experts of a layer" in text(plan)
        assert as_json(plan)["expert_parts"] == 2
    plain = make(replace(job, ranks=RanksConfig()), *find("cpu2"), 2)
    assert plain.prediction.sent.experts.num_bytes == 0 and "expert parallel" not in text(plain)
    # Both hold all experts once: a rank in the one, both ranks in the other.
    assert make(job, *find("cpu2"), 2).checkpoint_bytes == pytest.approx(
        plain.checkpoint_bytes, rel=0.01
    )


@pytest.mark.slow
def test_a_job_that_does_not_fit_should_divide_its_experts() -> None:
    """A job that fits gets no suggestion that the table [ranks] refuses."""
    large = {"model.d_model": 512, "model.d_ff": 2048, "model.num_experts": 16}
    name, machine = find("rtx4090")
    small = replace(machine, gpus=4, gpu_memory="1500 MiB", gpu_reserved="1 GiB")
    job = divided_job(
        "experts", **BF16 | ANY_DEVICE | large | {"ranks.expert": 1, "train.grad_accum_steps": 8}
    )
    assert not make(job, name, small, 4).fits
    changes = nearest(job, name, small, 4)
    assert {"ranks.expert": 4} in [change.keys for change in changes]
    divided = applied(job, {"ranks.expert": 4})
    tiny = replace(small, gpu_memory="1200 MiB")
    tried = [*nearest(divided, name, tiny, 4), *single_changes(divided, name, machine, 4)]
    assert tried and all(
        not [*problems_of_ranks(applied(divided, change.keys))] for change in tried
    )
    plain = divided_job("one rank", **ANY_DEVICE)
    assert choices_of(plain, 4)["ranks.expert"] == (1,)


def in_turn(logits_ND: torch.Tensor, experts: int) -> torch.Tensor:
    """Let each token choose two experts, and each expert get the same number of tokens."""
    first = torch.arange(len(logits_ND))
    chosen = torch.stack([first, first + 1], 1) % experts
    return logits_ND + 9.0 * torch.zeros_like(logits_ND).scatter_(1, chosen, 1.0)


def slow_exchange(*args: Any, **options: Any) -> None:
    all_to_all_single(*args, **options)
    time.sleep(0.003)


def planned_share(data: Path, **changes: Any) -> float:
    """Return the planned bytes of torch in a step, as a multiple of what it allocates."""
    ranks = Ranks.of(None, torch.device("cpu"))
    place = RankInfo(ranks.rank, ranks.size, ranks.rank, ranks.size)
    with on_lanes(SequentialLanes()):
        context = assemble(job_of(data, **changes), ranks=ranks, rank_info=place)
    experts = context.plan.job.model.num_experts
    for block in context.model.module.blocks:
        block.mlp.router.register_forward_hook(lambda _, inputs, logits: in_turn(logits, experts))

    def step() -> None:
        for _ in range(context.local.train.grad_accum_steps):
            context.optimizer.backward(loss_of(context.model, context.batches.next(), None))
        context.optimizer.step()

    # Gloo's threads let go of a tensor later than we do: wait for them, and take the least.
    with patch.object(expert_parallel, "all_to_all_single", slow_exchange):
        allocated = min(most_allocated(step) for _ in range(6))
    context.optimizer.close()
    ranks.close()
    return context.plan.activations.total / allocated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [("experts", "keep"), ("four experts", "recompute"), ("parts, experts", "keep")],
)
def test_activations_are_near_the_plan(ranks: Run, data: Path, name: str, policy: str) -> None:
    """If all experts get the same number of tokens, as the plan assumes."""
    division = DIVISIONS[name]
    options = division.model | division.options | GPT2 | {"offload.activation": f'"{policy}"'}
    options |= {"model.d_model": 64, "model.num_layers": 6, "model.d_ff": 256}
    options |= {"model.max_seq_len": 64, "data.seq_len": 64}
    options |= {"train.micro_batch": 4, "train.grad_accum_steps": division.ranks}
    ratios = ranks(division.ranks, planned_share, data, **options)
    assert ratios == pytest.approx([1.0] * division.ranks, abs=0.05)


def test_traffic_among_parts_by_hand() -> None:
    """Two sums forward and two backward in each of 2 layers, and one in each recompute; each sends
    its tensor once round a ring of two, in fp32."""
    job = divided_job("parts")
    again = divided_job("parts", **{"offload.activation": '"recompute"'})
    tensor = 4 * 4 * 32 * 32  # fp32, sequences, tokens, d_model
    for policy, sums in ((job, 8), (again, 10)):
        plan = make(policy, *find("cpu2"), 2)
        assert plan.prediction.sent.parts.num_bytes == sums * tensor * 2  # microbatches
        assert 0 < plan.prediction.sent.parts.seconds < plan.prediction.busy_s["compute"]
        assert "tensor parallel: each rank holds 1/2" in text(plan)
    assert (
        make(replace(job, ranks=RanksConfig()), *find("cpu2"), 2).prediction.sent.parts.num_bytes
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, DEEP_INTERLEAVED, TWO_VERSIONS], ids=("1f1b", "x2", "2bw"))
def test_traffic_within_a_stage_by_hand(options: Options) -> None:
    """Each part sends its undivided activations to the next stage, and two sums forward and two
    backward of every layer that it holds to the other part. Of experts half of the rows leave, in
    as many all-to-alls. Every stage is proved."""
    plan, of_experts = (
        make(divided_job(name, **options), *find("cpu2"), 4)
        for name in ("stages, parts", "stages, experts")
    )
    part, layers = plan.placed.config.train, plan.job.model.num_layers // 2
    tensor = part.micro_batch * 32 * 32 * 4  # tokens, d_model, fp32
    assert plan.prediction.sent.parts.num_bytes == 4 * layers * tensor * part.grad_accum_steps
    times = times_of(plan)
    assert times is not None and {link.nbytes for link in times.links} == {tensor}
    assert "tensor parallel: each rank holds 1/2 of the layers' matrices" in text(plan)
    part = of_experts.placed.config.train
    rows = part.micro_batch * part.grad_accum_steps * 32 * 2
    assert of_experts.prediction.sent.experts.num_bytes == 4 * layers * rows * 32 * 4 // 2
    assert "each rank holds 2 of 4 experts of a layer" in text(of_experts)
    for proved in (plan, make(plan.job, *find("cpu2"), 4, stage=1), of_experts):
        assert "as planned" in dry_run.check(proved) and proved.ranks == 4


@pytest.mark.slow
def test_the_dry_run_of_a_rank_is_the_sum_of_its_stages() -> None:
    job = divided_job("interleaved", **{"train.micro_batch": 4, "offload.zero_stage": 1})
    plans = [make(job, *find("cpu2"), 4, stage=place) for place in range(2)]
    for place, plan in enumerate(plans):
        report = dry_run.check(plan)
        assert "laid out 4 blocks" in report and "free of races" in report
        four = replace(job, ranks=RanksConfig(pipeline=4))
        alone = [make(four, *find("cpu2"), 8, stage=number) for number in (place, place + 2)]
        for owner in ("master weights", "exp_avg", "gradient sums", "norms"):
            assert plan.host.get(owner, 0) == sum(stage.host.get(owner, 0) for stage in alone), (
                owner
            )
        weights = sum(stage.engine_device["working weights"] for stage in alone)
        assert plan.engine_device["working weights"] == weights
    assert "stages 1 and 3 of 4 (embedding, layers 0 to 1; layers 4 to 5)" in text(plans[0])


@pytest.mark.parametrize(
    "options", [{}, {"offload.zero_stage": 1, "offload.state": '"split16"', **OFFLOADED}]
)
def test_the_dry_run_of_each_stage_is_its_plan(options: Options) -> None:
    """Bytes are the Ledger's, and two steps at once have no race; the step has no bubble."""
    job = divided_job("2bw", **{"train.micro_batch": 4} | options)
    plans = [make(job, *find("cpu2"), 4, stage=stage) for stage in range(2)]
    for plan in plans:
        assert "free of races" in dry_run.check(plan)
        assert "2bw: no flush" in text(plan)
    flushed = replace(job, ranks=replace(job.ranks, schedule="1f1b"))
    before = [make(flushed, *find("cpu2"), 4, stage=stage) for stage in range(2)]
    first, last = (plan.placed.device()["working weights"] for plan in before)
    assert [plan.placed.device()["working weights"] for plan in plans] == [2 * first, last]
    first, last = (plan.placed.host()["gradient sums"] for plan in before)
    assert [plan.placed.host()["gradient sums"] for plan in plans] == [first, 2 * last]
    assert plans[0].prediction.seconds < before[0].prediction.seconds


@pytest.mark.slow
def test_parameters_that_parts_have_in_common_are_planned_once(
    ranks: Run, tmp_path: Path, data: Path
) -> None:
    """A checkpoint has them once, too."""
    division = DIVISIONS["parts, experts"]
    ranks(4, train, tmp_path / "run", data, **division.model | division.options)
    entries = newest(tmp_path / "run").manifest.entries
    saved = sum(4 * (entry.hi - entry.lo) for entry in entries)
    planned = make(divided_job("experts"), *find("cpu2"), 2).checkpoint_bytes
    assert make(divided_job("parts, experts"), *find("cpu2"), 4).checkpoint_bytes == planned
    assert saved <= planned < 1.02 * saved  # the ends of buffers


# The plan of tables in shards: what a rank holds and moves, to the byte. Other plans of ranks are
# in `test_divisions.py`.


@pytest.mark.parametrize("working", ["device", "host"])
def test_of_tables_in_shards(ranks: Run, working: str) -> None:
    """Untied ones, of which one is gathered at a time."""
    keys = {"offload__zero_stage": 3, "offload__working": working, "model__tie_embeddings": False}
    config = shared(job(GPT, train__micro_batch=4, **keys), 4)
    table, sharded = config.model.vocab_size * config.model.d_model, planned(config, 4)
    assert ranks(4, booked, config) == [sharded] * 4
    unsharded = planned(replace(config, offload=config.offload.replace(keep_whole=("*",))), 4)
    on_device = [sum(tiers["device"].values()) for tiers in (sharded, unsharded)]
    assert on_device[1] - on_device[0] > (0.9 if working == "host" else 0.4) * 2 * table
