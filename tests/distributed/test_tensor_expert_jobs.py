"""Jobs with `ranks.expert` beside `ranks.tensor`: experts by the one, attention by the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config.batch_split import replicas, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.model_shape import flops_per_token
from offloadtrain.hardware.machine import find
from offloadtrain.plan.costs.among_ranks import AmongParts
from offloadtrain.plan.plan import PROCESS, make
from offloadtrain.plan.report import text
from offloadtrain.plan.search.choices import choices_of
from offloadtrain.train import dry_run
from offloadtrain.train.saved.saved_run import open_saved
from tests.distributed.conftest import Run
from tests.distributed.test_expert_jobs import EXPERTS, PARTS, STAGE_3, planned_share
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

BOTH = EXPERTS | PARTS | {"ranks.tensor": 2}
OF_TORCH = {("device", owner) for owner in ("activations", "logits and loss", "gradients")}


def assert_as_planned(found: dict[str, Any]) -> None:
    """What a rank holds, by tier and owner, without what torch has."""
    planned = {
        (tier, owner): value
        for tier, owners in found["planned"].items()
        for owner, value in owners.items()
        if (tier, owner) not in OF_TORCH | {("host", PROCESS)} and value
    }
    assert planned == {at: n for at, n in found["held"].items() if n and at not in OF_TORCH}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, GPT2])
def test_a_job_in_parts_is_near_one_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same batches, the same first weights, the same experts: sums have another order."""
    chosen = BOTH | changes | {"train.eval_every": 4, "train.eval_batches": 4}
    whole = ranks(2, trained, tmp_path / "whole", data, **chosen | {"ranks.tensor": 1})
    found = ranks(4, trained, tmp_path / "parts", data, **chosen)
    assert all(one["losses"] == found[0]["losses"] for one in found)
    assert close(whole[0]["losses"], found[0]["losses"], 1e-4)
    assert found[0]["val"] == pytest.approx(whole[0]["val"], rel=1e-4)
    assert found[0]["tokens"] == whole[0]["tokens"]
    apart = worst(tmp_path / "whole", tmp_path / "parts")
    with capsys.disabled():
        print(f"\nexperts and attention in parts: the worst master differs by {apart:.2g}")
    assert 0 < apart < 1e-3  # a tenth of what one step of lr moves


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("changes", "then"),
    [
        (STAGE_3, (1, {"ranks.expert": 1, "ranks.tensor": 1})),
        (GPT2 | BF16, (2, {"ranks.tensor": 1})),
        (BF16 | {"offload.state": '"split16"'}, (2, {"ranks.tensor": 1, "ranks.expert": 2})),
        ({"offload.update": '"delayed"'}, (4, {"ranks.tensor": 1, "ranks.expert": 4})),
    ],
)
def test_a_checkpoint_is_the_same_on_every_mesh(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
    then: tuple[int, dict[str, Any]],
) -> None:
    """Masters and moments to the bit, and back; each is saved once."""
    chosen = BOTH | changes | {"train.steps": 3, "train.eval_every": 0}
    ranks(4, trained, tmp_path / "run", data, **chosen)
    ranks(then[0], carried, tmp_path / "run", tmp_path / "carried", data, **chosen | then[1])
    assert_same_state(tmp_path / "run", tmp_path / "carried")
    ranks(4, carried, tmp_path / "carried", tmp_path / "back", data, **chosen)
    assert_same_state(tmp_path / "run", tmp_path / "back")
    assert main(["checkpoints", f"{tmp_path}/run", "--verify"]) == 0


@pytest.mark.slow
def test_a_job_goes_on(ranks: Run, tmp_path: Path, data: Path) -> None:  # noqa: F811
    """Stopped after 6 steps and resumed: the run that never stopped, bit for bit, with dropout."""
    chosen = BOTH | CONSTANT | {"model.dropout": 0.1} | STAGE_3
    ranks(4, trained, tmp_path / "whole", data, **chosen)
    for steps in (6, 12):
        some = chosen | {"train.steps": steps}
        ranks(4, trained, tmp_path / "run", data, resume=steps > 6, **some)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GPT2 | BF16 | STAGE_3,
        BF16 | {"offload.state_on": '"device"', "offload.zero_stage": 1},
        {"offload.activation": '"recompute"', "offload.partition_activations": "true"},
        {"offload.working": '"host"', "offload.update": '"speculative"'},
        BF16 | STAGE_3 | {"model.num_layers": 1, "offload.state": '"split16"'},
    ],
)
def test_each_rank_holds_and_sends_what_was_planned(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    changes: dict[str, Any],
) -> None:
    """To the byte, by tier and owner; the layout of the dry run is that of the plan."""
    chosen = BOTH | changes | {"train.steps": 2, "train.eval_every": 0}
    plan = make(job_of(data, **chosen), *find("cpu2"), 4)
    for found in ranks(4, trained, tmp_path / "run", data, **chosen):
        assert_as_planned(found)
    assert "as planned" in dry_run.check(plan)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_comes_back(tmp_path: Path) -> None:
    role = "part 2 of 2, experts 2 to 3"
    assert_comes_back(written(tmp_path, **BOTH), tmp_path, ranks=4, killed=3, role=role)


@pytest.mark.slow
def test_ranks_are_divided(data: Path) -> None:  # noqa: F811
    job = job_of(data, **BOTH)
    assert roles(job, 4) == tuple(
        f"part {part} of 2, experts {held}" for held in ("0 to 1", "2 to 3") for part in (1, 2)
    )
    assert replicas(job, 8) == 4
    with pytest.raises(ConfigError, match=r"experts for a part\. Start a multiple of 4"):
        shared(job, 6)
    with pytest.raises(ConfigError, match=r"divide them by ranks\.expert, too"):
        job_of(data, **BOTH | {"ranks.expert": 1})
    with pytest.raises(ConfigError, match=r"ranks\.tensor = 2 does not divide model\.num_kv_heads"):
        job_of(data, **BOTH | {"model.num_kv_heads": 1})
    job_of(data, **BOTH | {"model.d_ff": 49})  # experts are whole
    alone = job_of(data, **EXPERTS | PARTS)
    assert choices_of(alone, 4)["ranks.expert"] == (2, 4)
    assert choices_of(job, 4)["ranks.expert"] == (2,)


@pytest.mark.slow
def test_traffic_by_hand(data: Path) -> None:  # noqa: F811
    """A sum of attention forward and one backward in each layer, and one where it runs again."""
    for activation, sums in (("keep", 4), ("recompute", 6)):
        job = job_of(data, **BOTH | {"offload.activation": f'"{activation}"'})
        plan = make(job, *find("cpu2"), 4)
        part = plan.placed.config.train
        rows = part.micro_batch * 32
        assert AmongParts(plan.placed, plan.machine).sums == sums
        assert plan.prediction.parts_bytes == sums * rows * 32 * 4 * part.grad_accum_steps
        exchanges = 8 if activation == "keep" else 12
        sent = exchanges * rows * 2 * 32 * 4 // 2 * part.grad_accum_steps
        assert plan.prediction.experts_bytes == sent
        assert "each rank holds 1/2 of attention's matrices" in text(plan)
        assert "each rank holds 2 of 4 experts of a layer" in text(plan)
        # Each part computes all experts of its tokens: so many FLOPs are none of the model's.
        model, layers = job.model, job.model.num_layers
        chosen = 2.0 * model.d_model * (4 + model.experts_per_token * 3 * model.ff_width)
        layer = flops_per_token(replace(model, vocab_size=0), 32) / layers / 3
        again = 3 * chosen / 2 + (0 if activation == "keep" else (layer - chosen) / 2 + chosen)
        useful = flops_per_token(replace(model, vocab_size=0), 32) / 2 + 6 * 256 * model.d_model
        found = plan.prediction.hardware_tflops / plan.prediction.tflops
        assert found == pytest.approx(1 + layers * again / useful)


@pytest.mark.slow
def test_what_parts_have_in_common_is_saved_once(ranks: Run, data: Path, tmp_path: Path) -> None:  # noqa: F811
    ranks(4, trained, tmp_path / "run", data, **BOTH)
    entries = open_saved(tmp_path / "run").found.manifest.entries
    saved = sum(4 * (one.hi - one.lo) for one in entries)
    whole = make(job_of(data, **EXPERTS | PARTS), *find("cpu2"), 2).checkpoint_bytes
    assert make(job_of(data, **BOTH), *find("cpu2"), 4).checkpoint_bytes == whole
    assert saved <= whole < 1.02 * saved  # the ends of buffers


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_activations_are_near_the_plan(ranks: Run, data: Path, policy: str) -> None:  # noqa: F811
    """Where all experts get as many tokens, which the plan assumes."""
    chosen = BOTH | GPT2 | {"offload.activation": f'"{policy}"', "model.d_ff": 256}
    chosen |= {"model.d_model": 64, "model.num_layers": 6, "train.grad_accum_steps": 4}
    chosen |= {"model.max_seq_len": 64, "data.seq_len": 64, "train.micro_batch": 4}
    assert ranks(4, planned_share, data, **chosen) == pytest.approx([1.0] * 4, abs=0.05)
