"""How torch's threads wait: by the cores that are idle, on machines made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offloadtrain.hardware.wait_policy import Busy, choose, look
from tests.hardware.test_cpus import machine

ROOT = Path(__file__).parent.parent.parent


def busy_of(tmp_path: Path, shares: list[float], *, cores: int = 0, **inputs: object) -> Busy:
    """What `look` finds where CPU i is busy for so much of the time."""
    sysfs = machine(tmp_path, 1, cores or len(shares), len(shares) // (cores or len(shares)))
    stat = tmp_path / "stat"

    def tell(ticks: float) -> None:
        rows = [
            f"cpu{i} {round(share * ticks)} 0 0 {round((1 - share) * ticks)} 0 0 0 0 0 0"
            for i, share in enumerate(shares)
        ]
        stat.write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *rows, "intr 1 2 3\n"]))

    tell(1000)
    allowed = inputs.get("allowed", range(len(shares)))
    assert isinstance(allowed, range)
    return look(allowed, stat=stat, sysfs=sysfs, sleep=lambda seconds: tell(1000 + 100 * seconds))


def test_an_idle_machine(tmp_path: Path) -> None:
    assert busy_of(tmp_path, [0.0, 0.0]) == Busy(2, 0.0)
    assert busy_of(tmp_path, [0.05] * 64) == Busy(64, 0.0), "what an idle system does is no program"


def test_one_busy_core(tmp_path: Path) -> None:
    assert busy_of(tmp_path, [1.0, 0.0]) == Busy(2, 1.0)
    assert busy_of(tmp_path, [0.5, 0.5]) == Busy(2, 1.0), "it may move from core to core"


def test_a_busy_sibling_takes_the_core(tmp_path: Path) -> None:
    """CPUs 0 and 2 are one core."""
    assert busy_of(tmp_path, [0.0, 0.0, 1.0, 0.0], cores=2) == Busy(2, 1.0)


@pytest.mark.parametrize(
    ("threads", "busy", "asleep"),
    [
        (0, Busy(2, 0.0), False),
        (0, Busy(2, 0.3), False),
        (0, Busy(2, 1.0), True),
        (0, Busy(16, 1.0), True),
        (1, Busy(2, 1.0), False),  # there is a core for it
        (4, Busy(16, 11.0), False),
        (4, Busy(16, 13.0), True),
    ],
)
def test_threads_wait_asleep_where_fewer_cores_are_idle(
    threads: int, busy: Busy, asleep: bool
) -> None:
    environ: dict[str, str] = {}
    message = choose(threads, environ, lambda: busy)
    assert environ == ({"OMP_WAIT_POLICY": "passive"} if asleep else {})
    assert message == (f"waiting asleep: {busy.busy} of {busy.cores} cores were busy" * asleep)


@pytest.mark.parametrize(
    ("environ", "quota", "asleep"),
    [
        ({}, None, True),
        ({"OMP_NUM_THREADS": "4"}, None, False),
        ({"OMP_NUM_THREADS": "16,2"}, None, True),
        ({"OMP_NUM_THREADS": "many"}, None, True),
        ({}, 2.5, False),
        ({}, 14.0, True),
        ({}, 0.5, False),
    ],
)
def test_threads_are_those_that_torch_will_have(
    environ: dict[str, str], quota: float | None, asleep: bool
) -> None:
    """By what the environment says, or the container allows, on 16 cores of which 4 are busy."""
    assert bool(choose(0, environ, lambda: Busy(16, 4.0), quota)) is asleep


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_a_user_says_wins(name: str) -> None:
    environ = {name: "7"}
    assert choose(0, environ, lambda: Busy(2, 2.0)) == f"waiting as set by {name}=7"
    assert environ == {name: "7"}


@pytest.mark.slow
def test_it_is_chosen_before_torch_is_loaded(tmp_path: Path) -> None:
    """The real command: OpenMP reads the variable once, and what was chosen is told and kept."""
    (tmp_path / "text.txt").write_text("a text to learn from. " * 200)
    overrides = ["data.source=text.txt", "train.steps=1", "optim.warmup_steps=0"]
    overrides += ["train.eval_every=0", "train.sample_tokens=0", "train.sample_prompt="]
    script = f"""
import os, sys
from offloadtrain.hardware import wait_policy as waiting
from offloadtrain.cli.main import main
def look():
    assert "torch" not in sys.modules
    return waiting.Busy(2, 1.0)
waiting.look = look
main(["train", "debug", "--run-dir", "run", "--set", *{overrides}])
"""
    command = [sys.executable, "-c", script]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    paths = f"{ROOT}:{ROOT / 'tui'}"
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": paths, "OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
    )
    assert "threads waiting asleep: 1.0 of 2 cores were busy; updates" in done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
