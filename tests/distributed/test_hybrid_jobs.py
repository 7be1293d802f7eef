"""Whole jobs in hybrid sharding: the bits of ranks that add in the same order, checkpoints of any
mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import explain, group_of, roles, shards, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.costs.among_ranks import AmongCopies, most_hosts
from offloadtrain.plan.plan import PROCESS, make
from offloadtrain.plan.report import as_json, text
from offloadtrain.plan.search.compare import compare
from offloadtrain.plan.search.suggest import nearest
from offloadtrain.plan.search.why import why
from offloadtrain.train import dry_run
from tests.distributed.conftest import Run
from tests.distributed.test_jobs import CONSTANT, close, data, job_of, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import DEEP, assert_same_run, figures
from tests.distributed.test_tensor_jobs import (
    WIDE,
    assert_comes_back,
    assert_same_state,
    carried,
    worst,
    written,
)

GROUPS = {"ranks.shard": 2}
SMALL = WIDE | {"train.micro_batch": 1, "train.grad_accum_steps": 4}
"""On two ranks two microbatches each, on four ranks one: the same ones, and the same sums."""
BF16 = {"offload.precision": '"bf16"'}
ANY = {"device.kind": '"auto"'}


def exact(folder: Path, rank: int = 0) -> list[tuple[Any, ...]]:
    """What is exact about each step; the loss is a mean over other numbers of ranks."""
    return [(step, *rest) for step, _, *rest in figures(folder, rank)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"offload.zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param(
            {"offload.update": '"delayed"', "offload.working": '"host"'}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_job_in_groups_has_the_bits_of_ranks_that_add_in_the_same_order(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """2 x 2 ranks add the gradients of a group, then those of both. Two ranks with two microbatches
    do so, too. Four in one group add in another order."""
    chosen = SMALL | {"train.eval_every": 4, "train.eval_batches": 8} | changes
    two = ranks(2, trained, tmp_path / "two", data, **chosen)
    found = ranks(4, trained, tmp_path / "groups", data, **chosen, **GROUPS)
    for rank, one in enumerate(found):
        assert exact(tmp_path / "groups", rank) == exact(tmp_path / "two"), rank
        assert one["losses"] == found[0]["losses"] and one["val"] == found[0]["val"]
    assert close(found[0]["losses"], two[0]["losses"], 1e-6)
    assert found[0]["val"] == pytest.approx(two[0]["val"], rel=1e-6)
    assert_same_state(tmp_path / "groups", tmp_path / "two")
    ranks(4, trained, tmp_path / "four", data, **chosen)
    apart = worst(tmp_path / "four", tmp_path / "groups")
    with capsys.disabled():
        print(f"\nworst difference of a master to four ranks in one group: {apart:.2g}")
    assert apart < 1e-3  # a tenth of what one step of lr moves


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        ((4, 2), (4, 2), {}),
        ((4, 2), (1, 0), {"offload.update": '"delayed"'}),
        ((4, 2), (4, 0), BF16 | {"offload.state": '"split16"'}),
        ((2, 0), (4, 2), {"offload.zero_stage": 3}),
        pytest.param((6, 2), (6, 3), BF16 | {"train.grad_accum_steps": 6}, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_is_the_same_in_every_group(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: tuple[int, int],
    then: tuple[int, int],
    changes: dict[str, Any],
) -> None:
    """(ranks, ranks of a group) → (ranks, ranks of a group): written once, masters and moments to
    the bit, and back again."""
    chosen = SMALL | changes | {"train.steps": 3, "train.eval_every": 0}
    before, after = ({"ranks.shard": size} for _, size in (first, then))
    ranks(first[0], trained, tmp_path / "run", data, **chosen, **before)
    ranks(then[0], carried, tmp_path / "run", tmp_path / "carried", data, **chosen, **after)
    assert_same_state(tmp_path / "run", tmp_path / "carried")
    ranks(first[0], carried, tmp_path / "carried", tmp_path / "back", data, **chosen, **before)
    assert_same_state(tmp_path / "run", tmp_path / "back")
    assert main(["checkpoints", f"{tmp_path}/run", "--verify"]) == 0
    (path,) = (tmp_path / "run/checkpoints").iterdir()
    sizes = [file.stat().st_size for file in sorted(path.glob("rank-*.bin"))]
    assert len(sizes) == first[0] and all(sizes)  # every group writes a share


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize("changes", [{}, {"offload.zero_stage": 3, "offload.precision": '"fp16"'}])
def test_a_job_in_groups_goes_on(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    """Stopped after 6 steps and resumed: the run that never stopped, bit for bit, with dropout."""
    chosen = SMALL | CONSTANT | GROUPS | {"model.dropout": 0.1} | changes
    ranks(4, trained, tmp_path / "whole", data, **chosen)
    for steps in (6, 12):
        some = chosen | {"train.steps": steps}
        ranks(4, trained, tmp_path / "run", data, resume=steps > 6, **some)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_job_goes_on_in_groups_and_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    """2 ranks, then 2 x 2, then 2: bit for bit as if it had not changed, as all add alike."""
    chosen = SMALL | CONSTANT
    ranks(2, trained, tmp_path / "whole", data, **chosen)
    for size, group, steps in ((2, 0, 4), (4, 2, 8), (2, 0, 12)):
        some = chosen | {"ranks.shard": group, "train.steps": steps}
        ranks(size, trained, tmp_path / "run", data, resume=steps > 4, **some)
    assert exact(tmp_path / "run") == exact(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    "changes",
    [
        {"offload.zero_stage": 3, "offload.precision": '"bf16"'},
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                {},
                {"train.grad_accum_steps": 8},
                BF16 | {"offload.state": '"split16"', "offload.update": '"delayed"'},
                {"offload.working": '"host"', "offload.update": '"speculative"'},
                BF16 | {"offload.reduction": '"fp32"', "offload.state_on": '"device"'},
            )
        ),
    ],
)
def test_each_rank_of_a_group_holds_and_sends_what_was_planned(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    """To the byte, by tier and owner; the layout of the dry run is that of the plan."""
    chosen = SMALL | GROUPS | changes | {"train.steps": 3, "train.eval_every": 0}
    plan = make(job_of(data, **chosen), *find("cpu2"), 4)
    torchs = {("device", owner) for owner in ("activations", "logits and loss", "gradients")}
    for found in ranks(4, trained, tmp_path / "run", data, **chosen):
        planned = {
            (tier, owner): value
            for tier, owners in found["planned"].items()
            for owner, value in owners.items()
            if (tier, owner) not in torchs | {("host", PROCESS)} and value
        }
        held = {where: size for where, size in found["held"].items() if size}
        assert planned == {where: size for where, size in held.items() if where not in torchs}
        assert found["comm"] == plan.prediction.comm_bytes
    assert "as planned" in dry_run.check(plan)
    assert plan.ranks == 4 and plan.placed.spec.copies == 2
    assert (plan.hosts, plan.local_ranks) == (1, 4)


def test_traffic_among_copies_by_hand(data: Path) -> None:  # noqa: F811
    """A shard is summed over R copies: 2 (R - 1) / R of it leave a rank in each microbatch; within
    the group all is as in a group by itself."""
    job = job_of(data, **SMALL | GROUPS | {"train.grad_accum_steps": 8})
    grouped = make(job, *find("cpu2"), 4)
    alone = make(replace(job, ranks=RanksConfig()), *find("cpu2"), 2)
    shard = sum(bucket.shard_numel for bucket in grouped.placed.spec.buckets)
    found = grouped.prediction
    micro_steps = grouped.placed.config.train.grad_accum_steps
    assert micro_steps == 2 and found.copies_bytes == micro_steps * 4 * shard * 2 // 2
    halves = alone.placed.config.train.grad_accum_steps // micro_steps
    of_gathers = sum(bucket.shard_numel * 4 for bucket in alone.placed.spec.buckets)
    within = (alone.prediction.comm_bytes - of_gathers) // halves + of_gathers
    assert found.comm_bytes == within + found.copies_bytes
    assert found.copies_s == pytest.approx(
        found.copies_bytes / (grouped.machine.gpu_link_gbps * 1e9)
    )
    assert "2 copies of the state, each in 2 shards" in text(grouped)
    assert as_json(grouped)["state_copies"] == 2 and as_json(alone)["state_copies"] == 1
    assert alone.prediction.copies_bytes == 0


def big(machine: Machine) -> Machine:
    return replace(machine, gpus=2, gpu_link_gbps=100.0, node_link_gbps=5.0)


def test_groups_of_a_host_gather_inside_of_it(data: Path) -> None:  # noqa: F811
    """On 2 hosts of 2 GPUs, what leaves a host is each shard of a gradient, and no weight."""
    deep = {"offload.zero_stage": 3, "model.num_layers": 16}
    job = job_of(data, **SMALL | GROUPS | BF16 | ANY | deep)
    name, machine = find("rtx4090")
    hybrid, plain = (
        make(one, name, big(machine), 4) for one in (job, replace(job, ranks=RanksConfig()))
    )
    assert hybrid.hosts == plain.hosts == 2
    among = AmongCopies(hybrid.placed.spec, hybrid.machine, 1)
    # Both GPUs of a host send the halves of their shards to the other host, and again the sums.
    assert among.hosts == 2 and among.sum_s(1e9) == pytest.approx(2 * 2 * 0.5 / 5.0)
    assert "between 2 hosts" in text(hybrid)
    # Twice a gradient between hosts; without groups once, and a layer's weights twice.
    assert hybrid.prediction.busy_s["comm"] < 0.8 * plain.prediction.busy_s["comm"]
    # The price: each host holds all the state.
    assert sum(hybrid.host.values()) > sum(plain.host.values())
    states = [plan.host["master weights"] for plan in (hybrid, plain)]
    assert states[0] == pytest.approx(2 * states[1], rel=0.1)
    ours = {row.system: row for row in compare(hybrid)}
    theirs = {row.system: row for row in compare(plain)}
    assert {name for name in ours if ours[name] != theirs[name]} == {"offloadtrain"}


@pytest.mark.parametrize(
    ("width", "groups", "gpus", "hosts"),
    [(4, 1, 4, 1), (4, 2, 4, 1), (8, 2, 4, 2), (6, 1, 8, 1), (6, 2, 8, 2), (2, 8, 8, 1)],
)
def test_hosts_of_a_group(width: int, groups: int, gpus: int, hosts: int) -> None:
    assert most_hosts(width, groups, gpus) == hosts


def test_state_that_does_not_fit_in_every_host_is_divided_among_all(data: Path) -> None:  # noqa: F811
    """What makes a plan fit may be to give the copies up."""
    job = job_of(data, **SMALL | GROUPS | BF16 | ANY)
    name, machine = find("rtx4090")
    whole = make(job, name, big(machine), 4)
    short = replace(big(machine), host_memory=f"{max(whole.host_peaks.values()) - 1} B")
    changes = nearest(job, name, short, 4)
    assert not make(job, name, short, 4).fits
    assert any(one.keys == {"ranks.shard": 0} and one.plan.fits for one in changes)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"ranks.shard": 1}, 4, r"ranks.shard = 1 must be 0 \(all ranks share the state\) or at least"),
    ({"ranks.shard": -2}, 4, "ranks.shard = -2 must be 0"),
    ({}, 1, r"ranks.shard = 2 and 1 rank: .* Start a multiple of 2 \(--nproc\)"),
    ({"ranks.shard": 4}, 2, "ranks.shard = 4 and 2 ranks: each group of 4 holds a whole copy"),
    (DEEP | {"ranks.pipeline": 2, "ranks.shard": 4}, 4, "2 of each part .* multiple of 8"),
    ({"ranks.tensor": 2}, 2, "ranks.shard = 2 and 2 ranks, 1 of each part of the model"),
]


def test_ranks_that_cannot_be_divided_into_groups(data: Path) -> None:  # noqa: F811
    for changes, size, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            shards(job_of(data, **SMALL | GROUPS | changes), size)


def test_ranks_are_divided_into_groups(data: Path) -> None:  # noqa: F811
    job = job_of(data, **SMALL | GROUPS)
    assert shards(job, 4) == 2 and shards(replace(job, ranks=RanksConfig()), 4) == 4
    assert roles(job, 4) == ("group 1 of 2",) * 2 + ("group 2 of 2",) * 2
    assert roles(job, 2) == () and group_of(job, 2, 1) == ""
    told = explain(job, shared(job, 4), 4)
    assert told.startswith("4 ranks, every 2 of which hold a copy of the state, share 4 seq")
    staged = job_of(data, **DEEP | GROUPS | {"ranks.pipeline": 2})
    assert roles(staged, 8)[5:7] == ("stage 2 of 2, group 1 of 2", "stage 2 of 2, group 2 of 2")
    in_parts = job_of(data, **SMALL | GROUPS | {"ranks.tensor": 2})
    assert roles(in_parts, 8)[3:5] == ("group 1 of 2, part 2 of 2", "group 2 of 2, part 1 of 2")


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2])
def test_groups_within_stages_and_among_parts(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    stages: int,
) -> None:
    """2 x 2 replicas of each stage, or of each part: their bits are those of 2 replicas that add in
    the same order."""
    staged = DEEP | {"ranks.pipeline": 2, "ranks.schedule": '"gpipe"'}
    chosen = WIDE | (staged if stages == 2 else {"ranks.tensor": 2})
    chosen |= SMALL | {"train.eval_every": 0}
    ranks(4, trained, tmp_path / "two", data, **chosen)
    for found in ranks(8, trained, tmp_path / "groups", data, **chosen, **GROUPS):
        held = {where: value for where, value in found["held"].items() if value}
        planned = found["planned"]["host"]["master weights"]
        assert held["host", "master weights"] == planned
    for rank in range(8):
        assert exact(tmp_path / "groups", rank) == exact(tmp_path / "two"), rank
    assert_same_state(tmp_path / "groups", tmp_path / "two")
    assert_same_run(tmp_path / "groups", tmp_path / "groups", 8)


@pytest.mark.slow
def test_a_search_of_pipelines_makes_no_groups(
    data: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = data / "job.toml"
    path.write_text(jobs.dump(job_of(data, **SMALL | GROUPS)))
    assert main(["plan", str(path), "--gpus", "4", "--machine", "cpu2", "--search"]) == 2
    assert "one copy of their state. Set ranks.shard = 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rank_of_a_group_that_is_killed_is_named_and_the_job_comes_back(tmp_path: Path) -> None:
    job = written(tmp_path, **SMALL | GROUPS)
    assert_comes_back(job, tmp_path, ranks=4, killed=2, role="group 2 of 2")


def test_why_asks_with_all_ranks(
    data: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not with those of a group: its changes would be of a smaller job."""
    asked: list[int] = []

    def changes(job: object, name: str, machine: Machine, ranks: int, trace: object) -> list[Any]:
        asked.append(ranks)
        return []

    monkeypatch.setattr("offloadtrain.plan.search.why.single_changes", changes)
    why(make(job_of(data, **SMALL | GROUPS), *find("cpu2"), 4))
    assert asked == [4]
