"""Help is quick, costs no torch, and ends with two examples; wrong usage is exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from offloadtrain.cli import main

COMMANDS = ["train", "plan", "doctor", "prepare", "ls", "cp", "trace", "report", "version"]
HELP_BUDGET_S = 0.4
SLACK = 5  # the machine may be busy; the import test below is the one that does not flicker


def offloadtrain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offloadtrain", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100", **environment},
    )


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda c: "".join(c))
def test_help_ends_with_two_examples(command: list[str]) -> None:
    done = offloadtrain(*command, "--help")
    assert done.returncode == 0 and done.stderr == ""
    head, _, examples = done.stdout.partition("Examples:\n")
    assert head.startswith("Usage: offloadtrain")
    lines = examples.strip("\n").split("\n")
    assert len(lines) == 2 and all(line.strip().startswith("offloadtrain ") for line in lines)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["ls"], ["--version"]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    script = (
        "import sys; from offloadtrain.cli import main; assert main(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'numpy', 'numba', 'textual', 'safetensors', 'pynvml', 'psutil'}; "
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_is_quick(arguments: list[str]) -> None:
    best = min(_timed(arguments) for _ in range(3))
    assert best < HELP_BUDGET_S * SLACK


def _timed(arguments: list[str]) -> float:
    started = time.perf_counter()
    assert offloadtrain(*arguments).returncode == 0
    return time.perf_counter() - started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trai"], 'Did you mean "train"'),
        (["train"], "JOB requires an argument"),
        (["train", "demo", "--sett", "a=1"], "Did you mean --set"),
        (["train", "dmo"], "did you mean demo"),
        (["train", "absent.toml"], "absent.toml"),
        (["train", "demo", "--set", "optim.lrr=1"], "did you mean lr"),
        (["train", "demo", "--set", "train.steps=0"], "train.steps"),
        (["train", "demo", "--set", "train.steps"], "section.key=value"),
        (["cp", "dmo"], "did you mean demo"),
    ],
)
def test_wrong_usage_is_2_and_says_what(arguments: list[str], message: str) -> None:
    done = offloadtrain(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in offloadtrain("train", "dmo", "--debug").stderr
    assert "Traceback" in offloadtrain("train", "dmo", OFFLOADTRAIN_DEBUG="1").stderr


def test_version_names_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a compiler they are others, of another speed."""
    from offloadtrain import kernels

    assert main(["version"]) == 0
    named = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert named.keys() == {"offloadtrain", "python", "torch", "numba", "kernels"}
    assert named["kernels"].startswith(f"{kernels.backend().name} {kernels.backend().isa}")
