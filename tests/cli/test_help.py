"""Help loads little, no torch, and ends with two examples; wrong usage is exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from offloadtrain.cli.main import main
from tests.conftest import Command

COMMANDS = (
    "train export checkpoints convert generate eval plan doctor prepare ls cp trace report version"
).split()
MOST_MODULES = 400
"""That help loads: each takes a millisecond or less."""


DEFAULTS = {"--seq-len": False, "--micro-batch": True}
"""Of `eval`: 0 stands for what the text of the option says."""

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_help_ends_with_two_examples(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ([], *([name] for name in COMMANDS)):
        out, err = command(*names, "--help")
        assert err == ""
        head, _, examples = out.partition("Examples:\n")
        assert head.startswith("Usage: offloadtrain")
        lines = examples.strip("\n").split("\n")
        assert len(lines) == 2 and all(line.strip().startswith("offloadtrain ") for line in lines)
    monkeypatch.setenv("COLUMNS", "500")
    out = command("eval", "--help").out
    defaults = [bool(re.search(f"{option} .*\\[default", out)) for option in DEFAULTS]
    assert defaults == list(DEFAULTS.values())
    (line,) = [row for row in command("train", "--help").out.splitlines() if "--resume STR" in row]
    assert "never: start" in line and "A run folder: resume it." in line, "no line is broken"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["ls"], ["--version"]])
def test_little_and_nothing_heavy_is_imported(arguments: list[str]) -> None:
    script = (
        "import sys; from offloadtrain.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'numpy', 'numba', 'textual', 'safetensors', 'pynvml', 'psutil'}; "
        "print(len(sys.modules), *(heavy & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    count, *heavy = done.stderr.split()
    assert heavy == [] and int(count) < MOST_MODULES


WRONG_USE = [
    (["trai"], 'Did you mean "train"'),
    (["train"], "JOB requires an argument"),
    (["train", "demo", "--sett", "a=1"], "Did you mean --set"),
    (["train", "demo", "--set"], "--set requires at least 1"),
    (["prepare", "--out", "a", "b"], "--out. Arguments are given without names: offloadtrain prep"),
    (["ctl", "--RUN=a"], "without names: offloadtrain ctl RUN ACTION MESSAGE"),
    (["nope"] * 9, 'Unknown command "nope"'),
    (["tui", "--screenshot", "a.svg", "--size", "wide"], "--size wide: give columns and lines"),
    (["train", "dmo"], "did you mean demo"),
    (["train", "absent.toml"], "absent.toml"),
    (["train", "demo", "--set", "optim.lrr=1"], "did you mean lr"),
    (["train", "demo", "--set", "train.steps=0"], "train.steps"),
    (["train", "demo", "--set", "train.steps"], "section.key=value"),
    (["cp", "dmo"], "did you mean demo"),
]


def test_wrong_use_is_2_and_reports_the_reason(command: Command) -> None:
    for arguments, message in WRONG_USE:
        out, err = command(*arguments, code=2)
        assert message in err and out == "" and "Traceback" not in err
        assert err.count("\n") == 1, "one problem"
    wrong = [sys.executable, "-m", "offloadtrain", "trai"]
    done = subprocess.run(wrong, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and 'Did you mean "train"' in done.stderr


def test_debug_shows_the_traceback(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["train", "dmo", "--debug"])
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("OFFLOADTRAIN_DEBUG", "1")
    main(["train", "dmo"])
    assert "Traceback" in capsys.readouterr().err


def test_version_names_the_kernels(command: Command) -> None:
    """Without a compiler they are others, of another speed."""
    from offloadtrain.runtime import kernels

    named = dict(line.split(maxsplit=1) for line in command("version").out.splitlines())
    assert named.keys() == {"offloadtrain", "python", "torch", "numba", "kernels"}
    assert named["kernels"].startswith(f"{kernels.backend().name} {kernels.backend().isa}")
