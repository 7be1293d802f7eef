"""The shipped jobs: all load, say what they are, and can be copied."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.cli.commands import train
from offloadtrain.cli.commands.jobs import shipped_jobs
from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.units import format_count
from offloadtrain.train.build import assemble


@pytest.mark.parametrize("name", shipped_jobs())
def test_every_shipped_job_loads_and_is_described(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = jobs.load(shipped_jobs()[name])
    assert job.train.steps > 0
    assert main(["ls"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["job", "parameters", "tokens/step"]
    (row,) = [line for line in rows if line.split()[0] == name]
    assert row.split()[1] == format_count(job.num_params) and len(row.split()) > 8
    assert main(["ls", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["job"]: one["params"] for one in found}[name] == job.num_params


def test_copy_makes_a_job_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "debug"]) == 0
    assert capsys.readouterr().out == "debug.toml\n"
    assert (tmp_path / "debug.toml").read_text() == shipped_jobs()["debug"].read_text()
    assert main(["cp", "debug", "mine.toml"]) == 0
    assert jobs.load("mine.toml") == jobs.load(shipped_jobs()["debug"])


def test_copy_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "debug.toml").write_text("mine")
    assert main(["cp", "debug", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "debug.toml").read_text() == "mine"
    assert main(["cp", "debug", str(tmp_path / "no" / "folder.toml")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "has"),
    [(4, "1.02B parameters, 4 blocks"), pytest.param(65, "13.3B par", marks=pytest.mark.slow)],
)
def test_dry_run_prints_the_resolved_job_and_what_it_needs(
    layers: int,
    has: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = ["optim.lr=5e-5", f"model.num_layers={layers}"]
    assert main(["train", "gpt_13b_32gb", "--dry-run", "--set", *changed]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["optim"]["lr"] == 5e-5
    assert jobs.loads(out) == jobs.load(shipped_jobs()["gpt_13b_32gb"], changed)
    assert has in err and "exp_avg_sq" in err and "as planned" in err
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_the_gpu_is_refused_on_a_cpu() -> None:
    job = jobs.load(shipped_jobs()["debug"], ["device.kind=cpu"])
    limited = replace(job, device=replace(job.device, process_memory_limit="8 GiB"))
    with pytest.raises(ConfigError, match="bounds the memory of a GPU"):
        assemble(limited)


def test_one_override_shortens_a_job_and_says_what_it_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "gpt2_124m", "--machine", "rtx4090", "--set", "train.steps=40"]) == 0
    out, err = capsys.readouterr()
    assert err == "optim.warmup_steps 700 -> 4 (train.steps = 40)\n" and "It fits: " in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("pipeline=2", "ranks.pipeline = 2 and 1 rank: each stage needs"),
        ("expert=2", "ranks.expert = 2 and 1 rank: each group of 2 ranks"),
    ],
)
def test_a_division_that_nobody_starts_is_refused_before_torch_is_loaded(
    table: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "guarded", None)  # what comes next
    changed = ["model.num_layers=4", "model.num_experts=4", "model.router_aux_loss_coef=0"]
    whole = [*changed, "model.tie_embeddings=false", "train.sample_tokens=0"]
    assert main(["train", "debug", "--set", *whole, f"ranks.{table}"]) == 2
    assert said in capsys.readouterr().err
