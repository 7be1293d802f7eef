"""Whole jobs whose experts are divided among ranks: near ranks that hold all of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import replicas, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import problems_of_ranks
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.automatic import FULL
from offloadtrain.plan.costs.among_ranks import AmongExperts
from offloadtrain.plan.plan import PROCESS, make
from offloadtrain.plan.report import as_json, text
from offloadtrain.plan.search.choices import choices_of
from offloadtrain.plan.search.suggest import applied, nearest, single_changes
from offloadtrain.runtime import token_exchange
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.process_group import Ranks, all_to_all_single
from offloadtrain.step.layout.buffer_table import device_bytes
from offloadtrain.train import dry_run
from offloadtrain.train.build import assemble
from offloadtrain.train.losses import loss_of
from tests.distributed.conftest import Run
from tests.distributed.test_hybrid_jobs import ANY
from tests.distributed.test_jobs import CONSTANT, close, data, job_of, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import figures
from tests.distributed.test_tensor_jobs import (
    BF16,
    GPT2,
    assert_comes_back,
    assert_same_state,
    carried,
    worst,
    written,
)
from tests.sizing.measured import most_allocated as activations_in

EXPERTS = {
    "model.num_experts": 4,
    "model.d_ff": 48,
    "model.router_aux_loss_coef": 0.01,
    "model.dropout": 0.0,
    "offload.precision": '"fp32"',
    "log.to": '["jsonl"]',
}
PARTS = {"ranks.expert": 2}
STAGE_3 = {"offload.zero_stage": 3}


@pytest.mark.parametrize(
    ("size", "parts", "changes"),
    [
        (2, 2, {}),
        pytest.param(4, 4, {"model.experts_per_token": 1}, marks=pytest.mark.slow),
        pytest.param(4, 2, GPT2, marks=pytest.mark.slow),
    ],
)
def test_a_job_of_experts_is_near_ranks_that_hold_all(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    parts: int,
    changes: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same batches and the same first weights: only the order of sums differs."""
    chosen = EXPERTS | changes | {"train.eval_every": 4, "train.eval_batches": 4}
    whole = ranks(size, trained, tmp_path / "whole", data, **chosen)
    found = ranks(size, trained, tmp_path / "parts", data, **chosen, **{"ranks.expert": parts})
    assert all(one["losses"] == found[0]["losses"] for one in found)
    assert found[0]["losses"][1] == whole[0]["losses"][1]  # forward has the same bits
    assert close(whole[0]["losses"], found[0]["losses"], 1e-4)
    assert found[0]["val"] == pytest.approx(whole[0]["val"], rel=1e-4)
    assert found[0]["tokens"] == whole[0]["tokens"]
    apart = worst(tmp_path / "whole", tmp_path / "parts")
    with capsys.disabled():
        print(f"\nexperts on {parts} of {size} ranks: the worst master differs by {apart:.2g}")
    assert 0 < apart < 1e-3  # a tenth of what one step of lr moves


@pytest.mark.slow
@pytest.mark.draws(0.4)
@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        ((2, 2), (2, 1), {}),
        ((2, 2), (1, 1), BF16 | {"offload.state": '"split16"'}),
        ((1, 1), (4, 2), GPT2),
        ((4, 4), (2, 2), {"offload.zero_stage": 1}),
        ((4, 2), (4, 4), {"offload.update": '"delayed"'}),
        ((4, 2), (2, 2), STAGE_3),
        ((4, 2), (1, 1), {"offload.working": '"host"'}),
    ],
)
def test_a_checkpoint_is_the_same_wherever_experts_are(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: tuple[int, int],
    then: tuple[int, int],
    changes: dict[str, Any],
) -> None:
    """(ranks, ranks with other experts) → the same: masters and moments to the bit, and back."""
    chosen = EXPERTS | changes | {"train.steps": 3, "train.eval_every": 0}
    before, after = ({"ranks.expert": parts} for _, parts in (first, then))
    ranks(first[0], trained, tmp_path / "run", data, **chosen, **before)
    ranks(then[0], carried, tmp_path / "run", tmp_path / "carried", data, **chosen, **after)
    assert_same_state(tmp_path / "run", tmp_path / "carried")
    ranks(first[0], carried, tmp_path / "carried", tmp_path / "back", data, **chosen, **before)
    assert_same_state(tmp_path / "run", tmp_path / "back")


@pytest.mark.slow
def test_a_run_of_experts_is_verified_and_exported_like_any(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    chosen = EXPERTS | {"train.steps": 3}
    ranks(2, trained, tmp_path / "run", data, **chosen, **PARTS)
    ranks(1, carried, tmp_path / "run", tmp_path / "carried", data, **chosen)
    assert main(["checkpoints", f"{tmp_path}/run", "--verify"]) == 0
    exported = []
    for folder in ("run", "carried"):
        (path,) = (tmp_path / folder / "checkpoints").iterdir()
        assert main(["export", f"{path}", f"{tmp_path}/{folder}-out", "--dtype", "fp32"]) == 0
        exported.append((tmp_path / f"{folder}-out/model.safetensors").read_bytes())
    assert exported[0] == exported[1]
    assert main(["generate", f"{tmp_path}/run", "--prompt", "a", "--max-tokens", "3"]) == 0


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("size", "parts", "changes"),
    [
        (2, 2, {"offload.update": '"delayed"', "offload.precision": '"fp16"'}),
        (4, 2, {"offload.activation": '"recompute"'}),
        (4, 2, STAGE_3),
        (2, 2, {"offload.working": '"host"'}),
    ],
)
def test_a_job_of_experts_goes_on(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    parts: int,
    changes: dict[str, Any],
) -> None:
    """Stopped after 6 steps and resumed: the run that never stopped, bit for bit, with dropout."""
    chosen = EXPERTS | CONSTANT | {"ranks.expert": parts, "model.dropout": 0.1} | changes
    ranks(size, trained, tmp_path / "whole", data, **chosen)
    for steps in (6, 12):
        some = chosen | {"train.steps": steps}
        ranks(size, trained, tmp_path / "run", data, resume=steps > 6, **some)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [((2, 2), (1, 1)), ((2, 1), (2, 2))])
def test_a_job_goes_on_with_experts_elsewhere(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: tuple[int, int],
    then: tuple[int, int],
) -> None:
    """(ranks, ranks with other experts): near the run that stayed, but for the order of sums."""
    chosen = EXPERTS | CONSTANT
    ranks(first[0], trained, tmp_path / "whole", data, **chosen | {"ranks.expert": first[1]})
    for (size, parts), steps in ((first, 6), (then, 12)):
        some = chosen | {"ranks.expert": parts, "train.steps": steps}
        ranks(size, trained, tmp_path / "run", data, resume=steps > 6, **some)
    assert 0 < worst(tmp_path / "whole", tmp_path / "run") < 1e-3


@pytest.mark.draws(0.35)
@pytest.mark.parametrize(
    ("size", "parts", "changes"),
    [
        (2, 2, {}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (4, 2, GPT2 | BF16),
                (4, 4, {"offload.zero_stage": 1}),
                (4, 2, BF16 | {"offload.reduction": '"fp32"', "train.grad_accum_steps": 8}),
                (2, 2, BF16 | {"offload.state": '"split16"', "offload.update": '"delayed"'}),
                (4, 2, {"offload.update": '"speculative"', "offload.activation": '"offload"'}),
                (2, 2, BF16 | {"offload.state_on": '"device"'}),
                (4, 2, STAGE_3),
                (2, 2, STAGE_3 | {"offload.device_slots": 1, "model.num_layers": 4}),
                (4, 2, STAGE_3 | BF16 | {"offload.state_on": '"device"'}),
                (4, 2, STAGE_3 | BF16 | {"model.num_layers": 1, "model.d_ff": 512}),
                (2, 2, BF16 | {"offload.working": '"host"', "offload.update": '"speculative"'}),
                (4, 2, {"offload.working": '"host"', "offload.activation": '"recompute"'}),
            )
        ),
    ],
)
def test_each_rank_holds_and_sends_what_was_planned(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    parts: int,
    changes: dict[str, Any],
) -> None:
    """To the byte, by tier and owner; the layout of the dry run is that of the plan."""
    chosen = EXPERTS | {"ranks.expert": parts} | changes
    chosen |= {"train.steps": 2, "train.eval_every": 0}
    plan = make(job_of(data, **chosen), *find("cpu2"), size)
    torchs = {("device", owner) for owner in ("activations", "logits and loss", "gradients")}
    for found in ranks(size, trained, tmp_path / "run", data, **chosen):
        planned = {
            (tier, owner): value
            for tier, owners in found["planned"].items()
            for owner, value in owners.items()
            if (tier, owner) not in torchs | {("host", PROCESS)} and value
        }
        held = {where: value for where, value in found["held"].items() if value}
        assert planned == {where: value for where, value in held.items() if where not in torchs}
        assert found["comm"] == plan.prediction.comm_bytes
    assert "as planned" in dry_run.check(plan)
    assert plan.ranks == size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_experts_count_in_a_limit_of_the_device(data: Path, size: int) -> None:  # noqa: F811
    """What fits beside them stays, and no more; stage 3, every 2 of the ranks with all experts."""
    chosen = EXPERTS | PARTS | STAGE_3 | {"model.num_layers": 8, "model.d_ff": 512}
    free = make(job_of(data, **chosen), *find("cpu2"), size)
    least, resident = sum(free.engine_device.values()), []
    for more in range(0, 12 << 20, 512 << 10):
        limit = {"offload.device_memory_limit": f'"{least + more} B"'}
        spec = make(job_of(data, **chosen | limit), *find("cpu2"), size).placed.spec
        assert device_bytes(spec) <= least + more
        resident.append(8 - len([name for name in spec.streamed if name.startswith("blocks")]))
    assert resident == sorted(resident) and resident[0] == 0 and resident[-1] == 8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks.expert": 3}, "ranks.expert = 3 does not divide model.num_experts = 4"),
    ({"model.num_experts": 0}, "does not divide model.num_experts = 0"),
    ({"ranks.expert": 0}, "ranks.expert = 0 must be at least 1"),
    ({"ranks.pipeline": 2, "model.num_layers": 4}, "passes on no load-balancing loss"),
    ({"ranks.shard": 2}, "or ranks.shard = 0"),
    ({"offload.state": '"int8"', "offload.precision": '"bf16"'}, '"fp32" or "split16"'),
    ({"optim.name": '"lamb"'}, 'set optim.name = "adamw"'),
    ({"train.sample_tokens": 5}, "offloadtrain generate RUN afterwards"),
    ({"offload.activation": '"offload_saved"'}, "ranks.expert"),
]


def test_jobs_whose_experts_cannot_be_divided(data: Path) -> None:  # noqa: F811
    for changes, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            job_of(data, **EXPERTS | PARTS | changes)


def test_all_ranks_divide_the_batch(data: Path) -> None:  # noqa: F811
    job = job_of(data, **EXPERTS | PARTS)
    assert replicas(job, 4) == 4 and roles(job, 4) == ("experts 0 to 1", "experts 2 to 3") * 2
    every = replace(job, ranks=RanksConfig(expert=4))
    assert roles(every, 4) == tuple(f"expert {number}" for number in range(4))
    assert shared(job, 2).train == shared(replace(job, ranks=RanksConfig()), 2).train
    with pytest.raises(ConfigError, match=r"ranks.expert = 2 and 3 ranks: .* \(--nproc\)"):
        shared(job, 3)


def test_tokens_on_their_way_by_hand(data: Path) -> None:  # noqa: F811
    """Two all-to-alls forward and two backward in each of 2 layers, and two when forward runs
    again; half of a microbatch's tokens leave, once for each of the 2 experts that they chose."""
    job = job_of(data, **EXPERTS | PARTS)
    again = job_of(data, **EXPERTS | PARTS | {"offload.activation": '"recompute"'})
    for one, exchanges in ((job, 8), (again, 12)):
        plan = make(one, *find("cpu2"), 2)
        part = plan.placed.config.train
        rows = part.micro_batch * 32 * 2
        sent = exchanges * rows * 32 * 4 // 2 * part.grad_accum_steps  # d_model, fp32
        assert plan.prediction.experts_bytes == sent
        assert plan.prediction.experts_s == pytest.approx(sent / (plan.machine.gpu_link_gbps * 1e9))
        assert "each rank holds 2 of 4 experts of a layer" in text(plan)
        assert as_json(plan)["expert_parts"] == 2
    plain = make(replace(job, ranks=RanksConfig()), *find("cpu2"), 2)
    assert plain.prediction.experts_bytes == 0 and "expert parallel" not in text(plain)
    # Both hold all experts once: a rank in the one, both ranks in the other.
    assert make(job, *find("cpu2"), 2).checkpoint_bytes == pytest.approx(
        plain.checkpoint_bytes, rel=0.01
    )


def test_between_hosts_tokens_wait_for_the_link_of_the_host(data: Path) -> None:  # noqa: F811
    job = job_of(data, **EXPERTS | BF16 | ANY | {"ranks.expert": 4})
    name, machine = find("rtx4090")
    found = {}
    for gpus in (4, 2):
        hosts: Machine = replace(machine, gpus=gpus, gpu_link_gbps=100.0, node_link_gbps=5.0)
        plan = make(job, name, hosts, 4)
        among = AmongExperts(plan.placed, hosts)
        found[among.hosts] = among.exchange_s, among.row_bytes
    assert found[1][0] == pytest.approx(found[1][1] * 3 / 4 / 100e9)
    # 2 ranks of a host, each of which sends half of its rows to the other host.
    assert found[2][0] == pytest.approx(2 * found[2][1] / 2 / 5e9)


def test_a_job_that_does_not_fit_is_told_to_divide_its_experts(data: Path) -> None:  # noqa: F811
    """And of a job that does, nothing that the table [ranks] refuses."""
    large = {"model.d_model": 512, "model.d_ff": 2048, "model.num_experts": 16}
    name, machine = find("rtx4090")
    small = replace(machine, gpus=4, gpu_memory="1500 MiB", gpu_reserved="1 GiB")
    job = job_of(data, **EXPERTS | BF16 | ANY | large | {"train.grad_accum_steps": 8})
    assert not make(job, name, small, 4).fits
    found = nearest(job, name, small, 4)
    assert {"ranks.expert": 4} in [one.keys for one in found]
    divided = applied(job, {"ranks.expert": 4})
    tiny = replace(small, gpu_memory="1200 MiB")
    tried = [*nearest(divided, name, tiny, 4), *single_changes(divided, name, machine, 4)]
    assert tried and all(not [*problems_of_ranks(applied(divided, one.keys))] for one in tried)
    plain = job_of(data, **ANY)
    assert choices_of(plain, 4)["ranks.expert"] == (1,)


@pytest.mark.slow
def test_state_that_fills_a_device_leaves_room_for_more_tokens() -> None:
    job = jobs.load(Path(__file__).parents[2] / "examples/mixtral_8x7b.toml")
    plan = make(job, *find("h100"), 8)
    used, room = sum(plan.device.values()), plan.device_room * FULL
    assert used + plan.activations.total <= room  # those of twice as many
    assert used + plan.activations.total > 0.9 * room  # and state fills the rest
    assert plan.host_peaks["step"] < plan.host_room


@pytest.mark.slow
def test_a_search_divides_the_experts_of_each_stage(
    data: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the job does: stages of fewer ranks than hold all experts are none."""
    path = data / "job.toml"
    deep = {"model.num_layers": 8, "model.router_aux_loss_coef": 0.0, "train.grad_accum_steps": 8}
    untied = {"model.tie_embeddings": "false", "offload.activation": '"keep"'}
    job = job_of(data, **EXPERTS | PARTS | deep | untied)
    path.write_text(jobs.dump(job))
    command = ["plan", str(path), "--gpus", "4", "--machine", "cpu2", "--search"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["stages"], row["replicas"]) for row in rows} == {(1, 4), (2, 2)}
    for row in rows:
        keys = dict(one.split("=") for one in row["keys"].split())
        plan = make(job_of(data, **EXPERTS | PARTS | deep | untied | keys), *find("cpu2"), 4)
        assert sum(plan.device.values()) == row["device_bytes"]
        assert {bucket.ranks for bucket in plan.placed.spec.buckets} == {
            row["replicas"],
            row["replicas"] // 2,
        }


@pytest.mark.slow
def test_a_rank_with_experts_is_killed_and_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path, **EXPERTS, **PARTS)
    assert_comes_back(path, tmp_path, ranks=2, killed=1, role="experts 2 to 3")


def in_turn(logits_ND: torch.Tensor, experts: int) -> torch.Tensor:
    """Let each token choose two experts, all of them alike often."""
    first = torch.arange(len(logits_ND))
    chosen = torch.stack([first, first + 1], 1) % experts
    return logits_ND + 9.0 * torch.zeros_like(logits_ND).scatter_(1, chosen, 1.0)


def waiting(*args: Any, **options: Any) -> None:
    all_to_all_single(*args, **options)
    time.sleep(0.003)


def planned_share(data: Path, **changes: Any) -> float:  # noqa: F811
    """The planned bytes of torch's own in a step, as a multiple of what it allocates."""
    ranks = Ranks.of(None, torch.device("cpu"))
    place = RankInfo(ranks.rank, ranks.size, ranks.rank, ranks.size)
    with on_lanes(SequentialLanes()):
        context = assemble(job_of(data, **changes), ranks=ranks, rank_info=place)
    experts = context.plan.job.model.num_experts
    for block in context.model.module.blocks:
        block.mlp.router.register_forward_hook(lambda _, given, logits: in_turn(logits, experts))

    def step() -> None:
        for _ in range(context.local.train.grad_accum_steps):
            context.optimizer.backward(loss_of(context.model, context.batches.next(), None))
        context.optimizer.step()

    # Gloo's threads let go of a tensor later than we do: wait for them, and take the least.
    with patch.object(token_exchange, "all_to_all_single", waiting):
        found = min(activations_in(step) for _ in range(6))
    context.optimizer.close()
    ranks.close()
    return context.plan.activations.total / found


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(("size", "parts"), [(2, 2), (4, 4)])
def test_activations_are_near_the_plan(
    ranks: Run,
    data: Path,  # noqa: F811
    size: int,
    parts: int,
    policy: str,
) -> None:
    """Where all experts get as many tokens, which the plan assumes."""
    chosen = EXPERTS | GPT2 | {"ranks.expert": parts, "offload.activation": f'"{policy}"'}
    chosen |= {"model.d_model": 64, "model.num_layers": 6, "model.d_ff": 256}
    chosen |= {
        "model.max_seq_len": 64,
        "data.seq_len": 64,
        "train.micro_batch": 4,
        "train.grad_accum_steps": size,
    }
    found = ranks(size, planned_share, data, **chosen)
    assert found == pytest.approx([1.0] * size, abs=0.05)
