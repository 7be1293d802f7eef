"""Whole jobs whose matrices are divided among ranks: near one process, checkpoints of any mesh."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import explain, replicas, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.hardware.machine import find
from offloadtrain.model.own_draws import own_draws
from offloadtrain.optim import AdamW
from offloadtrain.plan.plan import PROCESS, make
from offloadtrain.plan.report import text
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import PartError, Range, is_distributed, share_of
from offloadtrain.train import dry_run
from offloadtrain.train.build import assemble
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.layout import Entry
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save
from offloadtrain.train.checkpoint.saved_weights import saved_state
from offloadtrain.train.losses import loss_of
from tests.distributed.conftest import Run
from tests.distributed.rank_faults import HANG_S, Job
from tests.distributed.test_faults import ended, started
from tests.distributed.test_jobs import CONSTANT, close, data, job_of, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import figures
from tests.train.small_job import write_text

WIDE = {
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dropout": 0.0,
    "offload.precision": '"fp32"',
    "log.to": '["jsonl"]',
}
PARTS = {"ranks.tensor": 2}
GPT2 = {
    "model.bias": "true",
    "model.norm": '"layernorm"',
    "model.mlp": '"gelu"',
    "model.positions": '"learned"',
    "model.tie_embeddings": "true",
}


def whole_state(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments of the newest checkpoint of a run, put together."""
    found = checkpoint.newest_good(folder / "checkpoints", lambda path, why: None)
    assert found is not None
    check_tiled(found.manifest.entries)
    return {
        name: {kind: value.clone() for kind, value in tensors.items()}
        for name, tensors in saved_state(found, AdamW())
    }


def check_tiled(entries: Iterable[Entry]) -> None:
    """Each element of each tensor is there once."""
    pieces: dict[tuple[str, str], list[Entry]] = {}
    for one in entries:
        pieces.setdefault((one.name, one.kind), []).append(one)
    for which, parts in pieces.items():
        parts.sort(key=lambda one: one.lo)
        cuts = [0, *(one.hi for one in parts)]
        assert [one.lo for one in parts] == cuts[:-1], which
        assert cuts[-1] == math.prod(parts[0].shape), which


def assert_same_state(one: Path, other: Path) -> None:
    mine, theirs = whole_state(one), whole_state(other)
    assert mine.keys() == theirs.keys() and mine
    for name, tensors in mine.items():
        for kind, value in tensors.items():
            assert torch.equal(value, theirs[name][kind]), (name, kind)


def worst(one: Path, other: Path) -> float:
    """The largest difference of a master."""
    mine, theirs = whole_state(one), whole_state(other)
    return max(float((mine[name]["master"] - theirs[name]["master"]).abs().max()) for name in mine)


@pytest.mark.parametrize("changes", [{}, pytest.param(GPT2, marks=pytest.mark.slow)])
def test_a_job_in_parts_is_near_one_process(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its loss, its validation, and its weights, but for the order of sums."""
    (one,) = ranks(1, trained, tmp_path / "one", data, **WIDE, **changes)
    two = ranks(2, trained, tmp_path / "two", data, **WIDE, **PARTS, **changes)
    assert two[0]["losses"] == two[1]["losses"] and two[0]["val"] == two[1]["val"]
    assert close(one["losses"], two[0]["losses"], 1e-4)
    assert two[0]["val"] == pytest.approx(one["val"], rel=1e-4)
    apart = worst(tmp_path / "one", tmp_path / "two")
    with capsys.disabled():
        print(f"\nworst difference of a master to one process after 12 steps: {apart:.2g}")
    assert 0 < apart < 1e-3  # a tenth of what one step of lr moves


def carried(folder: Path, into: Path, data: Path, **changes: Any) -> None:  # noqa: F811
    """Load the newest checkpoint of a run on this mesh, and save it as it is."""
    ranks = Ranks.of(None, torch.device("cpu"))
    context = assemble(job_of(data, **changes), ranks=ranks)
    found = checkpoint.newest_good(folder / "checkpoints", lambda path, why: None)
    assert found is not None
    delayed = restore(found, context.model.module, context.optimizer, ranks)
    context.optimizer.finish_load(**found.state["optimizer"], delayed=delayed)
    module, optimizer = context.model.module, context.optimizer
    save(into / "checkpoints", found.step, module, optimizer, found.state, ranks=ranks)
    optimizer.close()
    ranks.close()


BF16 = {"offload.precision": '"bf16"'}


@pytest.mark.slow
@pytest.mark.draws(0.4)
@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        ((2, 2), (2, 2), {}),
        ((2, 2), (1, 1), {}),
        ((1, 1), (2, 2), {}),
        ((2, 2), (1, 1), BF16 | {"offload.state": '"split16"'}),
        ((2, 2), (2, 1), GPT2 | BF16),
        ((4, 2), (4, 1), {"offload.zero_stage": 2}),
        ((4, 1), (4, 2), GPT2),
        ((4, 4), (4, 2), {"model.num_kv_heads": 4, "offload.working": '"host"'}),
        ((2, 2), (1, 1), {"offload.update": '"delayed"'}),
    ],
)
def test_a_checkpoint_is_the_same_on_every_mesh(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: tuple[int, int],
    then: tuple[int, int],
    changes: dict[str, Any],
) -> None:
    """(ranks, parts) → (ranks, parts): masters and moments, to the bit, and back again."""
    chosen = WIDE | changes | {"train.steps": 3, "train.eval_every": 0}
    before, after = ({"ranks.tensor": parts} for _, parts in (first, then))
    ranks(first[0], trained, tmp_path / "run", data, **chosen, **before)
    ranks(then[0], carried, tmp_path / "run", tmp_path / "carried", data, **chosen, **after)
    assert_same_state(tmp_path / "run", tmp_path / "carried")
    ranks(first[0], carried, tmp_path / "carried", tmp_path / "back", data, **chosen, **before)
    assert_same_state(tmp_path / "run", tmp_path / "back")


@pytest.mark.slow
def test_a_run_in_parts_is_verified_and_exported_like_any(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
) -> None:
    chosen = WIDE | {"train.steps": 3}
    ranks(2, trained, tmp_path / "run", data, **chosen, **PARTS)
    ranks(1, carried, tmp_path / "run", tmp_path / "carried", data, **chosen)
    assert main(["checkpoints", f"{tmp_path}/run", "--verify"]) == 0
    exported = []
    for folder in ("run", "carried"):
        (path,) = (tmp_path / folder / "checkpoints").iterdir()
        assert main(["export", f"{path}", f"{tmp_path}/{folder}-out", "--dtype", "fp32"]) == 0
        exported.append((tmp_path / f"{folder}-out/model.safetensors").read_bytes())
    assert exported[0] == exported[1]


def held_by_all(data: Path, **changes: Any) -> dict[str, Any]:  # noqa: F811
    """Three steps; the masters of what every part holds whole, and the losses of this rank."""
    ranks = Ranks.of(None, torch.device("cpu"))
    place = RankInfo(ranks.rank, ranks.size, ranks.rank, ranks.size)
    context = assemble(job_of(data, **changes), ranks=ranks, rank_info=place)
    optimizer, losses = context.optimizer, []
    for _ in range(3):
        loss = loss_of(context.model, context.batches.next(), None)
        optimizer.backward(loss)
        losses.append(loss.item())
        optimizer.step()
    params = dict(context.model.module.named_parameters())
    masters = dict(optimizer.master_weights())
    kept = {name: x.tolist() for name, x in masters.items() if not is_distributed(params[name])}
    parts = {block.attention.part for block in context.model.module.blocks}
    assert parts == {ranks.rank % 2}, "attention draws its own dropout"
    optimizer.close()
    ranks.close()
    return {"losses": losses, "kept": kept}


@pytest.mark.slow
@pytest.mark.parametrize("activation", ['"keep"', '"recompute"'])
def test_parts_do_not_drift_apart(
    ranks: Run,
    data: Path,  # noqa: F811
    activation: str,
) -> None:
    """With dropout; replicas of the same part see other batches."""
    drops = {"model.dropout": 0.2, "offload.activation": activation, "model.bias": "true"}
    found = ranks(4, held_by_all, data, **WIDE | PARTS | GPT2 | drops)
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0]["losses"] != found[2]["losses"] and len(found[0]["kept"]) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parts", "changes"),
    [
        (2, 2, {"offload.update": '"delayed"', "offload.precision": '"fp16"'}),
        (4, 2, {"offload.zero_stage": 3}),
    ],
)
def test_a_job_in_parts_goes_on(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    parts: int,
    changes: dict[str, Any],
) -> None:
    """Stopped after 6 steps and resumed on the same mesh: the run that never stopped, bit for
    bit, with dropout too."""
    chosen = WIDE | CONSTANT | {"ranks.tensor": parts, "model.dropout": 0.1} | changes
    ranks(size, trained, tmp_path / "whole", data, **chosen)
    for steps in (6, 12):
        some = chosen | {"train.steps": steps}
        ranks(size, trained, tmp_path / "run", data, resume=steps > 6, **some)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (2, GPT2 | BF16),
        (2, BF16 | {"offload.state": '"split16"', "offload.update": '"delayed"'}),
        (4, {"offload.zero_stage": 3}),
        (2, {"offload.working": '"host"', "offload.update": '"speculative"'}),
        *(
            (2, {"offload.activation": policy, "offload.partition_activations": "true"})
            for policy in ('"recompute"', '"offload"')
        ),
    ],
)
def test_each_part_holds_what_was_planned(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    size: int,
    changes: dict[str, Any],
) -> None:
    """To the byte, by tier and owner; the layout of the dry run is that of the plan."""
    chosen = WIDE | PARTS | changes | {"train.steps": 2, "train.eval_every": 0}
    torchs = {("device", owner) for owner in ("activations", "logits and loss", "gradients")}
    for found in ranks(size, trained, tmp_path / "run", data, **chosen):
        planned = {
            (tier, owner): value
            for tier, owners in found["planned"].items()
            for owner, value in owners.items()
            if (tier, owner) not in torchs | {("host", PROCESS)} and value
        }
        held = {where: value for where, value in found["held"].items() if value}
        assert planned == held
    plan = make(job_of(data, **chosen), *find("cpu2"), size)
    assert "as planned" in dry_run.check(plan)
    assert plan.ranks == size


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_job_goes_on_in_other_parts(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: int,
    then: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the state to the bit, and near the run that never stopped, but for the order of sums."""
    chosen = WIDE | CONSTANT
    ranks(first, trained, tmp_path / "whole", data, **chosen | {"ranks.tensor": first})
    for parts, steps in ((first, 6), (then, 12)):
        some = chosen | {"ranks.tensor": parts, "train.steps": steps}
        ranks(parts, trained, tmp_path / "run", data, resume=steps > 6, **some)
    apart = worst(tmp_path / "whole", tmp_path / "run")
    with capsys.disabled():
        print(f"\nworst difference of a master 6 steps after {first} -> {then} parts: {apart:.2g}")
    assert 0 < apart < 1e-3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks.tensor": 3}, "ranks.tensor = 3 does not divide model.num_heads = 4"),
    ({"ranks.tensor": 4}, "does not divide model.num_kv_heads = 2"),
    ({"model.d_ff": 65}, "does not divide model.d_ff = 65"),
    ({"ranks.tensor": 0}, "ranks.tensor = 0 must be at least 1"),
    ({"model.num_experts": 2}, "divides no experts"),
    ({"offload.state": '"int8"', "offload.precision": '"bf16"'}, '"fp32" or "split16"'),
    ({"optim.name": '"lamb"'}, 'set optim.name = "adamw"'),
    ({"offload.compile_blocks": "true"}, "ranks.tensor = 2 and offload.compile_blocks = true"),
    ({"train.sample_tokens": 5}, "offloadtrain generate RUN afterwards"),
]


def test_jobs_that_cannot_be_divided_into_parts(data: Path) -> None:  # noqa: F811
    for changes, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            job_of(data, **WIDE | PARTS | changes)


def test_ranks_are_divided_into_parts(data: Path) -> None:  # noqa: F811
    job = job_of(data, **WIDE | PARTS)
    assert replicas(job, 4) == 2 and roles(job, 4) == ("part 1 of 2", "part 2 of 2") * 2
    assert shared(job, 4).train.grad_accum_steps == job.train.grad_accum_steps // 2
    before, alone = job.train, shared(job, 2).train
    assert (alone.micro_batch, alone.grad_accum_steps) == (4, before.grad_accum_steps)
    assert "1 group of 2 ranks (tensor parallel)" in explain(job, shared(job, 2), 2)
    with pytest.raises(ConfigError, match=r"ranks.tensor = 2 and 3 ranks: .* \(--nproc\)"):
        shared(job, 3)


def test_parts_draw_their_own_numbers_where_they_should() -> None:
    """And all of them the same ones behind that; again the same in a recompute."""
    found, behind = [], []
    for part in (0, 1, 0, None):
        torch.manual_seed(3)
        with own_draws(part, torch.device("cpu")):
            found.append(torch.rand(4))
        behind.append(torch.rand(4))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    assert all(torch.equal(one, behind[0]) for one in behind[:3])
    torch.manual_seed(3)
    assert torch.equal(found[3], torch.rand(4))


def test_traffic_among_parts_by_hand(data: Path) -> None:  # noqa: F811
    """Two sums forward and two backward in each of 2 layers, and one in each recompute; each sends
    its tensor once round a ring of two, in fp32."""
    job = job_of(data, **WIDE | PARTS)
    again = job_of(data, **WIDE | PARTS | {"offload.activation": '"recompute"'})
    tensor = 4 * 4 * 32 * 32  # fp32, sequences, tokens, d_model
    for one, sums in ((job, 8), (again, 10)):
        plan = make(one, *find("cpu2"), 2)
        assert plan.prediction.parts_bytes == sums * tensor * 2  # microbatches
        assert 0 < plan.prediction.parts_s < plan.prediction.busy_s["compute"]
        assert "tensor parallel: each rank holds 1/2" in text(plan)
    assert make(replace(job, ranks=RanksConfig()), *find("cpu2"), 2).prediction.parts_bytes == 0


def test_a_part_that_is_no_range_is_refused() -> None:
    """A matrix by columns, kept row by row: of a loop of one's own, not of a job."""

    class Mesh:
        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return 1

    class Divided:
        def __init__(self, stride: tuple[int, ...], dim: int) -> None:
            sizes = (6, 4) if len(stride) == 2 else (2, 6, 4)
            self.shape, self.device_mesh, self.placements = sizes, Mesh(), [Shard(dim)]
            self.stride = lambda: stride

    assert share_of("w", Divided((4, 1), 0)).ranges == (Range(0, 12, 12),)
    assert share_of("w", Divided((1, 6), 1)).ranges == (Range(0, 12, 12),)
    rows = share_of("w", Divided((4, 1), 0), (4, 2)).ranges
    assert rows == (Range(0, 8, 8), Range(8, 20, 4))
    experts = share_of("w", Divided((24, 4, 1), 1), (4, 2)).ranges
    assert experts == (Range(0, 8, 8), Range(8, 20, 4), Range(12, 32, 8), Range(20, 44, 4))
    assert share_of("w", Divided((24, 1, 6), -1)).ranges == (Range(0, 12, 12), Range(12, 36, 12))
    for given in (Divided((4, 1), 1), Divided((1, 6), 0), Divided((24, 4, 1), 2)):
        with pytest.raises(PartError, match="varies slowest in memory"):
            share_of("w", given)


def written(folder: Path, **changes: Any) -> Path:
    """Write a job of nine steps with dropout, and its text."""
    write_text(folder)
    steps = {"train.steps": 9, "train.checkpoint_every": 4, "model.dropout": 0.1}
    path = folder / "job.toml"
    path.write_text(jobs.dump(job_of(folder, **changes | steps)))
    return path


def assert_comes_back(path: Path, folder: Path, *, ranks: int, killed: int, role: str) -> None:
    """All ranks end when one is killed; started again from their checkpoint, they have the bits of
    a run that was left alone."""
    least = ("--nproc", f"{ranks}", "--set", f"train.hang_timeout_s={HANG_S}")
    fault = ("backward:kill", "6", f"{killed}")
    struck = Job.start(path, folder / "run", *least, "--max-restarts", "1", fault=fault)
    assert struck.ended() == 0, struck.text
    said = rf"rank {killed} \({role}, pid \d+\) was killed by SIGKILL"
    assert re.search(said, struck.text)
    whole = Job.start(path, folder / "whole", *least)
    assert whole.ended() == 0, whole.text
    last = {figure[0]: figure for figure in figures(folder / "run")}
    assert list(last.values()) == figures(folder / "whole")
    assert_same_state(folder / "run", folder / "whole")


@pytest.fixture
def divided_job(tmp_path: Path) -> Path:
    return written(tmp_path, **WIDE | PARTS)


@pytest.mark.slow
def test_a_part_that_is_killed_is_named_and_the_job_comes_back(
    divided_job: Path, tmp_path: Path
) -> None:
    assert_comes_back(divided_job, tmp_path, ranks=2, killed=1, role="part 2 of 2")


@pytest.mark.slow
def test_the_other_part_ends_and_says_why(divided_job: Path, pools: object) -> None:
    with started(divided_job, "backward", 1) as processes:
        codes = [ended(process) for process in processes]
    assert codes == [1, -signal.SIGKILL]
    said = (divided_job.parent / "said0").read_text()
    assert "another rank has failed: rank 1 (part 2 of 2, pid" in said
