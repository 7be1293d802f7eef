"""The commands of README, docs/pretrain.md, docs/resume.md and docs/fine_tune_8b.md are run in
their order, with tiny models; the figures of `plan` in these pages equal what it prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.toy import make_llama
from offloadtrain.cli.main import main
from offloadtrain.plan.search import largest
from offloadtrain.plan.search.largest import MODELS
from offloadtrain.train.trainer import Trainer
from tests.small_buffers import small_doctor

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PRETRAIN, RESUME, GUIDE = (
    (ROOT / "docs" / page).read_text() for page in ("pretrain.md", "resume.md", "fine_tune_8b.md")
)
GUIDE_MODEL = "models/llama-3.1-8b"
"""The folder of the 8B in docs/fine_tune_8b.md."""

Captured = pytest.CaptureFixture[str]
CELL = r" ([^|]*) \|"
PROGRAMS = ("make", "offloadtrain", "torchrun", "python", "pip", "hf")
NOT_RUN = {
    "make test",  # it runs this test
    "torchrun --nnodes 2 … -m offloadtrain train my.toml",  # two hosts
    "pip install -c constraints.txt torch && pip install -c constraints.txt -e '.[hf,data]'",
    f"hf download meta-llama/Llama-3.1-8B-Instruct --local-dir {GUIDE_MODEL}",
    *("python tune.py", "python ask.py"),  # tests/test_page_code.py
    "offloadtrain ctl runs/small stop",  # tests/train/test_control.py
}
TINY = [
    *("model.num_layers=1", "model.num_heads=2", "model.d_model=16", "model.max_seq_len=16"),
    *("data.seq_len=16", "optim.warmup_steps=0", "device.kind=cpu", "train.micro_batch=4"),
    *("train.eval_every=0", "train.checkpoint_every=1"),
    *("train.sample_tokens=0", "train.sample_prompt="),
]
"""Settings with which any job lasts a second."""


def blocks(page: str) -> list[list[str]]:
    """The blocks of command lines, without their comments."""
    indented = re.findall(r"\n\n((?:    .*\n)+)", page)
    lines = [[line.split("  # ")[0].strip() for line in block.splitlines()] for block in indented]
    return [block for block in lines if block[0].split()[0] in PROGRAMS]


def commands(page: str) -> list[str]:
    return [command for block in blocks(page) for command in block if command not in NOT_RUN]


def small(command: str, steps: int = 0) -> list[str]:
    """The arguments of a command line, with what makes it end soon appended."""
    _, verb, *arguments = shlex.split(command)
    if verb == "train" and "--dry-run" not in arguments:
        arguments += ["--set", *TINY, f"train.steps={steps}"]
        if "resolved.toml" not in command:
            arguments += ["train.global_batch_tokens=128"]
    extra = {"tui": "--once", "doctor": "--quick"}.get(verb, "")
    return [verb, *arguments, *([extra] if extra and extra not in arguments else [])]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the texts that a reader has."""
    (tmp_path / "my_texts").mkdir()
    for i in range(40):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"It was text number {i}. " * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_jobs(block: list[str], capfd: Captured) -> None:
    """In the order of the README; the second training resumes the first."""
    for number, command in enumerate(block):
        assert main(small(command, steps=2 + number)) == 0, command
    out, err = capfd.readouterr()
    assert "gpt2_124m" in out and "resuming after step 5" in err
    assert [path.name for path in Path("data").glob("*.bin")]


def run_watching(block: list[str], capfd: Captured) -> None:
    """The last command sends a request to a run while it trains."""
    train = "offloadtrain train my.toml --set data.source=my_texts"
    assert main(["cp", "gpt2_124m", "my.toml"]) == 0
    assert main(small(train, 2)) == 0
    *looking, requesting = block
    for command in looking:
        assert main(small(command)) == 0, command
    assert '"step": 2' in capfd.readouterr().out
    codes: list[int] = []
    original = Trainer._between_steps

    def between_steps(self: Trainer) -> None:
        original(self)
        if not codes:
            codes.append(main([*small(requesting), "--wait", "0"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_between_steps", between_steps)
        assert main(small(train, 4)) == 0
    assert codes == [0] and "request: checkpoint done" in capfd.readouterr().err


def run_ranks(block: list[str], capfd: Captured) -> None:
    assert main(["cp", "gpt2_124m", "my.toml"]) == 0
    Path("my_texts").rename("corpus")  # the job's own source
    assert main(small(block[0], 2)) == 0
    assert "4 ranks share" in capfd.readouterr().err


def run_demo(_: list[str], capfd: Captured) -> None:
    """The command of the Makefile's target, on a few texts instead of the standard library."""
    recipe = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    (command,) = re.findall(r"offloadtrain train demo", recipe)
    assert main([*small(command, 2), "data.source=my_texts"]) == 0
    assert "training loss by step" in capfd.readouterr().err


def run_as_written(block: list[str], capfd: Captured) -> None:
    """A job may be too large for this machine: exit code 4."""
    with pytest.MonkeyPatch.context() as patch:
        small_doctor(patch)
        patch.setattr(largest, "MODELS", {"gpt2-124m": MODELS["gpt2-124m"]})
        for line in block:
            for command in line.split(" && "):
                allowed = (0, 4) if "--dry-run" in command else (0,)
                assert main(small(command)) in allowed, command
    assert capfd.readouterr().out


DRY_RUN = "offloadtrain cp gpt_13b_32gb && offloadtrain train gpt_13b_32gb.toml --dry-run"
RUNNERS: dict[str, Callable[[list[str], Captured], None]] = {
    "make demo": run_demo,
    "offloadtrain train my.toml --nproc 4 --max-restarts 3": run_ranks,
    "offloadtrain ls": run_jobs,
    "offloadtrain tui": run_watching,
    "offloadtrain plan gpt_13b_v100 --machine v100_32gb": run_as_written,
    DRY_RUN: run_as_written,
}
"""What runs a block of the README, by the first line of the block."""
SLOW = ("offloadtrain train my.toml --nproc 4 --max-restarts 3", DRY_RUN)


def test_every_block_of_the_readme_is_run() -> None:
    assert [block[0] for block in blocks(README) if block[0] not in RUNNERS] == []


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.slow] if first in SLOW else []) for first in RUNNERS],
)
def test_the_commands_of_a_block_of_the_readme(first: str, texts: Path, capfd: Captured) -> None:
    (block,) = [block for block in blocks(README) if block[0] == first]
    RUNNERS[first]([command for command in block if command not in NOT_RUN], capfd)


@pytest.mark.slow
def test_a_model_is_pretrained_and_its_run_resumed(texts: Path, capsys: Captured) -> None:
    """By the commands of docs/pretrain.md, then by those of docs/resume.md."""
    (job,) = re.findall(r"```toml\n(.*?)```", PRETRAIN, re.DOTALL)
    Path("small.toml").write_text(job)
    for command in commands(PRETRAIN):
        assert main(small(command, 2)) == 0, command
    assert Path("small_model/config.json").exists()
    out = capsys.readouterr().out
    assert "GiB" in out and "perplexity" in out and out.count("It was") >= 2
    train, longer, *listing = commands(RESUME)
    assert main(small(train, 2)) == 0
    assert "resuming" not in capsys.readouterr().err
    assert main(small(train, 2)) == main(small(longer, 4)) == 0
    err = capsys.readouterr().err
    assert "resuming after step 2" in err
    lines = re.findall(r"The run: (\d+) steps.*\nrun: (.*)", err)
    assert [steps for steps, run in lines if "resuming" in run] == ["0", "2"], lines
    for command in listing:
        assert main(small(command)) == 0, command
    assert "small" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # without a GPU
def test_the_job_of_the_guide(texts: Path, capsys: Captured) -> None:
    """With a tiny model, shorter sequences and fewer steps at a higher rate."""
    (chats,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    (job,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    # Equal conversations would all be trained on, or all be held out.
    Path("chats.jsonl").write_text("".join(chats.replace("?", f"?{n * ' '}") for n in range(40)))
    Path("chats.toml").write_text(job)
    make_llama(GUIDE_MODEL)
    tiny = ["--set", "data.seq_len=64", "train.steps=60", "optim.lr=0.01"]
    plan, *rest = commands(GUIDE)
    assert "examples/llama_8b_24gb.toml" in plan
    for command in rest:
        verb, *arguments = shlex.split(command)[1:]
        capsys.readouterr()
        assert main([verb, *arguments, *(tiny if verb == "train" else [])]) == 0, command
    # Both answers of the page are learned by heart.
    assert capsys.readouterr().out == "On the CPU.\n"


@pytest.mark.slow
def test_the_figures_of_the_guide_are_what_plan_prints(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    plan = shlex.split(commands(GUIDE)[0])[1:]
    rows = re.findall(rf"^\| `(\w+)` \|{3 * CELL}$", GUIDE, re.MULTILINE)
    assert [state for state, *_ in rows] == ["int8", "split16", "fp32"]
    for state, host, device, seconds in rows:
        assert main([*plan, "--set", f"offload.state={state}"]) == (0 if state == "int8" else 4)
        printed = capsys.readouterr().out
        assert f"step {host}" in printed and f"device: {device} of" in printed
        assert f"step: {seconds}, of which" in printed
    variants = re.findall(r"([\d.]+) GiB with\s+`(--set [^`]*)`", GUIDE)
    assert len(variants) == 2
    for host, settings in variants:
        main([*plan, *settings.split()])
        assert f"step {host} GiB" in capsys.readouterr().out


def test_the_figures_of_the_readme_are_what_plan_prints(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = re.findall(rf"^\| `(\w+)` \| `(\w+)` \|{4 * CELL}$", README, re.MULTILINE)
    assert len(rows) == 5
    for job, machine, params, device, host, rate in rows:
        assert main(["plan", job, "--machine", machine]) == 0
        printed = capsys.readouterr().out
        assert f"{params} parameters" in printed, job
        assert f"device: {device} of" in printed, job
        assert f"init {host}" in printed or f"step {host}" in printed, job
        assert f"{rate} tokens/s" in printed, job
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(commands(GUIDE)[0])[1:]) == 0
    printed = capsys.readouterr().out
    sizes = r"([\d.]+ GiB) on the device, ([\d.]+ GiB) on the host\s+[^,]*, ([\d.]+k tokens/s)"
    device, host, rate = re.findall(sizes, README)[0]
    assert f"device: {device} of" in printed and f"step {host}" in printed and rate in printed


def test_a_missing_source_is_reported_with_the_keys_to_set(texts: Path, capfd: Captured) -> None:
    """The shipped job names a folder that a reader may not have."""
    assert main(["cp", "gpt2_124m", "my.toml"]) == 0
    assert main(small("offloadtrain train my.toml", 2)) == 2
    err = capfd.readouterr().err
    assert "data.source = corpus is not there" in err
    assert "--set data.train=data/train.bin data.val=data/val.bin" in err


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("py", "h", "cpp", "md", "svg", "tcss", "toml")
BASES = ("", "offloadtrain", "tui/offloadtrain_tui", "docs", "tests")
"""A page may leave these out in front of a path."""


def missing_paths(text: str) -> list[str]:
    """Return the files of code and the folders that a page names and that do not exist; a bare name
    may be a file of any folder."""
    missing = []
    tests = re.findall(r"(?<![\w/])((?:\w+/)+test_\w+\.py)", text)
    for path in re.findall(r"`([\w./-]+)`", text) + re.findall(r" (tests/[\w/.]+)", text) + tests:
        folder = path.endswith("/") and (ROOT / path.split("/")[0]).is_dir()
        is_job = "/" not in path and path.endswith(".toml")  # perhaps a reader's
        if is_job or (not folder and path.rpartition(".")[2] not in CODE):
            continue
        bare = "/" not in path and any(ROOT.glob(f"[!.]*/**/{path}"))
        if not (bare or any((ROOT / base / path).exists() for base in BASES)):
            missing.append(path)
    return missing


def test_every_path_that_a_page_names_exists() -> None:
    missing = {page.name: missing_paths(page.read_text()) for page in PAGES}
    assert {page: paths for page, paths in missing.items() if paths} == {}
    text = "`a.b` `step/layout/formats.py` `step/gone.py` `tests/gone/` `control/` tests/gone.py "
    gone = ["step/gone.py", "tests/gone/", "tests/gone.py", "step/test_gone.py"]
    assert missing_paths(f"{text} T`step/test_gone.py") == gone
