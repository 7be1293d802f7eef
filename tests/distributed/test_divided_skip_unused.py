"""`skip_unused` where ranks hold different layers, experts, or parts of them: an expert is used if
it got tokens on any rank, in any microbatch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.parallel.tensor.own_model import divide_matrices
from offloadtrain.parallel.tensor.transformers_plan import divide
from offloadtrain.parallel.unused_experts import merged_steps
from offloadtrain.runtime.tensor_parts import shares_of
from offloadtrain.train.checkpoint import checkpoint
from tests.distributed.conftest import Run
from tests.distributed.divisions import EXPERTS
from tests.distributed.rank_jobs import (
    assert_as_planned,
    assert_same_state,
    convert,
    figures,
    master_difference,
    train,
)
from tests.distributed.test_expert_parallel import SHAPE, made, whole_masters
from tests.distributed.test_pipeline import loss_of
from tests.distributed.test_pipeline_misuse import told
from tests.distributed.test_tensor_parallel_of_transformers import assembled

MANY = replace(SHAPE, num_layers=4, num_experts=8, experts_per_token=1, router_aux_loss_coef=0.0)
MICROBATCHES, STEPS = 2, 3
SKIPS = ("*.experts.*",)
GIVEN: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.05, "skip_unused": SKIPS}
AXES = ("pp", "dp", "ep", "tp")


def few(step: int, micro: int, rank: int, length: int = 6) -> Tensor:
    """(1, length) tokens, which many experts do not get."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randint(0, SHAPE.vocab_size, (1, length), generator=generator)


def flat(
    dp: int,
    ep: int = 1,
    tp: int = 1,
    *,
    steps: int = STEPS,
    experts: int = MANY.num_experts,
    length: int = 6,
    **options: Any,
) -> dict[str, Any]:
    """A run without stages."""
    names = AXES[1:] if tp > 1 else AXES[1:3]
    mesh = init_device_mesh("cpu", (dp, ep, tp)[: len(names)], mesh_dim_names=names)
    model = made(replace(MANY, num_experts=experts))
    if tp > 1:
        divide_matrices(model, mesh["tp"])
    ot.expert_parallel(model, mesh)
    given = GIVEN | {"grad_accum_steps": MICROBATCHES} | options
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", mesh=mesh, **given)
    losses, rank = [], mesh.get_rank() // tp
    for step in range(steps):
        for micro in range(given["grad_accum_steps"]):
            tokens = few(step, micro, rank, length)
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
    shares = {n: one for n, p in model.named_parameters() if (one := shares_of(model).get(p))}
    found = whole_masters(optimizer, mesh) if ep > 1 else dict(optimizer.master_weights())
    masters = {name: value.clone().numpy() for name, value in found.items()}
    counted = optimizer.expert_steps
    optimizer.close()
    return {"losses": losses, "masters": masters, "counted": counted, "shares": shares}


def staged(sizes: tuple[int, ...], schedule: str, **options: Any) -> dict[str, Any]:
    """The same run on this rank's stages."""
    mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)]), made(MANY)
    if len(sizes) > 2:
        ot.expert_parallel(model, mesh)
    pipeline = ot.pipeline(
        model,
        mesh,
        ot.AdamW(lr=1e-2),
        example=torch.zeros(1, 5, dtype=torch.int64),
        microbatches=MICROBATCHES,
        loss_fn=loss_of,
        schedule=schedule,
        stages_per_rank=2 if schedule == "interleaved" else 1,
        device="cpu",
        **GIVEN | options,
    )
    losses: list[float] = []
    for step in range(STEPS):
        some = [few(step, micro, pipeline.replicas.rank) for micro in range(MICROBATCHES)]
        tokens = torch.cat(some)
        losses += pipeline.run(tokens[:, :-1].contiguous(), target=tokens[:, 1:].contiguous())
        pipeline.step()
    masters = {}
    for one in pipeline.optimizers:
        found = whole_masters(one, mesh) if len(sizes) > 2 else dict(one.master_weights())
        masters |= {name: value.clone().numpy() for name, value in found.items()}
    counted = merged_steps(one.expert_steps for one in pipeline.optimizers)
    pipeline.close()
    return {"losses": [float(x) for x in losses], "masters": masters, "counted": counted}


def counts(of_ranks: list[dict[str, Any]]) -> dict[str, list[int]]:
    found = merged_steps(one["counted"] for one in of_ranks)
    numbers = {count for steps in found.values() for count in steps}
    assert len(numbers) > 2, "some experts are used in some steps"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "schedule", "options"),
    [
        ((2, 1), "1f1b", {}),
        pytest.param(*((2, 1), "interleaved", {"update": "delayed"}), marks=pytest.mark.long),
        ((2, 1), "gpipe", {"working": "host", "activation": "recompute"}),
        pytest.param(*((4, 1), "gpipe", {}), marks=pytest.mark.long),
        pytest.param(*((2, 2), "1f1b", {"zero_stage": 2}), marks=pytest.mark.long),
        ((2, 1, 2), "1f1b", {}),
    ],
)
def test_stages_change_no_bit(
    ranks: Run, sizes: tuple[int, ...], schedule: str, options: dict[str, Any]
) -> None:
    """Of a stage's experts all its microbatches count, on all its replicas."""
    dp, ep = sizes[1], sizes[2] if len(sizes) > 2 else 1
    both = {key: value for key, value in options.items() if key == "update"}
    plain = ranks(dp * ep, flat, dp, ep, **both)
    found = ranks(sizes[0] * dp * ep, staged, sizes, schedule, **options)
    assert counts(found) == counts(plain)
    together: dict[str, Any] = {}
    for rank, one in enumerate(found):
        assert one["losses"] == plain[rank % (dp * ep)]["losses"]
        together |= one["masters"]
    assert together.keys() == plain[0]["masters"].keys()
    for name, value in plain[0]["masters"].items():
        assert (together[name] == value).all(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "ep", "options"),
    [
        (1, 2, {}),
        (2, 2, {"zero_stage": 3}),
        (1, 4, {"working": "host"}),
        *(
            pytest.param(*sizes, options, marks=pytest.mark.long)
            for sizes in ((1, 2), (2, 2), (1, 4))
            for options in ({}, {"zero_stage": 3}, {"working": "host"})
        ),
    ],
)
def test_experts_of_other_ranks(ranks: Run, dp: int, ep: int, options: dict[str, Any]) -> None:
    """Those are skipped that ranks with all experts skip; sums have another order."""
    if dp == 1 and "zero_stage" in options:
        options = {"zero_stage": 2}
    whole = ranks(dp * ep, flat, dp * ep)
    parts = ranks(dp * ep, flat, dp, ep, **options)
    assert counts(parts) == counts(whole) == whole[0]["counted"]
    for name, value in whole[0]["masters"].items():
        assert abs(value - parts[0]["masters"][name]).max() < 1e-3, name  # a tenth of a step


@pytest.mark.slow
def test_a_rank_of_a_single_expert(ranks: Run) -> None:
    """Its gradient is there, all zeros, where no token came."""
    short = {"experts": 2, "length": 2, "grad_accum_steps": 1}
    whole, parts = ranks(2, flat, 2, **short), ranks(2, flat, 1, 2, **short)
    assert counts(parts) == counts(whole)


@pytest.mark.slow
def test_an_unused_expert_of_another_rank_stays(ranks: Run) -> None:
    """In the first step used ones have the bits of a run that skips none, others their first ones;
    two ranks of each part of experts."""
    skipping = ranks(4, flat, 2, 2, steps=1)
    plain = ranks(4, flat, 2, 2, steps=1, skip_unused=())
    found, first = counts_of_one(skipping), dict(made(MANY).named_parameters())
    for name, steps in found.items():
        for number, used in enumerate(steps):
            got = skipping[0]["masters"][name][number]
            expected = plain[0]["masters"][name] if used else first[name].detach().numpy()
            assert (got == expected[number]).all(), (name, number)
    for name in plain[0]["masters"].keys() - found.keys():
        assert (skipping[0]["masters"][name] == plain[0]["masters"][name]).all(), name


def counts_of_one(of_ranks: list[dict[str, Any]]) -> dict[str, list[int]]:
    found = merged_steps(one["counted"] for one in of_ranks)
    assert {count for steps in found.values() for count in steps} == {0, 1}
    return found


@pytest.mark.slow
def test_parts_of_attention(ranks: Run) -> None:
    """Beside experts that every part holds whole."""
    (one,) = ranks(1, flat, 1)
    two = ranks(2, flat, 1, 1, 2)
    assert counts(two) == one["counted"] and two[0]["counted"] == two[1]["counted"]
    masters = assembled(two)
    for name, value in one["masters"].items():
        if "attention.qkv" not in name:
            assert abs(masters[name].numpy() - value).max() < 1e-4, name


def mixtral(parts: int, **options: Any) -> dict[str, Any]:
    """Three steps of a model of transformers whose parts hold some hidden units of all experts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=1,
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # so that gates of the first part get no gradient in the first step
        for layer in model.model.layers:
            layer.mlp.experts.down_proj[:, :, :32] = 0.0
    mesh = init_device_mesh("cpu", (1, parts), mesh_dim_names=("dp", "tp"))
    if parts > 1:
        divide(model, mesh["tp"])
    shares = {n: one for n, p in model.named_parameters() if (one := shares_of(model).get(p))}
    given = GIVEN | {"skip_unused": ("*.experts.*_proj",)} | options
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", mesh=mesh, **given)
    for step in range(STEPS):
        tokens = few(step, 0, 0)
        optimizer.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        optimizer.step()
    masters = {name: value.clone().numpy() for name, value in optimizer.master_weights()}
    counted = optimizer.expert_steps
    optimizer.close()
    return {"masters": masters, "counted": counted, "shares": shares}


@pytest.mark.slow
def test_parts_of_experts(ranks: Run) -> None:
    """All parts skip the same, and no placement changes a bit."""
    (one,) = ranks(1, mixtral, 1)
    two = ranks(2, mixtral, 2)
    assert counts(two) == one["counted"] and two[0]["counted"] == two[1]["counted"]
    masters = assembled(two)
    for name, value in one["masters"].items():
        assert abs(masters[name].numpy() - value).max() < 1e-3, name
    moved = ranks(2, mixtral, 2, working="host", activation="recompute")
    for plain, other in zip(two, moved, strict=True):
        assert plain["counted"] == other["counted"]
        assert all((other["masters"][n] == m).all() for n, m in plain["masters"].items())


JOB = EXPERTS | {
    "model.num_experts": 8,
    "model.experts_per_token": 1,
    "model.router_aux_loss_coef": 0.0,
    "model.num_layers": 4,
    "model.tie_embeddings": "false",
    "offload.skip_unused": '["*.experts.*"]',
    "data.seq_len": 8,
    "train.micro_batch": 1,
    "train.steps": 6,
    "train.eval_every": 0,
    "train.checkpoint_every": 3,
}


def told_steps(folder: Path) -> dict[str, list[int]]:
    """What the newest checkpoint says of its experts."""
    found = checkpoint.newest_good(folder / "checkpoints", lambda path, why: None)
    assert found is not None
    steps: dict[str, list[int]] = found.state["optimizer"]["expert_steps"]
    assert min(min(one) for one in steps.values()) >= 0
    assert len({count for one in steps.values() for count in one}) > 2
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("table", [{"ranks.pipeline": 2}, {"ranks.expert": 2}])
def test_jobs(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    table: dict[str, Any],
) -> None:
    """Planned to the byte; a checkpoint has the steps of all experts, and goes on elsewhere."""
    alone = 1 if "ranks.pipeline" in table else 2
    ranks(alone, train, tmp_path / "whole", data, **JOB)
    runs = ranks(2, train, tmp_path / "run", data, **JOB, **table)
    for run in runs:
        assert_as_planned(run)
    assert told_steps(tmp_path / "run") == told_steps(tmp_path / "whole")
    if "ranks.pipeline" in table:
        assert figures(tmp_path / "run") == figures(tmp_path / "whole")
        assert_same_state(tmp_path / "run", tmp_path / "whole")
    else:
        assert master_difference(tmp_path / "run", tmp_path / "whole") < 1e-3
    ranks(1, convert, tmp_path / "run", tmp_path / "other", data, **JOB)
    ranks(2, convert, tmp_path / "other", tmp_path / "back", data, **JOB, **table)
    assert told_steps(tmp_path / "other") == told_steps(tmp_path / "run")
    assert_same_state(tmp_path / "run", tmp_path / "back")


@pytest.mark.slow
@pytest.mark.parametrize("table", [{"ranks.pipeline": 2}, {"ranks.expert": 2}])
def test_a_job_that_was_stopped_goes_on(
    ranks: Run,
    tmp_path: Path,
    data: Path,
    table: dict[str, Any],
) -> None:
    """To the bit: each expert has its own number of steps behind it."""
    steady = {"optim.schedule": '"constant"', "optim.warmup_steps": 0}
    ranks(2, train, tmp_path / "whole", data, **JOB | steady | table)
    for steps in (3, 6):
        some = JOB | steady | table | {"train.steps": steps}
        ranks(2, train, tmp_path / "run", data, resume=steps > 3, **some)
    assert told_steps(tmp_path / "run") == told_steps(tmp_path / "whole")
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


def refusals() -> dict[str, str]:
    found = {}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    given: dict[str, Any] = {
        "example": torch.zeros(1, 5, dtype=torch.int64),
        "microbatches": 2,
        "device": "cpu",
        "loss_fn": loss_of,
    }
    nothing = {"skip_unused": ("*.expert.*",)}
    found["nothing"] = told(lambda: ot.pipeline(made(MANY), mesh, **given, **nothing))
    late = {"skip_unused": SKIPS, "schedule": "2bw"}
    found["2bw"] = told(lambda: ot.pipeline(made(MANY), mesh, **given, **late))
    return found


@pytest.mark.slow
def test_misuse_is_refused_by_name(ranks: Run) -> None:
    for said in ranks(2, refusals):
        assert "no trained parameter is called '*.expert.*'" in said["nothing"]
        assert "schedule = '2bw' does not go with skip_unused = ['*.experts.*']" in said["2bw"]
