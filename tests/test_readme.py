"""What the README tells is run, and its table is what the command prints."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.cli.main import main
from offloadtrain.engine import ModelError
from offloadtrain.plan.search import largest
from offloadtrain.plan.search.largest import MODELS
from offloadtrain.train.trainer import Trainer
from tests.small_buffers import small_doctor

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

Captured = pytest.CaptureFixture[str]


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/loop.md"])
def test_the_python_snippet_trains(page: str) -> None:
    snippet = snippets(page)[0]
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


def test_groups_of_options_are_the_same_as_their_flat_names() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    code, expression = snippets("docs/loop.md")[1].rsplit("config.replace", 1)
    names: dict[str, Any] = {"ot": ot, "model": model}
    exec(code, names)
    flat = re.search(r"the same as: (.*)", code)
    assert flat is not None
    assert names["optimizer"].config == eval(f"ot.OffloadConfig({flat[1]})", names)
    call, _, printed = expression.partition("#")
    assert eval(f"config.replace{call}", names) == eval(printed.strip())
    names["optimizer"].close()


@pytest.mark.parametrize("working", ["device", "host"])
def test_weights_changed_in_the_loop_are_the_masters(working: str) -> None:
    changing, told = snippets("docs/loop.md")[2].rsplit("optimizer.adopt", 1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    options: dict[str, Any] = {"device": "cpu", "precision": "fp32", "working": working}
    optimizer = ot.offload(model, ot.AdamW(lr=0.1), **options)
    names = {"optimizer": optimizer, "torch": torch, "model": model}
    for _ in range(2):
        optimizer.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        before = dict(optimizer.master_weights())
        exec(f"{changing}optimizer.adopt{told}", names)
        for name, master in optimizer.master_weights():
            assert torch.equal(master, before[name].clamp(-0.1, 0.1))
    exec(changing, names)
    optimizer.backward(model(torch.randn(4, 8)).square().mean())
    with pytest.raises(ModelError, match="written in place"):
        optimizer.step()


def test_the_table_of_jobs_is_what_plan_prints(capsys: Captured) -> None:
    cell = r" ([^|]*) \|"
    rows = re.findall(rf"^\| `(\w+)` \| `(\w+)` \|{4 * cell}$", README, re.MULTILINE)
    assert len(rows) == 5
    for job, machine, params, device, host, rate in rows:
        assert main(["plan", job, "--machine", machine]) == 0
        printed = capsys.readouterr().out
        assert f"{params} parameters" in printed, job
        assert f"device: {device} of" in printed, job
        assert f"init {host}" in printed or f"step {host}" in printed, job
        assert f"{rate} tokens/s" in printed, job


def blocks(page: str = README) -> list[list[str]]:
    """The blocks of command lines, without their comments; drawings are none."""
    found = re.findall(r"\n\n((?:    .*\n)+)", page)
    lines = [[line.split("  # ")[0].strip() for line in block.splitlines()] for block in found]
    return [block for block in lines if block[0].split()[0] in PROGRAMS]


PROGRAMS = ("make", "offloadtrain", "torchrun", "python", "pip")

NOT_RUN = {
    "make test": "it runs this test",
    "torchrun --nnodes 2 … -m offloadtrain train my.toml": "needs two hosts; tests/distributed "
    "starts ranks of one host with torchrun",
}

TINY = [
    "model.num_layers=1",
    "model.num_heads=2",
    "model.d_model=16",
    "data.seq_len=16",
    "model.max_seq_len=16",
    "optim.warmup_steps=0",
    "device.kind=cpu",
    "train.micro_batch=4",
    "train.eval_every=0",
    "train.checkpoint_every=1",
    "train.sample_tokens=0",
    "train.sample_prompt=",
]
"""Of any job, what makes it last a second."""


def small(command: str, steps: int) -> list[str]:
    """The arguments of a command line of the README, with what makes it end soon appended."""
    _, verb, *arguments = shlex.split(command)
    if verb == "train" and "--dry-run" not in arguments:
        arguments += ["--set", *TINY, f"train.steps={steps}"]
        if "resolved.toml" not in command:
            arguments += ["train.global_batch_tokens=128"]
    if verb == "tui":
        arguments += ["--once"]
    if verb == "doctor":
        arguments += ["--quick"]
    return [verb, *arguments]


def test_every_command_of_the_readme_is_run_or_says_why_not() -> None:
    commands = {command for block in blocks() for command in block}
    assert commands == RUN.keys() | NOT_RUN.keys()


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in that holds what a reader is taken to have."""
    (tmp_path / "my_texts").mkdir()
    for i in range(40):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"text number {i}. " * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*, steps: int = 2) -> None:
    """What the Jobs block does before the blocks that watch and go on."""
    assert main(["cp", "gpt2_124m", "my.toml"]) == 0
    with_data = "offloadtrain train my.toml --set data.source=my_texts"
    assert main(small(with_data, steps)) == 0


def run_jobs(block: list[str], capfd: Captured) -> None:
    """In the order of the README; the second training goes on from the first."""
    for number, command in enumerate(block):
        assert main(small(command, steps=2 + number)) == 0, command
    told = capfd.readouterr()
    assert "gpt2_124m" in told.out and "resuming after step 5" in told.err
    assert [path.name for path in Path("data").glob("*.bin")]


def run_watching(block: list[str], capfd: Captured) -> None:
    """The last asks a run that is under way."""
    trained()
    *looking, asking = block
    for command in looking:
        assert main(small(command, 0)) == 0, command
    assert '"step": 2' in capfd.readouterr().out
    asked: list[int] = []
    real = Trainer._between_steps

    def between_steps(self: Trainer) -> None:
        real(self)
        if not asked:
            asked.append(main([*small(asking, 0), "--wait", "0"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_between_steps", between_steps)
        trained_again = "offloadtrain train my.toml --set data.source=my_texts"
        assert main(small(trained_again, 4)) == 0
    assert asked == [0] and "request: checkpoint done" in capfd.readouterr().err


def run_ranks(block: list[str], capfd: Captured) -> None:
    """The job is one whose texts are there."""
    assert main(["cp", "gpt2_124m", "my.toml"]) == 0
    Path("my_texts").rename("corpus")
    assert main(small(block[0], 2)) == 0
    assert "4 ranks share" in capfd.readouterr().err


def run_demo(block: list[str], capfd: Captured) -> None:
    """What the target calls, on a little text of one's own in place of the standard library."""
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    (command,) = re.findall(r"offloadtrain train demo", recipe)
    assert main([*small(command, 2), "data.source=my_texts"]) == 0
    assert "training loss by step" in capfd.readouterr().err


def run_as_written(block: list[str], capfd: Captured) -> None:
    """A job or a machine may be too large or too small here, which is said: exit code 4."""
    with pytest.MonkeyPatch.context() as patch:
        small_doctor(patch)
        few = {"gpt2-124m": MODELS["gpt2-124m"]}  # all: tests/cli/test_plan.py
        patch.setattr(largest, "MODELS", few)
        _as_written(block)
    told = capfd.readouterr()
    assert told.out


def _as_written(block: list[str]) -> None:
    for line in block:
        for command in line.split(" && "):
            allowed = (0, 4) if "--dry-run" in command else (0,)
            assert main(small(command, 0)) in allowed, command


HOW: list[tuple[str, Callable[[list[str], Captured], None]]] = [
    ("make demo", run_demo),
    ("offloadtrain train my.toml --nproc 4 --max-restarts 3", run_ranks),
    ("offloadtrain ls", run_jobs),
    ("offloadtrain tui", run_watching),
    ("offloadtrain plan gpt_13b_v100 --machine v100_32gb", run_as_written),
    (
        "offloadtrain cp gpt_13b_32gb && offloadtrain train gpt_13b_32gb.toml --dry-run",
        run_as_written,
    ),
]
"""The first line of a block, and what runs it."""

RUN = {
    command: how
    for block in blocks()
    for first, how in HOW
    if block[0] == first
    for command in block
    if command not in NOT_RUN
}


def slow(case: tuple[str, object]) -> bool:
    """It starts ranks, or proves the schedule of a model of 13B."""
    return case[1] is run_ranks or "--dry-run" in case[0]


@pytest.mark.parametrize(
    ("first", "how"),
    [pytest.param(*case, marks=[pytest.mark.slow] if slow(case) else []) for case in HOW],
    ids=[how.__name__ for _, how in HOW],
)
def test_the_commands_of_a_block(
    first: str, how: Callable[[list[str], Captured], None], texts: Path, capfd: Captured
) -> None:
    (block,) = [block for block in blocks() if block[0] == first]
    how([command for command in block if command not in NOT_RUN], capfd)


def test_a_source_that_is_not_there_says_what_to_set(texts: Path, capfd: Captured) -> None:
    """The shipped job names a folder that a reader may not have."""
    assert main(["cp", "gpt2_124m", "my.toml"]) == 0
    assert main(small("offloadtrain train my.toml", 2)) == 1
    told = capfd.readouterr().err
    assert "data.source = corpus is not there" in told
    assert "--set data.train=data/train.bin data.val=data/val.bin" in told


def test_every_claim_names_tests_that_exist() -> None:
    proofs = (ROOT / "docs/proofs.md").read_text()
    named = [path for line in proofs.splitlines() for path in re.findall(r" (tests/[\w/.]+)", line)]
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_read_in_minutes() -> None:
    assert len(README.splitlines()) <= 165


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("py", "h", "cpp", "md", "svg", "tcss")
WITHIN = ("", "offloadtrain", "tui/offloadtrain_tui", "docs", "tests")
"""A page may leave these out in front of a path."""


def missing_paths(text: str) -> list[str]:
    """What a page names between backticks as a file of code or a folder here, and is not there; a
    bare name may be a file of any folder."""
    missing = []
    for path in re.findall(r"`([\w./-]+)`", text):
        folder = path.endswith("/") and (ROOT / path.split("/")[0]).is_dir()
        if not folder and path.rpartition(".")[2] not in CODE:
            continue
        bare = "/" not in path and any(ROOT.glob(f"[!.]*/**/{path}"))
        if not (bare or any((ROOT / base / path).exists() for base in WITHIN)):
            missing.append(path)
    return missing


def test_every_path_that_a_page_names_exists() -> None:
    missing = {page.name: missing_paths(page.read_text()) for page in PAGES}
    assert {page: paths for page, paths in missing.items() if paths} == {}


def test_the_check_of_paths_sees_what_is_not_there() -> None:
    text = "`a.b` `step/layout/formats.py` `step/gone.py` `tests/gone/` `control/` `my.toml`"
    assert missing_paths(text) == ["step/gone.py", "tests/gone/"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_the_commands() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for target in ("demo", "test", "lint", "bench", "sanitize"):
        assert f"make {target}" in listed
