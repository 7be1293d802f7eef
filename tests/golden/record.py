"""Records the golden runs:

    git worktree add FOLDER 84537982      # and a .venv in it, as `make` builds it
    python -m tests.golden.record FOLDER [NAME ...]

trains each run of `RUNS` (or the named ones) with the program in FOLDER, stops it, and keeps its
folder as an archive; then lets the same program resume a copy, and read the folder with its other
commands, and records the results. "programs", "jobs" and "every_kind" are names too: programs that
save themselves with torch.save, job files in resolved form, and a log of records of every kind.
With no NAME all is recorded, and first the token files and the model that the runs read.

The archives are evidence of what that commit wrote. Record new ones of later commits next to them;
never replace them by what a later commit writes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from offloadtrain.config import toml
from tests.golden.digests import of_exported_folder, of_torch_file
from tests.golden.golden import machine_class
from tests.golden.runs import ARCHIVES, JOBS, RUNS, GoldenRun

HERE = Path(__file__).parent
PROMPT = "12 + 1 ="
_ANSWERS = {
    "eval": ["--data", "tokens/val.bin", "--json"],
    "generate": ["--prompt", PROMPT, "--max-tokens", "8", "--temperature", "0"],
}


def main(checkout: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    ARCHIVES.mkdir(exist_ok=True)
    python = checkout.resolve() / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        folder = Path(temporary)
        if names:
            with tarfile.open(ARCHIVES / "inputs.tar.xz") as file:
                file.extractall(folder, filter="data")
        else:
            write_inputs(python, folder)
            pack(folder, "inputs", ["tokens", "llama"])
        for name in names or (*RUNS, "programs", "jobs", "every_kind"):
            record(python, folder, name)


def record(python: Path, folder: Path, name: str) -> None:
    """Record a run, or one of the other archives."""
    if name == "every_kind":
        records = call(python, folder, str(HERE / "record_kinds.py"))
        (ARCHIVES / "every_kind.jsonl").write_text(records)
        return
    (folder / name).mkdir()
    if name == "programs":
        record_programs(python, folder / name)
    elif name == "jobs":
        record_jobs(python, folder)
    else:
        record_run(python, folder, name, RUNS[name])
    pack(folder, name, [name])


def write_inputs(python: Path, folder: Path) -> None:
    """Write token files, and a tiny Llama of transformers."""
    import transformers

    (folder / "text").mkdir()
    for number in range(6):
        sums = (f"{a} + {number} = {a + number}\n" for a in range(60))
        (folder / "text" / f"{number}.txt").write_text("".join(sums))
    arguments = ["prepare", "text", "tokens", "--val-fraction", "0.2", "--jobs", "1", "--quiet"]
    run_commands(python, folder, [command(arguments, folder / "prepared")])
    config = transformers.AutoConfig.for_model(
        "llama",
        **{"vocab_size": 257, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
        **{"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True},
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")


def record_run(python: Path, folder: Path, name: str, run: GoldenRun) -> None:
    """Train, stop and resume a run in `folder`, and write what the commands say of it."""
    target, answers = folder / name, folder / f"{name}.answers"
    answers.mkdir()
    (target / "job.toml").write_text(toml.emit(run.tables(name)))
    ranks = ["--nproc", str(run.ranks)] if run.ranks > 1 else []
    stop = f"{run.stop_after},{int(run.stop)}"
    start = ["train", f"{name}/job.toml", "--run-dir", f"{name}/run", *ranks]
    [code] = run_commands(python, folder, [command(start, answers / "start", stop=stop)])
    assert code == (75 if run.stop == 15 else -run.stop), f"{name} ended with {code}"
    for path in target.glob("run/**/lock"):
        path.unlink()
    facts = target / "run" / "run.json"
    facts.write_text(
        re.sub('"/sys/fs/cgroup/[^"]*"', '"/sys/fs/cgroup/memory.events"', facts.read_text())
    )
    shutil.copytree(target / "run", answers / "resumed")
    resumed = f"{name}.answers/resumed"
    commands = [
        command(["train", f"{resumed}/job.toml", "--resume", resumed, *ranks], answers / "resume")
    ]
    commands += [
        command([verb, f"{name}/run", *rest], answers / verb)
        for verb, rest in _ANSWERS.items()
        if run.evaluates and (verb == "eval" or run.exports)
    ]
    commands.append(command(["status", f"{name}/run", "--json"], answers / "status"))
    if run.converts:
        path = str(answers / "state.pt")
        commands.append(
            command(["convert", f"{name}/run", path, "--to", "torch"], answers / "convert")
        )
    if run.exports:
        path = str(answers / "exported")
        commands.append(
            command(["export", f"{name}/run", path, "--dtype", "fp32"], answers / "export")
        )
    for each, code in zip(commands, run_commands(python, folder, commands), strict=True):
        errors = Path(f"{each['output']}.err").read_text()
        allowed = (0, 1) if each["arguments"][0] == "status" else (0,)  # 1: the run has failed
        assert code in allowed, f"{each['arguments']} ended with {code}: {errors}"
    expected: dict[str, Any] = {
        "made_on": machine_class(),
        "resumed": resumed_steps(answers / "resumed" / "events" / "rank000.jsonl"),
        "status": json.loads((answers / "status").read_text()),
    }
    if run.evaluates:
        expected["eval"] = json.loads((answers / "eval").read_text())
    if run.evaluates and run.exports:
        expected["generate"] = (answers / "generate").read_text()
    if run.exports:
        expected["export"] = of_exported_folder(answers / "exported")
    if run.converts:
        expected["convert"] = of_torch_file(answers / "state.pt")
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def resumed_steps(log: Path) -> dict[str, Any]:
    """Return the exact figures of the last start in a log."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    start = max(n for n, record in enumerate(records) if record["k"] == "run_started")
    last = records[start:]
    keys = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens")
    return {
        "steps": [{key: record[key] for key in keys} for record in last if record["k"] == "step"],
        "val_losses": [record["val_loss"] for record in last if record["k"] == "eval"],
        "samples": [record["text"] for record in last if record["k"] == "sample"],
        "status": last[-1]["status"],
    }


def record_programs(python: Path, folder: Path) -> None:
    """Let a program of the public functions save itself, and record how it goes on."""
    call(python, folder, str(HERE / "program.py"), ".")
    losses = folder / "losses.json"
    values = {"made_on": machine_class(), "losses": json.loads(losses.read_text())}
    losses.write_text(json.dumps(values, indent=1) + "\n")


def record_jobs(python: Path, folder: Path) -> None:
    """Resolve the shipped jobs, those of the runs, and others that set what these leave out."""
    for path in (python.parents[2] / "offloadtrain" / "cli" / "jobs").glob("*.toml"):
        shutil.copy(path, folder / "jobs" / f"shipped_{path.name}")
    for name, run in (RUNS | JOBS).items():
        (folder / "jobs" / f"{name}.toml").write_text(toml.emit(run.tables(name)))
    call(python, folder, str(HERE / "resolve.py"), "jobs")


def command(arguments: list[str], output: Path, stop: str = "") -> dict[str, Any]:
    return {"arguments": arguments, "output": str(output), "stop": stop}


def run_commands(python: Path, folder: Path, commands: list[dict[str, Any]]) -> list[int]:
    """Run commands of the checkout in `folder`; return their exit codes."""
    (folder / "commands.json").write_text(json.dumps(commands))
    codes: list[int] = json.loads(call(python, folder, str(HERE / "commands.py"), "commands.json"))
    return codes


def call(python: Path, folder: Path, *arguments: str) -> str:
    """Run a program with the checkout's Python; return what it prints."""
    environ = {
        key: value for key, value in os.environ.items() if not re.match("OFFLOAD|PYTHON", key)
    }
    environ |= {
        "PYTHONPATH": str(HERE / "at_step"),
        "OFFLOADTRAIN_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def pack(folder: Path, name: str, members: list[str]) -> None:
    """Write an archive without owners and times."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(ARCHIVES / f"{name}.tar.xz", "w:xz", preset=9) as file:
        for member in members:
            file.add(folder / member, member, filter=anonymous)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
