"""Whole jobs with `model.hf` in stages: the bits of ranks that hold the whole model, checkpoints of
either."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import RanksConfig
from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.machine import find
from offloadtrain.integrations.deferred import DeferredWeights
from offloadtrain.plan.plan import make
from offloadtrain.train import dry_run
from offloadtrain.train.build import described
from tests.distributed import test_jobs
from tests.distributed.conftest import Run
from tests.distributed.rank_faults import HANG_S, Job
from tests.distributed.test_jobs import data, trained  # noqa: F401
from tests.distributed.test_pipeline_jobs import assert_same_run, figures, weights
from tests.train.small_job import JOB, write_text

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
ROWS = {"train.micro_batch": 2, "train.grad_accum_steps": 4, "log.to": '["jsonl"]'}
STAGES = {"ranks.pipeline": 2}
INTERLEAVED = {"ranks.schedule": '"interleaved"', "ranks.stages_per_rank": 2}


def saved(folder: Path, kind: str, **more: Any) -> Path:
    """A small model in a folder, as transformers saves it."""
    path = folder / kind.lower()
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES | more)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def hf_job(folder: Path, kind: str, **changes: Any) -> Config:
    head, _, rest = JOB.format(folder=folder).partition("[model]")
    path = saved(folder, kind)
    text = f'{head}[model]\nhf = "{path}"\n[data]{rest.partition("[data]")[2]}'
    return jobs.loads(text, "small", [f"{key}={value}" for key, value in (ROWS | changes).items()])


def trained_hf(folder: Path, data: Path, kind: str, **changes: Any) -> dict[str, Any]:  # noqa: F811
    """`trained` with a model of transformers."""

    def job_of(where: Path, **more: Any) -> Config:
        return described(hf_job(where, kind, **more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_jobs, "job_of", job_of)
        return trained(folder, data, **changes)


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        ("Llama", 2, {"train.eval_every": 4, "data.packing": '"isolated"'}),
        ("Gemma2", 4, {"offload.activation": '"recompute"', "train.eval_every": 4}),
        ("Llama", 2, {"train.chunked_loss": "true", "offload.working": '"host"'}),
        ("GPT2", 2, {"model.init": '"random"'}),
        pytest.param(
            "Qwen2",
            *(2, INTERLEAVED | {"train.chunked_loss": "true", "train.eval_every": 4}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("Qwen3", 2, {"ranks.schedule": '"2bw"', "offload.update": '"delayed"'}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("Llama", 2, {"ranks.schedule": '"gpipe"', "data.packing": '"padded"'}),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_job_in_stages_has_the_bits_of_one_without(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    kind: str,
    size: int,
    options: dict[str, Any],
) -> None:
    """Also its plan is of one stage, to the byte, and the log names it."""
    saved(data, kind, num_hidden_layers=8 if "ranks.stages_per_rank" in options else 4)
    plain = {key: value for key, value in options.items() if not key.startswith("ranks.")}
    whole = ranks(size // 2, trained_hf, tmp_path / "whole", data, kind, **plain)
    staged = ranks(size, trained_hf, tmp_path / "staged", data, kind, **STAGES, **options)
    assert_same_run(tmp_path / "whole", tmp_path / "staged", size)
    assert {found["val"] for found in staged} == {whole[0]["val"]}
    for rank, found in enumerate(staged):
        for tier, owners in found["planned"].items():
            for owner in ("master weights", "exp_avg", "weights", "norms"):
                held = found["held"].get((tier, owner), 0)
                assert owners.get(owner, 0) == held, (rank, tier, owner)
        log = log_lines.read(tmp_path / "staged/events" / f"rank{rank:03d}.jsonl")
        (plan,) = [r.event.plan for r in log if isinstance(r.event, schema.RunStarted)]
        if "ranks.stages_per_rank" in options:
            continue
        first = rank < size // 2
        held = "embedding, layers 0 to 1" if first else "layers 2 to 3, head"
        assert plan["stage"] == f"stage {1 if first else 2} of 2 ({held})"


@pytest.mark.slow
def test_the_layout_of_each_stage_is_the_planned_one(tmp_path: Path) -> None:
    write_text(tmp_path)
    name, machine = find("cpu2")
    for kind, each in (("Llama", "[2,3]"), ("Gemma2", '"auto"'), ("GPT2", "[3,2]")):
        saved(tmp_path, kind, num_hidden_layers=5)
        uneven = STAGES | {"ranks.layers_per_stage": each}
        job = described(hf_job(tmp_path, kind, **uneven))
        for stage in range(2):
            plan = make(job, name, machine, 2, stage=stage)
            assert "as planned" in dry_run.check(plan)
        whole = make(replace(job, ranks=RanksConfig()), name, machine, 1)
        assert plan.checkpoint_bytes == whole.checkpoint_bytes


def read_by(folder: Path, data: Path) -> set[str]:  # noqa: F811
    """The weights of the folder that this rank reads."""
    taken, take = set(), DeferredWeights._take

    def noted(own: DeferredWeights, name: str) -> torch.Tensor:
        taken.add(name)
        return take(own, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredWeights, "_take", noted)
        trained_hf(folder, data, "Llama", **STAGES, **{"train.steps": 2, "optim.warmup_steps": 0})
    return taken


@pytest.mark.slow
def test_a_rank_reads_only_its_stage(ranks: Run, tmp_path: Path, data: Path) -> None:  # noqa: F811
    saved(data, "Llama")
    first, last = ranks(2, read_by, tmp_path / "run", data)
    assert not first & last and len(first | last) == 4 * 9 + 3
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in last


@pytest.mark.slow
@pytest.mark.draws(0.4)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (1, 2)])
def test_a_job_goes_on_in_other_stages(
    ranks: Run,
    tmp_path: Path,
    data: Path,  # noqa: F811
    before: int,
    after: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped after 6 steps and resumed: the run that never stopped, bit for bit; and exported."""
    saved(data, "Gemma2")
    constant = {"optim.schedule": '"constant"', "train.checkpoint_every": 6}
    ranks(1, trained_hf, tmp_path / "whole", data, "Gemma2", **constant)
    for size, steps in ((before, 6), (after, 12)):
        more = constant | {"ranks.pipeline": size, "train.steps": steps, "resume": steps > 6}
        ranks(size, trained_hf, tmp_path / "run", data, "Gemma2", **more)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    capsys.readouterr()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, value in model.state_dict().items():
        assert torch.equal(value.bfloat16(), whole[name].bfloat16()), name


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        ({}, {"model.lora": "{r = 2}"}, "model.lora: a pipeline divides no adapters"),
        ({"num_hidden_layers": 3}, {}, "each stage needs 2 layers; set it to at most 1"),
        ({"tie_word_embeddings": True}, {}, "config.json tie_word_embeddings = false"),
        ({}, {"train.sample_tokens": 5}, "no process holds the whole model"),
    ],
)
def test_jobs_that_cannot_be_divided(
    tmp_path: Path, more: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    write_text(tmp_path)
    saved(tmp_path, "Llama", **more)
    with pytest.raises(ConfigError, match=message):
        described(hf_job(tmp_path, "Llama", **STAGES | changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("Gemma2", {"tie_word_embeddings": True}, "one tied parameter"),
        ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 48}, "OPTForCausalLM cannot be divided"),
    ],
)
def test_models_that_cannot_be_divided(
    tmp_path: Path, kind: str, more: dict[str, Any], message: str
) -> None:
    """Found where the model is described, before anything is built."""
    write_text(tmp_path)
    path = saved(tmp_path, kind, **more) / "config.json"
    told = json.loads(path.read_text())
    if kind == "Gemma2":  # the class ties them, of which config.json says nothing
        del told["tie_word_embeddings"]
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=message):
        described(hf_job(tmp_path, kind, **STAGES))


@pytest.mark.long
def test_a_stage_that_fails_is_named_and_the_job_comes_back(tmp_path: Path) -> None:
    """Restarted from its checkpoint, it has the bits of a run that was left alone."""
    write_text(tmp_path)
    steps = {"train.steps": 9, "train.checkpoint_every": 4}
    path = tmp_path / "job.toml"
    path.write_text(jobs.dump(hf_job(tmp_path, "Llama", **STAGES | steps)))
    least = ("--nproc", "2", "--set", f"train.hang_timeout_s={HANG_S}")
    fault = ("backward:kill", "5", "1")
    struck = Job.start(path, tmp_path / "run", *least, "--max-restarts", "1", fault=fault)
    assert struck.ended() == 0, struck.text
    said = r"rank 1 \(stage 2 of 2, pid \d+\) was killed by SIGKILL"
    assert re.search(said, struck.text), struck.text
    whole = Job.start(path, tmp_path / "whole", *least)
    assert whole.ended() == 0, whole.text
    last = {figure[0]: figure for figure in figures(tmp_path / "run")}
    assert list(last.values()) == figures(tmp_path / "whole")
