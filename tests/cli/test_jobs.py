"""The shipped jobs: all load, say what they are, and can be copied; and `offloadtrain prepare`."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from offloadtrain.cli.commands import train
from offloadtrain.cli.commands.jobs import shipped_jobs
from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.units import format_count
from offloadtrain.data.tokens import TokenFile
from tests.conftest import Command


def test_every_shipped_job_loads_and_is_listed(command: Command) -> None:
    loaded = {name: jobs.load(path) for name, path in shipped_jobs().items()}
    header, *lines = command("ls").out.splitlines()
    assert header.split()[:3] == ["job", "parameters", "tokens/step"]
    rows = {line.split()[0]: line.split() for line in lines}
    assert {name: rows[name][1] for name in loaded} == {
        name: format_count(job.num_params) for name, job in loaded.items()
    }
    assert all(job.train.steps > 0 and len(rows[name]) > 8 for name, job in loaded.items())
    listed = [json.loads(line) for line in command("ls", "--json").out.splitlines()]
    expected = {name: job.num_params for name, job in loaded.items()}
    assert {row["job"]: row["params"] for row in listed} == expected


def test_cp_copies_a_shipped_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("cp", "debug").out == "debug.toml\n"
    assert (tmp_path / "debug.toml").read_text() == shipped_jobs()["debug"].read_text()
    assert main(["cp", "debug", "other.toml"]) == 0
    assert jobs.load("other.toml") == jobs.load(shipped_jobs()["debug"])


def test_cp_never_overwrites(tmp_path: Path, command: Command) -> None:
    (tmp_path / "debug.toml").write_text("text")
    assert "exists" in command("cp", "debug", tmp_path, code=2).err
    assert (tmp_path / "debug.toml").read_text() == "text"
    assert (
        "cannot be written" in command("cp", "debug", tmp_path / "no" / "folder.toml", code=2).err
    )


@pytest.mark.parametrize(
    ("layers", "has"),
    [(4, "1.02B parameters, 4 blocks"), pytest.param(65, "13.3B par", marks=pytest.mark.slow)],
)
def test_dry_run_prints_the_resolved_job_and_what_it_needs(
    layers: int,
    has: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = ["optim.lr=5e-5", f"model.num_layers={layers}"]
    out, err = command("train", "gpt_13b_32gb", "--dry-run", "--set", *changed)
    assert tomllib.loads(out)["optim"]["lr"] == 5e-5
    assert jobs.loads(out) == jobs.load(shipped_jobs()["gpt_13b_32gb"], changed)
    assert has in err and "exp_avg_sq" in err and "as planned" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("pipeline=2", "ranks.pipeline = 2 and 1 rank: each stage needs"),
        ("expert=2", "ranks.expert = 2 and 1 rank: each group of 2 ranks"),
    ],
)
def test_a_division_without_its_ranks_is_refused_before_torch_is_loaded(
    table: str, message: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(train, "run_job", None)  # what comes next
    changed = ["model.num_layers=4", "model.num_experts=4", "model.router_aux_loss_coef=0"]
    divided = [*changed, "model.tie_embeddings=false", "train.sample_tokens=0"]
    assert message in command("train", "debug", "--set", *divided, f"ranks.{table}", code=2).err


# ---- `offloadtrain prepare`: the names of the token files on stdout, everything else on stderr


def test_token_files_are_made_and_named(tmp_path: Path, command: Command) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text(f"text number {number}\n" * 50)
    out = tmp_path / "tokens"
    printed, narrated = command("prepare", source, out, "--val-fraction", "0.2")
    assert printed == f"{out}/train.bin\n{out}/val.bin\n"
    assert "written" in narrated
    assert len(TokenFile(out / "train.bin")) > len(TokenFile(out / "val.bin")) > 0

    assert "made before" in command("prepare", source, out, "--val-fraction", "0.2").err


def test_records_that_are_left_out_are_counted(tmp_path: Path, command: Command) -> None:
    """More of them than are named."""
    lines = [json.dumps({"text": "abc"}), "{"] * 12
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = ["prepare", tmp_path / "a.jsonl", tmp_path / "out", "--val-fraction", "0"]
    narrated = command(*arguments, "--bad-lines", "skip", "--quiet").err
    assert "left out: 12 of 24 records" in narrated and narrated.count("a.jsonl:") == 10


def test_lengths_are_shown_with_what_each_sequence_would_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of 3, 5, 5, 9 and 40 bytes: a sequence of 8 tokens and its last target is 9."""
    texts = ["abc", "abcde", "vwxyz", "123456789", "x" * 40]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    out = tmp_path / "out"
    assert main(["prepare", f"{tmp_path}/a.jsonl", f"{out}", "--val-fraction", "0"]) == 0
    ends = TokenFile(out / "train.bin").document_ends().tolist()
    lengths = [end - begin for begin, end in pairwise([0, *ends])]
    rows = [line.split() for line in capsys.readouterr().err.splitlines() if "≤" in line]
    beyond = {row[1]: [length - int(row[1]) - 1 for length in lengths] for row in rows}
    assert [row[1] for row in rows] == ["4", "8", "16", "32", "64"]
    shown = {row[1]: " ".join(row).partition("█ ")[2] or " ".join(row[2:]) for row in rows}
    inside = {
        bound: sum(2 * length > int(bound) >= length for length in lengths) for bound in shown
    }
    for bound, text in shown.items():
        lost = [tokens for tokens in beyond[bound] if tokens > 0]
        cut = f"{len(lost)} lose {sum(lost)} tokens" if lost else "none"
        assert text.startswith(f"{inside[bound]} {cut}"), (bound, text)
