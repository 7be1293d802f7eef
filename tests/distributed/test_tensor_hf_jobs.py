"""Whole jobs with `model.hf` whose matrices are divided among ranks, by the model's own plan: near
one process, checkpoints of any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.hardware.machine import find
from offloadtrain.plan.plan import PROCESS, make
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import is_distributed
from offloadtrain.train import dry_run
from offloadtrain.train.build import assemble, described
from tests.distributed import test_tensor_jobs
from tests.distributed.conftest import Run
from tests.distributed.test_jobs import CONSTANT, close, data  # noqa: F401
from tests.distributed.test_pipeline_hf_jobs import hf_job, saved, trained_hf
from tests.distributed.test_pipeline_jobs import figures
from tests.distributed.test_tensor_jobs import (
    assert_comes_back,
    assert_same_state,
    carried,
    whole_state,
    worst,
)
from tests.train.small_job import write_text

transformers = pytest.importorskip("transformers")

MORE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    # The same places are dropped on all parts, and in one process: nothing between is divided.
    "GPT2": {"n_inner": 48, "num_key_value_heads": 4, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
}
FP32 = {"offload.precision": '"fp32"'}
BF16 = {"offload.precision": '"bf16"'}
PARTS = {"ranks.tensor": 2}
PARTITIONED = {"offload.partition_activations": "true"}


def carried_hf(folder: Path, into: Path, data: Path, kind: str, **changes: Any) -> None:  # noqa: F811
    """`carried` with a model of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            test_tensor_jobs, "job_of", lambda where, **more: described(hf_job(where, kind, **more))
        )
        carried(folder, into, data, **changes)


@pytest.mark.slow
@pytest.mark.draws(0.6)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(*("Llama", {}), marks=pytest.mark.long),
        ("Llama", {"model.init": '"random"', "train.chunked_loss": "true"}),
        pytest.param(*("Qwen2", {"data.packing": '"isolated"'}), marks=pytest.mark.long),
        ("Qwen3", {}),
        pytest.param(*("Gemma2", {"offload.activation": '"recompute"'}), marks=pytest.mark.long),
        ("Phi3", {"offload.working": '"host"'}),
        pytest.param(*("Olmo2", {}), marks=pytest.mark.long),
        ("Mixtral", {"offload.activation": '"recompute"'}),
        ("GPT2", {}),
        pytest.param("Glm4", {}, marks=pytest.mark.long),
        pytest.param("Qwen3Moe", {}, marks=pytest.mark.long),
        pytest.param("Mistral", {"offload.working": '"host"'}, marks=pytest.mark.long),
        pytest.param("Gemma", {}, marks=pytest.mark.long),
        pytest.param("Gemma3Text", {}, marks=pytest.mark.long),
        pytest.param("GPTNeoX", {}, marks=pytest.mark.long),
        pytest.param("Granite", {}, marks=pytest.mark.long),
    ],
)
def test_a_job_in_parts_is_near_one_process(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
    changes: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its loss, its validation, and its weights, but for the order of sums."""
    saved(data, kind, **MORE.get(kind, {}))
    (one,) = ranks(1, trained_hf, tmp_path / "one", data, kind, **FP32, **changes)
    two = ranks(2, trained_hf, tmp_path / "two", data, kind, **FP32, **PARTS, **changes)
    assert two[0]["losses"] == two[1]["losses"] and two[0]["val"] == two[1]["val"]
    assert close(one["losses"], two[0]["losses"], 1e-4)
    assert two[0]["val"] == pytest.approx(one["val"], rel=1e-4)
    # Every gradient counts once.
    norms = [float(figures(tmp_path / name)[0][2]) for name in ("one", "two")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    apart = worst(tmp_path / "one", tmp_path / "two")
    with capsys.disabled():
        print(f"\n{kind}: worst difference of a master to one process after 12 steps: {apart:.2g}")
    assert 0 < apart < 1e-3  # a tenth of what one step of lr moves


def drawn_next(data: Path, **changes: Any) -> float:  # noqa: F811
    """What dropout would draw first on this rank, whose model is built."""
    ranks = Ranks.of(None, torch.device("cpu"))
    job = described(hf_job(data, "GPT2", **changes))
    context = assemble(job, ranks=ranks, rank_info=RankInfo(rank=ranks.rank, size=ranks.size))
    found = float(torch.rand(()))
    context.optimizer.close()
    ranks.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("init", ["random", "weights"])
def test_ranks_with_other_batches_draw_other_numbers(
    ranks: Run,
    data: Path,  # noqa: F811
    init: str,
) -> None:
    """First weights are drawn alike on all ranks, and dropout is not, but for that of parts."""
    chosen = FP32 | {"model.init": f'"{init}"'}
    saved(data, "GPT2", **MORE["GPT2"])
    one, other = ranks(2, drawn_next, data, **chosen)
    assert one != other
    one, other = ranks(2, drawn_next, data, **chosen, **PARTS)
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "Gemma3Text",
        "Mixtral",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("Qwen3", "Olmo2")),
    ],
)
def test_gradients_of_the_first_step_agree(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
) -> None:
    """Of every parameter, before Adam has divided those that are nearly zero by themselves."""
    saved(data, kind, **MORE.get(kind, {}))
    one_step = FP32 | {"train.steps": 1, "optim.warmup_steps": 0, "train.eval_every": 0}
    ranks(1, trained_hf, tmp_path / "one", data, kind, **one_step)
    ranks(2, trained_hf, tmp_path / "two", data, kind, **one_step, **PARTS)
    one, two = whole_state(tmp_path / "one"), whole_state(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, state in one.items():
        apart = (state["exp_avg"] - two[name]["exp_avg"]).norm() / state["exp_avg"].norm()
        assert apart < 1e-5, name


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("kind", "first", "then", "changes"),
    [
        ("Llama", (2, 2), (1, 1), BF16 | {"offload.state": '"split16"'}),
        ("Qwen3", (1, 1), (2, 2), FP32),
        pytest.param(
            *("Qwen2", (4, 2), (4, 1), FP32 | {"offload.zero_stage": 2}), marks=pytest.mark.long
        ),
        pytest.param(
            *("Gemma2", (2, 2), (2, 1), BF16 | {"offload.working": '"host"'}),
            marks=pytest.mark.long,
        ),
        pytest.param(*("Phi3", (2, 2), (1, 1), FP32), marks=pytest.mark.long),
        pytest.param(*("Mixtral", (1, 1), (2, 2), FP32), marks=pytest.mark.long),
        ("Mixtral", (4, 2), (4, 1), BF16 | {"offload.zero_stage": 2}),
        ("GPT2", (2, 2), (2, 1), FP32),
    ],
)
def test_a_checkpoint_is_the_same_on_every_mesh(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
    first: tuple[int, int],
    then: tuple[int, int],
    changes: dict[str, Any],
) -> None:
    """(ranks, parts) → (ranks, parts): masters and moments, to the bit, and back again; exported by
    transformers' names."""
    saved(data, kind, **MORE.get(kind, {}))
    chosen = changes | {"train.steps": 3, "train.eval_every": 0}
    before, after = (chosen | {"ranks.tensor": parts} for _, parts in (first, then))
    run, other, back = (tmp_path / name for name in ("run", "carried", "back"))
    ranks(first[0], trained_hf, run, data, kind, **before)
    ranks(then[0], carried_hf, run, other, data, kind, **after)
    assert_same_state(run, other)
    ranks(first[0], carried_hf, other, back, data, kind, **before)
    assert_same_state(run, back)
    exported = []
    for folder in (run, other):
        (path,) = (folder / "checkpoints").iterdir()
        assert main(["export", f"{path}", f"{folder}-out", "--dtype", "fp32"]) == 0
        exported.append(Path(f"{folder}-out/model.safetensors").read_bytes())
    assert exported[0] == exported[1]
    assert main(["checkpoints", str(run), "--verify"]) == 0


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("kind", "size", "changes"),
    [
        pytest.param(*("Llama", 2, FP32), marks=pytest.mark.long),
        pytest.param(
            *("Qwen2", 2, BF16 | {"offload.state": '"split16"', "offload.update": '"delayed"'}),
            marks=pytest.mark.long,
        ),
        ("Qwen3", 4, FP32 | {"offload.zero_stage": 3}),
        pytest.param(
            *("Gemma2", 2, BF16 | {"offload.working": '"host"', "offload.update": '"speculative"'}),
            marks=pytest.mark.long,
        ),
        ("Llama", 2, FP32 | {"offload.activation": '"recompute"'} | PARTITIONED),
        ("Phi3", 2, FP32 | {"offload.working": '"host"'}),
        ("Mixtral", 4, BF16 | {"offload.zero_stage": 3}),
        pytest.param(
            *("GPT2", 2, FP32 | {"offload.update": '"speculative"'}), marks=pytest.mark.long
        ),
    ],
)
def test_each_part_holds_what_was_planned(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
    size: int,
    changes: dict[str, Any],
) -> None:
    """To the byte, by tier and owner; the layout of the dry run is that of the plan."""
    saved(data, kind, **MORE.get(kind, {}))
    chosen = PARTS | changes | {"train.steps": 2, "train.eval_every": 0, "optim.warmup_steps": 0}
    torchs = {("device", owner) for owner in ("activations", "logits and loss", "gradients")}
    for found in ranks(size, trained_hf, tmp_path / "run", data, kind, **chosen):
        planned = {
            (tier, owner): value
            for tier, owners in found["planned"].items()
            for owner, value in owners.items()
            if (tier, owner) not in torchs | {("host", PROCESS)} and value
        }
        held = {where: value for where, value in found["held"].items() if value}
        assert planned == held
    plan = make(described(hf_job(data, kind, **chosen)), *find("cpu2"), size)
    assert "as planned" in dry_run.check(plan)
    assert plan.ranks == size


@pytest.mark.slow
def test_the_plan_is_of_a_part(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is traced, with half of each matrix."""
    write_text(tmp_path)
    path, busy = tmp_path / "job.toml", []
    for parts in (1, 2):
        path.write_text(jobs.dump(hf_job(tmp_path, "Llama", **{"ranks.tensor": parts})))
        given = ["plan", str(path), "--gpus", str(parts), "--machine", "cpu2", "--json"]
        assert main(given) == 0
        busy.append(json.loads(capsys.readouterr().out)["step"])
    assert 0.0 < busy[1]["busy_s"]["compute"] < busy[0]["busy_s"]["compute"]
    assert busy[1]["parts_bytes"] == 4 * 4 * (2 * 32 * 32 * 2) * 4  # bf16, 4 sums of 4 layers


def divided(data: Path, kind: str) -> tuple[int, int]:  # noqa: F811
    """How many parameters this rank holds a part of, and how many whole ones it was given."""
    from offloadtrain.runtime.process_group import Ranks
    from offloadtrain.train.build import assemble

    ranks = Ranks.of(None, torch.device("cpu"))
    context = assemble(described(hf_job(data, kind, **FP32, **PARTS)), ranks=ranks)
    params = dict(context.model.module.named_parameters())
    parts = [name for name, one in params.items() if is_distributed(one) and not replicated(one)]
    context.optimizer.close()
    ranks.close()
    return len(parts), len(params)


def replicated(param: Any) -> bool:
    return all(one.is_replicate() for one in param.placements)


@pytest.mark.slow
def test_what_is_divided(ranks: Run, data: Path) -> None:  # noqa: F811
    """Seven matrices of every layer, and the biases of Qwen2's queries, keys and values."""
    for kind, in_layer, whole in (("Llama", 7, 2), ("Qwen2", 10, 2)):
        saved(data, kind, **MORE.get(kind, {}))
        assert ranks(2, divided, data, kind) == [(4 * in_layer, 4 * (in_layer + whole) + 3)] * 2


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1)])
def test_a_job_in_parts_goes_on(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    first: int,
    then: int,
) -> None:
    """On the same mesh the run that never stopped, bit for bit; on another one near it."""
    saved(data, "Qwen3")
    chosen = FP32 | CONSTANT
    ranks(first, trained_hf, tmp_path / "whole", data, "Qwen3", **chosen | {"ranks.tensor": first})
    for parts, steps in ((first, 6), (then, 12)):
        some = chosen | {"ranks.tensor": parts, "train.steps": steps, "resume": steps > 6}
        ranks(parts, trained_hf, tmp_path / "run", data, "Qwen3", **some)
    if first == then:
        assert figures(tmp_path / "run") == figures(tmp_path / "whole")
        assert_same_state(tmp_path / "run", tmp_path / "whole")
    else:
        assert 0 < worst(tmp_path / "whole", tmp_path / "run") < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "changes", "message"),
    [
        ("Llama", {}, {"model.lora": "{r = 2}"}, "the parts of matrices divide no adapters"),
        ("Llama", {}, {"ranks.tensor": 4}, "does not divide model.num_kv_heads = 2"),
        ("Llama", {"attention_dropout": 0.1}, {}, "drop the same places in the heads of all"),
        ("Apertus", {}, {}, "'model.layers.0.mlp.act_fn' gets a part of its input, and its plan"),
        ("Doge", {}, {}, "its code fails in parts (Attempting to broadcast a dimension"),
        ("HrmText", {}, {}, "has 'L_module.layers.*.self_attn.q_proj' = 'colwise'"),
    ],
)
def test_jobs_that_cannot_be_divided_into_parts(
    tmp_path: Path, kind: str, more: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    write_text(tmp_path)
    saved(tmp_path, kind, **more)
    with pytest.raises(ConfigError) as found:
        described(hf_job(tmp_path, kind, **PARTS | changes))
    assert message in str(found.value)


@pytest.mark.long
def test_a_part_that_is_killed_is_named_and_the_job_comes_back(tmp_path: Path) -> None:
    write_text(tmp_path)
    path = tmp_path / "job.toml"
    steps = {"train.steps": 9, "train.checkpoint_every": 4}
    path.write_text(jobs.dump(hf_job(tmp_path, "Llama", **PARTS | FP32 | steps)))
    assert_comes_back(path, tmp_path, ranks=2, killed=1, role="part 2 of 2")
