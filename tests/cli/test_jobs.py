"""The shipped jobs: all load, say what they are, and can be copied."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain import config
from offloadtrain.assembly import assemble
from offloadtrain.cli import main
from offloadtrain.commands.jobs import shipped_jobs
from offloadtrain.errors import ConfigError
from offloadtrain.footprint import state_bytes
from offloadtrain.optim import FORMATS
from offloadtrain.shapes import num_params


@pytest.mark.parametrize("name", shipped_jobs())
def test_every_shipped_job_loads_and_is_described(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = config.load(shipped_jobs()[name])
    assert job.train.steps > 0
    assert main(["ls"]) == 0
    described = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert len(described[name]) > 20


def test_copy_makes_a_job_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", "debug"]) == 0
    assert capsys.readouterr().out == "debug.toml\n"
    assert (tmp_path / "debug.toml").read_text() == shipped_jobs()["debug"].read_text()
    assert main(["cp", "debug", "mine.toml"]) == 0
    assert config.load("mine.toml") == config.load(shipped_jobs()["debug"])


def test_copy_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "debug.toml").write_text("mine")
    assert main(["cp", "debug", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "debug.toml").read_text() == "mine"
    assert main(["cp", "debug", str(tmp_path / "no" / "folder.toml")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_dry_run_prints_the_resolved_job_and_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "gpt_13b_32gb", "--dry-run", "--set", "optim.lr=5e-5"]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["optim"]["lr"] == 5e-5
    assert config.loads(out) == config.load(shipped_jobs()["gpt_13b_32gb"], ["optim.lr=5e-5"])
    assert "13.3" in err and "master weights" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "device", "host"),
    [
        (["device.precision=bf16"], 2, 12 + 2),
        (["device.precision=bf16", "train.grad_accum_steps=2"], 2, 12 + 4),
        (["device.precision=fp32"], 4, 12 + 4),
        (["device.precision=bf16", "optim.state=split16"], 2, 8 + 2),
        (["device.precision=fp16", "optim.state=int8"], 2, 5 + 8 / 128 + 2),
    ],
)
def test_bytes_per_parameter(overrides: list[str], device: int, host: float) -> None:
    job = config.load(shipped_jobs()["demo"], overrides)
    tiers = state_bytes(job)
    assert sum(tiers["device"].values()) == device * num_params(job.model)
    assert sum(tiers["host"].values()) == round(host * num_params(job.model))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.state=int8", "device.working=host"],
        ["device.working=host", "train.grad_accum_steps=2", "device.slots=1"],
        ["device.working=host", "device.resident_blocks=1", "optim.update=delayed"],
        ["optim.update=delayed", "optim.state=split16"],
        ["optim.clip_norm=0", "optim.skip_nonfinite=false", "train.grad_accum_steps=2"],
        ["optim.clip_norm=0", "optim.skip_nonfinite=false", "device.working=host"],
        ["device.working=host", "device.memory_limit=5.5MB"],
    ],
)
def test_the_bytes_are_those_of_the_engine(overrides: list[str], tmp_path: Path) -> None:
    """All but staging, norms, and what padding to 128 elements adds to small parameters."""
    job = config.load(shipped_jobs()["demo"], ["device.precision=bf16", *overrides])
    told = state_bytes(job)
    parts = assemble(replace(job, data=replace(job.data, cache=str(tmp_path))))
    held = {(row.tier, row.owner): row.bytes for row in parts.optimizer.ledger.rows()}
    parts.optimizer.close()
    owners = {"gradients": "gradient sums"} if job.train.grad_accum_steps > 1 else {}
    for tier, states in told.items():
        for owner, size in states.items():
            if owner == "scales":
                continue
            found = held[tier, owners.get(owner, owner)]
            assert size <= found <= 1.02 * size, (tier, owner)
    beside = {"gradient staging", "host staging", "norms", "padding"}
    assert {owner for _, owner in held} - beside <= {
        owners.get(owner, owner) for states in told.values() for owner in states
    } | {"exp_avg_scale", "exp_avg_sq_scale"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_those_of_the_formats(name: str) -> None:
    job = config.load(shipped_jobs()["demo"], [f"optim.state={name}", "device.precision=bf16"])
    host = state_bytes(job)["host"]
    size = FORMATS[name].bytes_per_param(("exp_avg", "exp_avg_sq"), 2)
    assert sum(host.values()) - host["gradients"] == round(size * num_params(job.model))


def test_a_limit_of_the_gpu_is_refused_on_a_cpu() -> None:
    job = config.load(shipped_jobs()["debug"], ["device.kind=cpu"])
    limited = replace(job, device=replace(job.device, process_memory_limit="8 GiB"))
    with pytest.raises(ConfigError, match="bounds the memory of a GPU"):
        assemble(limited)
