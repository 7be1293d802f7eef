"""Hugging Face folders of others: no command leaves the folder, runs code, hangs or shows a
traceback."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from tests.boundary.hostile import obeyed
from tests.boundary.hostile_models import MODELS, good_folder
from tests.boundary.test_hostile_folders import not_for_ever
from tests.conftest import Command

JOB = """
name = "small"
data.source = "{0}/text"
data.cache = "{0}/cache"
data.seq_len = 8
model.hf = "{0}/model"
device.kind = "cpu"
train.steps = 1
"""
QUICK = ["weights are outside", "10^9 layers", "downloaded attention"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    good_folder(folder / "model")
    (folder / "text").write_text("some text to train on\n" * 40)
    prepare = ["prepare", str(folder / "text"), str(folder / "data")]
    assert main([*prepare, "--tokenizer", str(folder / "model")]) == 0
    return folder


def commands(folder: Path) -> list[list[str]]:
    model = str(folder / "model")
    (folder / "job.toml").write_text(JOB.format(folder))
    tokens = str(next((folder / "data").glob("*.bin")))
    return [
        ["plan", "--hf", model, "--machine", "rtx4090", "--set", "data.seq_len=64"],
        ["train", str(folder / "job.toml"), "--run-dir", str(folder / "run")],
        ["generate", model, "--prompt", "hi", "--max-tokens", "2"],
        ["eval", model, "--data", tokens, "--seq-len", "8", "--micro-batch", "2"],
    ]


def check(good: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(good, tmp_path / "x", dirs_exist_ok=True)
    change, words = MODELS[kind]
    change(folder / "model")
    for command in commands(folder):
        began_s = time.process_time()
        with not_for_ever():
            code = main(command)
        took_s = time.process_time() - began_s
        out, err = capsys.readouterr()
        assert "Traceback" not in err, f"{command[0]}: {err[-3000:]}"
        assert obeyed(out) == obeyed(err) == [] and not list(folder.glob("RAN"))
        assert code in (0, 2, 4) and len(err) < 3000, f"{command[0]} {code}: {err}"
        if kind == "quantized" and command[0] == "plan":  # by the weights that training starts from
            assert code == 0 and "is quantized (evil), and training starts from" in out
        elif words:
            assert (code, words in err) == (2, True), f"{command[0]} {code}: {err}"
            assert took_s < 5.0, f"{command[0]} refuses before it reads"


@pytest.mark.parametrize("kind", QUICK)
def test_every_command_refuses_a_folder(
    good: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(good, kind, tmp_path, capsys)


def test_a_sequence_that_no_model_has_is_refused(good: Path, command: Command) -> None:
    sets = ["--set", f"data.seq_len={1 << 24}", "--machine", "rtx4090"]
    assert (
        "data.seq_len = 16777216 must be from 2 to 8388608"
        in command("plan", "--hf", good / "model", *sets, code=2).err
    )


@pytest.mark.slow
@pytest.mark.draws(0.3)
@pytest.mark.parametrize("kind", MODELS)
def test_no_command_trusts_a_model_folder(
    good: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(good, kind, tmp_path, capsys)


@pytest.mark.slow
def test_commands_accept_a_good_folder_and_the_cache_of_the_hub(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(good, tmp_path / "x")
    cache = folder / "models--a--b"
    shutil.move(folder / "model", cache / "blobs")
    revision = cache / "snapshots" / "0123"
    revision.mkdir(parents=True)
    for path in (cache / "blobs").iterdir():
        (revision / path.name).symlink_to(f"../../blobs/{path.name}")
    (folder / "model").symlink_to(revision)
    for command in commands(folder):
        code = main(command)
        assert code == 0, capsys.readouterr().err
