"""What the README tells is run, and its table is what the command prints."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def offloadtrain(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offloadtrain", *args],
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_python_snippet_trains() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
    inputs = torch.randn(32, 4)
    seen: list[float] = []

    def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
        loss = F.mse_loss(net(batch).float(), batch.sum(1, keepdim=True))
        seen.append(loss.item())
        return loss

    exec(snippet, {"model": model, "batches": [inputs] * 200, "loss_of": loss_of})
    assert seen[-1] < 0.9 * seen[0]


def test_the_table_of_jobs_is_what_plan_prints() -> None:
    cell = r" ([^|]*) \|"
    rows = re.findall(rf"^\| `(\w+)` \| `(\w+)` \|{4 * cell}$", README, re.MULTILINE)
    assert len(rows) == 5
    for job, machine, params, device, host, rate in rows:
        printed = offloadtrain("plan", job, "--machine", machine).stdout
        assert f"{params} parameters" in printed, job
        assert f"device: {device} of" in printed, job
        assert f"init {host}" in printed or f"step {host}" in printed, job
        assert f"{rate} tokens/s" in printed, job


def test_the_job_commands(tmp_path: Path) -> None:
    (tmp_path / "my_texts").mkdir()
    for i in range(40):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"text number {i}. " * 20)
    assert "gpt2_124m" in offloadtrain("ls").stdout
    offloadtrain("cp", "gpt2_124m", "my.toml", cwd=tmp_path)
    offloadtrain("prepare", "my_texts/", "data/", cwd=tmp_path)
    assert list((tmp_path / "data").glob("*.bin"))
    changed = ("--set", "optim.lr=3e-4", "--dry-run")
    assert "lr = 0.0003" in offloadtrain("train", "my.toml", *changed, cwd=tmp_path).stdout


def test_every_test_path_in_the_readme_exists() -> None:
    for path in re.findall(r"pytest (tests/[\w/.]+)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_the_commands() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for target in ("demo", "test", "lint", "bench", "sanitize"):
        assert f"make {target}" in listed
