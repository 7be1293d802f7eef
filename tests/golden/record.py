"""Records the golden runs of the commit that is checked out:

    python -m tests.golden.record [NAME ...]

trains each run of `RUNS` (or the named ones), stops it, and keeps its folder as an archive; then
resumes a copy, reads the folder with the other commands, and records the results. "programs",
"jobs" and "every_kind" are names too: programs that save themselves with torch.save, job files in
resolved form, and a log of records of every kind. With no NAME all is recorded, and first the token
files and the model that the runs read.

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
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from offloadtrain.cli.commands.jobs import shipped_jobs
from offloadtrain.config import job as jobs
from offloadtrain.config import toml
from offloadtrain.events import log_lines, schema
from tests.golden import program
from tests.golden.digests import of_exported_folder, of_torch_file
from tests.golden.golden import machine_class
from tests.golden.runs import ARCHIVES, JOBS, RUNS, GoldenRun

HERE = Path(__file__).parent
PROMPT = "12 + 1 ="
_ANSWERS = {
    "eval": ["--data", "tokens/val.bin", "--json"],
    "generate": ["--prompt", PROMPT, "--max-tokens", "8", "--temperature", "0"],
}
_NUMBERS = count(1)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        os.chdir(folder)
        if names:
            with tarfile.open(ARCHIVES / "inputs.tar.xz") as file:
                file.extractall(filter="data")
        else:
            write_inputs()
            pack("inputs", ["tokens", "llama"])
        for name in names or (*RUNS, "programs", "jobs", "every_kind"):
            record(name)


def record(name: str) -> None:
    """Record a run, or one of the other archives."""
    if name == "every_kind":
        lines = [
            log_lines.to_line(filled(kind), number, 1_795_000_000.5 + number, number)
            for number, kind in enumerate(schema.KINDS.values(), start=1)
        ]
        (ARCHIVES / "every_kind.jsonl").write_bytes(b"".join(lines))
        return
    Path(name).mkdir()
    if name == "programs":
        losses = {case: program.save(Path(name), case) for case in program.CASES}
        write_json(Path(name, "losses.json"), {"made_on": machine_class(), "losses": losses})
    elif name == "jobs":
        texts = {f"shipped_{job}": path.read_text() for job, path in shipped_jobs().items()}
        texts |= {job: toml.emit(run.tables(job)) for job, run in (RUNS | JOBS).items()}
        for job, text in texts.items():
            Path(name, f"{job}.toml").write_text(text)
            resolved = jobs.dump(jobs.load(Path(name, f"{job}.toml")))
            Path(name, f"{job}.resolved.toml").write_text(resolved)
    else:
        record_run(name, RUNS[name])
    pack(name, [name])


def write_inputs() -> None:
    """Write token files, and a tiny Llama of transformers."""
    import transformers

    Path("text").mkdir()
    for number in range(6):
        sums = (f"{a} + {number} = {a + number}\n" for a in range(60))
        Path("text", f"{number}.txt").write_text("".join(sums))
    call("prepare", "text", "tokens", "--val-fraction", "0.2", "--jobs", "1", "--quiet")
    config = transformers.AutoConfig.for_model(
        "llama",
        **{"vocab_size": 257, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
        **{"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True},
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("llama")


def record_run(name: str, run: GoldenRun) -> None:
    """Train, stop and resume a run, and write what the commands say of it."""
    target, folder, resumed = Path(name), f"{name}/run", f"{name}.resumed"
    (target / "job.toml").write_text(toml.emit(run.tables(name)))
    ranks = ["--nproc", str(run.ranks)] if run.ranks > 1 else []
    code = 75 if run.stop == 15 else -run.stop
    stop = f"{run.stop_after},{int(run.stop)}"
    call("train", f"{name}/job.toml", "--run-dir", folder, *ranks, codes=(code,), stop=stop)
    for path in target.glob("run/**/lock"):
        path.unlink()
    facts = target / "run" / "run.json"
    text = re.sub('"/sys/fs/cgroup/[^"]*"', '"/sys/fs/cgroup/memory.events"', facts.read_text())
    facts.write_text(text)
    shutil.copytree(folder, resumed)
    call("train", f"{resumed}/job.toml", "--resume", resumed, *ranks)
    # Its exit code is 1 where the run has failed.
    status = json.loads(call("status", folder, "--json", codes=(0, 1)))
    expected: dict[str, Any] = {
        "made_on": machine_class(),
        "resumed": resumed_steps(Path(resumed, "events", "rank000.jsonl")),
        "status": status,
    }
    if run.evaluates:
        expected["eval"] = json.loads(call("eval", folder, *_ANSWERS["eval"]))
    if run.evaluates and run.exports:
        expected["generate"] = call("generate", folder, *_ANSWERS["generate"])
    if run.exports:
        call("export", folder, f"{name}.exported", "--dtype", "fp32")
        expected["export"] = of_exported_folder(Path(f"{name}.exported"))
    if run.converts:
        call("convert", folder, f"{name}.pt", "--to", "torch")
        expected["convert"] = of_torch_file(Path(f"{name}.pt"))
    write_json(target / "expected.json", expected)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


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


def value_of(kind: Any) -> Any:
    """Return a value of this type that no other call returns."""
    number = next(_NUMBERS)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return value_of(next(of for of in arguments if of is not NoneType))
    if origin is tuple:
        return (value_of(arguments[0]), value_of(arguments[0]))
    if origin is dict:
        return {f"key {number}": 1 if arguments[1] is Any else value_of(arguments[1])}
    if is_dataclass(kind):
        return filled(kind)
    values = {bool: True, int: number, float: number + 0.5, str: f"text {number}"}
    return values[kind]


def filled(kind: Any) -> Any:
    """Return an instance of a dataclass."""
    kinds = get_type_hints(kind)
    return kind(**{field.name: value_of(kinds[field.name]) for field in fields(kind)})


def call(*arguments: str, codes: tuple[int, ...] = (0,), stop: str = "") -> str:
    """Run a command of offloadtrain; return what it prints.

    Args:
        stop: "STEP,SIGNAL", for `at_step/sitecustomize.py`.
    """
    checkout = HERE.parents[1]
    paths = [HERE / "at_step", checkout, checkout / "tui"]
    environ = {key: value for key, value in os.environ.items() if not re.match("OFFLOAD", key)}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OFFLOADTRAIN_CACHE": "cache"}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environ |= {"GOLDEN_STOP": stop} if stop else {}
    command = [sys.executable, "-m", "offloadtrain", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode in codes, f"{arguments} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def pack(name: str, members: list[str]) -> None:
    """Write an archive without owners and times."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(ARCHIVES / f"{name}.tar.xz", "w:xz", preset=9) as file:
        for member in members:
            file.add(member, filter=anonymous)


if __name__ == "__main__":
    main(sys.argv[1:])
