"""`offloadtrain convert`: the same bits as the plain loop that goes on, and back."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.convert import torch_export
from offloadtrain.data.batches import Batches
from offloadtrain.hardware import atomic_io
from offloadtrain.integrations.export import CHECKSUMS
from offloadtrain.model.language_model import OwnModel
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.train.build import open_tokens
from offloadtrain.train.checkpoint.restore import saved_state
from offloadtrain.train.losses import loss_of
from offloadtrain.train.trained_model import open_saved
from tests.convert.foreign_sources import save_dcp, save_torch, save_zero, state_of
from tests.train.small_job import run, small_job, tensor_hashes
from tests.train.test_hf_jobs import LORA, hf_job_of

BEFORE, AFTER = 3, 6
PLAIN = (
    "model.dropout=0",
    "offload.precision=fp32",
    "offload.clip_norm=0",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "device.threads=1",
    "train.grad_accum_steps=1",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    f"train.steps={AFTER}",
)

pytestmark = pytest.mark.slow


class PlainLoop:
    """Plain torch: the job's model and batches, fused AdamW, no code of the engine."""

    def __init__(self, job: Config) -> None:
        torch.set_num_threads(1)
        self.model = Transformer(job.model)
        optim = job.optim
        self.adam = torch.optim.AdamW(
            decay_groups(self.model, job),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        tokens, _ = open_tokens(job)
        seq_len, batch = job.data.seq_len, job.train.micro_batch
        self.batches = Batches(tokens, batch=batch, seq_len=seq_len, seed=job.train.seed)
        self._divisor = None if self.batches.all_count else 1.0

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss_of(OwnModel(self.model), self.batches.next(), self._divisor).backward()
            self.adam.step()
            self.adam.zero_grad()

    def state(self) -> dict[str, dict[str, Tensor]]:
        return state_of(self.model, self.adam)


def state_in(run: Path) -> dict[str, dict[str, Tensor]]:
    saved = open_saved(run)
    return dict(saved_state(saved.checkpoint, update_rule(saved.job.optim)))


def assert_same(state: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> None:
    assert state.keys() == wanted.keys() and len(state) > 5
    for name, tensors in wanted.items():
        assert tensors.keys() == state[name].keys() and len(tensors) == 3
        for kind, value in tensors.items():
            assert torch.equal(state[name][kind], value), (name, kind)


def copied(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {n: {k: value.clone() for k, value in of.items()} for n, of in state.items()}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Reference:
    """A plain loop, its state after some steps in every layout, and its state at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = small_job(folder, *PLAIN)
        (folder / "job.toml").write_text(jobs.dump(self.job))
        torch.manual_seed(5)
        loop = PlainLoop(self.job)
        loop.steps(BEFORE)
        model, adam = loop.model, loop.adam
        self.sources = {
            "torch": save_torch(folder / "both.pt", model, adam, step=BEFORE),
            "dcp": save_dcp(folder / "dcp", model, adam, flat=False),
            "zero 2": save_zero(folder / "z2" / "step", model, adam, stage=2, ranks=2),
            "zero 3": save_zero(folder / "z3" / "step", model, adam, stage=3, ranks=4),
        }
        self.before = copied(loop.state())
        loop.steps(AFTER - BEFORE)
        self.after = copied(loop.state())

    def convert(self, source: str, out: Path, *more: str) -> int:
        path, job = str(self.sources[source]), str(self.folder / "job.toml")
        return main(["convert", path, "--job", job, "--run", str(out), *more])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    before = torch.get_num_threads()
    reference = Reference(tmp_path_factory.mktemp("plain"))
    torch.set_num_threads(before)
    return reference


@pytest.mark.parametrize("source", ["torch", "dcp", "zero 3"])
def test_a_converted_run_goes_on_as_the_plain_loop(
    plain: Reference, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plain.convert(source, tmp_path / "run") == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'run'}\n" and f"step {BEFORE} of " in output.err
    assert_same(state_in(tmp_path / "run"), plain.before)
    assert run(plain.job, tmp_path / "run", resume=str(tmp_path / "run")) == 0
    assert_same(state_in(tmp_path / "run"), plain.after)


def test_our_run_goes_on_in_a_plain_loop(
    plain: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the way there and back changes no byte of the checkpoint's tensors."""
    content = exported(replace(plain.job, train=replace(plain.job.train, steps=BEFORE)), tmp_path)
    loop = PlainLoop(plain.job)
    loop.model.load_state_dict(content["model"])
    loop.adam.load_state_dict(content["optimizer"])
    loop.batches.skip(content["step"])
    loop.steps(AFTER - BEFORE)
    assert run(plain.job, tmp_path / "run", resume=str(tmp_path / "run")) == 0
    assert_same(state_in(tmp_path / "run"), loop.state())
    job = ["--job", str(plain.folder / "job.toml"), "--run", str(tmp_path / "b")]
    assert main(["convert", str(tmp_path / "a.pt"), *job]) == 0
    assert tensor_hashes(tmp_path / "b", BEFORE) == tensor_hashes(tmp_path / "run", BEFORE)
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "b.pt"), "--to", "torch"]) == 0
    digest = hashlib.sha256((tmp_path / "b.pt").read_bytes()).hexdigest()
    assert f"SHA-256 of b.pt: {digest}\n" in capsys.readouterr().err
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_our_run_goes_on_under_distributed_checkpoint(plain: Reference, tmp_path: Path) -> None:
    """Read by torch into a new model and AdamW, as FSDP's users do; and back into a run."""
    few = replace(plain.job, train=replace(plain.job.train, steps=BEFORE))
    assert run(few, tmp_path / "run") == 0
    folder, job = tmp_path / "dcp", str(plain.folder / "job.toml")
    assert main(["convert", str(tmp_path / "run"), str(folder), "--to", "dcp"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "run"]
    check = ["sha256sum", "--check", "--strict", "--quiet", CHECKSUMS]
    assert subprocess.run(check, cwd=folder).returncode == 0
    assert len((folder / CHECKSUMS).read_text().splitlines()) == len([*folder.iterdir()]) - 1
    loop = PlainLoop(plain.job)
    weights, adam = get_state_dict(loop.model, loop.adam)
    tree: dict[str, Any] = {"model": weights, "optim": adam, "step": 0}
    with warnings.catch_warnings(action="ignore"):  # one process is what is meant
        dcp.load(tree, checkpoint_id=folder, no_dist=True)
    set_state_dict(loop.model, loop.adam, model_state_dict=weights, optim_state_dict=adam)
    loop.batches.skip(tree["step"])
    loop.steps(AFTER - BEFORE)
    assert run(plain.job, tmp_path / "run", resume=str(tmp_path / "run")) == 0
    assert_same(state_in(tmp_path / "run"), loop.state())
    assert main(["convert", str(folder), "--job", job, "--run", str(tmp_path / "back")]) == 0
    assert tensor_hashes(tmp_path / "back", BEFORE) == tensor_hashes(tmp_path / "run", BEFORE)


def exported(job: Config, folder: Path) -> dict[str, Any]:
    """Train a job in the folder's run; return the file of torch that it is converted to."""
    assert run(job, folder / "run") == 0
    assert main(["convert", str(folder / "run"), str(folder / "a.pt"), "--to", "torch"]) == 0
    content: dict[str, Any] = torch.load(folder / "a.pt", weights_only=True)
    return content


@pytest.mark.parametrize(
    ("name", "overrides"), [("qwen3", ()), ("llama", (LORA,))], ids=["tied", "adapters"]
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_of_transformers_goes_there_and_back(
    tmp_path: Path, name: str, overrides: tuple[str, ...]
) -> None:
    """Tied weights, and frozen ones that are in no group of the optimizer."""
    job = hf_job_of(tmp_path, name, "train.eval_every=0", "train.checkpoint_every=0", *overrides)
    exported(replace(job, train=replace(job.train, steps=2)), tmp_path)
    (tmp_path / "job.toml").write_text(jobs.dump(job))
    source, to = str(tmp_path / "a.pt"), str(tmp_path / "back")
    assert main(["convert", source, "--job", str(tmp_path / "job.toml"), "--run", to]) == 0
    assert tensor_hashes(tmp_path / "back", 2) == tensor_hashes(tmp_path / "run", 2)


REFUSED: dict[str, tuple[tuple[str, ...], int]] = {
    "train.steps = 3: raise train.steps": (("--set", f"train.steps={BEFORE}"), 2),
    'optim.name = "lion" keeps other state': (("--set", "optim.name=lion"), 2),
    'set optim.name = "adamw"': (("--set", "optim.name=adam"), 2),
    "has the shape": (("--set", "model.d_model=64"), 2),
    "lacks 'blocks.": (("--set", "model.num_layers=7"), 2),
}


def test_what_does_not_fit_makes_nothing(
    plain: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for message, (more, code) in REFUSED.items():
        assert plain.convert("torch", tmp_path / "run", *more) == code
        output = capsys.readouterr()
        assert message in output.err and output.out == ""
        assert list(tmp_path.iterdir()) == []


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_nothing(
    plain: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "write_file", full)
        assert plain.convert("torch", tmp_path / "run") == 1
    assert "No space left" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
    assert plain.convert("torch", tmp_path / "run") == 0
    capsys.readouterr()
    for at in ("os.posix_fallocate", "os.rename"):
        with monkeypatch.context() as patch:
            patch.setattr(torch_export.os, at.removeprefix("os."), full)
            out = str(tmp_path / "a.pt")
            assert main(["convert", str(tmp_path / "run"), out, "--to", "torch"]) == 1
        assert "a.pt cannot be written: No space left" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
        out = str(tmp_path / "folder")
        assert main(["convert", str(tmp_path / "run"), out, "--to", "dcp"]) == 1
    output = capsys.readouterr().err
    assert "folder cannot be written: " in output and "No space left" in output
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_arguments_that_contradict(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is never overwritten."""
    source, mine = str(tmp_path), tmp_path / "mine.pt"
    mine.write_text("mine")
    cases: dict[str, list[str]] = {
        "--job is needed": [source],
        "is not there": [str(tmp_path / "none"), "--job", "demo"],
        "takes no --job": [source, "a.pt", "--to", "torch", "--job", "demo"],
        "needs the path to write": [source, "--to", "dcp"],
        "a run is made in --run-dir": [source, "a.pt", "--job", "demo"],
        "exists already": [str(trained_run), str(mine), "--to", "torch"],
    }
    for message, arguments in cases.items():
        assert main(["convert", *arguments]) == 2, message
        assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == [mine.name] and mine.read_text() == "mine"
