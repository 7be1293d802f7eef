"""docs/pretrain.md and docs/resume.md are followed in their order, with a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from tests.test_readme import ROOT, TINY, Captured, blocks

pytestmark = pytest.mark.slow

PRETRAIN, RESUME = ((ROOT / "docs" / page).read_text() for page in ("pretrain.md", "resume.md"))


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader is taken to have."""
    (tmp_path / "my_texts").mkdir()
    for i in range(40):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"It was text number {i}. " * 20)
    monkeypatch.chdir(tmp_path)
    (job,) = re.findall(r"```toml\n(.*?)```", PRETRAIN, re.DOTALL)
    (tmp_path / "small.toml").write_text(job)


def followed(command: str, steps: int = 2) -> int:
    """Run a command of a page, of a tiny model."""
    _, verb, *rest = shlex.split(command)
    if verb == "train":
        shorter = [*TINY, f"train.steps={steps}", "train.global_batch_tokens=128"]
        rest += [*([] if "--set" in rest else ["--set"]), *shorter]
    return main([verb, *rest])


def commands(page: str) -> list[str]:
    return [command for block in blocks(page) for command in block]


def test_a_model_is_pretrained(capsys: Captured) -> None:
    for command in commands(PRETRAIN):
        assert followed(command) == 0, command
    assert Path("small_model/config.json").exists()
    told = capsys.readouterr().out
    assert "GiB" in told and "perplexity" in told and told.count("It was") >= 2


def test_a_run_goes_on(capsys: Captured) -> None:
    """But for the request to stop, of a run that is under way: tests/train/test_control.py; and
    Slurm: tests/test_clusters.py."""
    found = commands(RESUME)
    first, stop, longer, listed, verified = found
    assert stop == "offloadtrain ctl runs/small stop"
    assert followed("offloadtrain prepare my_texts data") == 0
    assert followed(first) == 0
    assert "resuming" not in capsys.readouterr().err
    assert followed(first) == 0
    assert followed(longer, steps=4) == 0
    assert "resuming after step 2" in capsys.readouterr().err
    assert followed(listed) == followed(verified) == 0
    assert "small" in capsys.readouterr().out
