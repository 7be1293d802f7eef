"""A run that was stopped and went on is, bit for bit, the run that was not."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.events import schema
from offloadtrain.optim import LossScaler
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.train import saved_state
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.trainer import Trainer
from tests.numerics.test_compiled_blocks import generates
from tests.train.small_job import (
    ENCODER,
    assert_same_run,
    events_of,
    history,
    run,
    run_in_parts,
    small_job,
    tensor_hashes,
)


@pytest.mark.parametrize(
    "precision",
    ["fp16", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("bf16", "fp32"))],
)
def test_resume_is_bit_exact(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    """Also behind the last step, and from a damaged checkpoint, which is set aside."""
    fast = partial(LossScaler, scale=64.0, growth_interval=3)  # grows within the test
    monkeypatch.setattr("offloadtrain.engine.step_report.LossScaler", fast)
    job = small_job(tmp_path, f"offload.precision={precision}")
    uninterrupted, parted = tmp_path / "uninterrupted", tmp_path / "parted"
    assert run(job, uninterrupted) == 0
    run_in_parts(job, parted, 1, 4, 2)
    assert_same_run(parted, uninterrupted)
    scales = {e.loss_scale for e in events_of(uninterrupted, schema.Step)}
    assert scales == ({64.0, 128.0, 256.0, 512.0} if precision == "fp16" else {None})
    assert [e.step for e in events_of(parted, schema.Step)] == list(range(1, 13))
    evaluated = [
        [(e.step, e.val_loss) for e in events_of(path, schema.Eval)]
        for path in (uninterrupted, parted)
    ]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 4
    longer = small_job(tmp_path, f"offload.precision={precision}", "train.steps=13")
    assert run(longer, parted, resume=str(parted)) == 0
    starts = [e.start_step for e in events_of(parted, schema.RunStarted)]
    assert starts == [0, 1, 5, 7, 12]


SKIPS = [
    *("model.num_experts=32", "model.experts_per_token=1", "train.micro_batch=1"),
    *("train.grad_accum_steps=1", 'offload.skip_unused=["*.experts.*"]'),
]
"""A few tokens for many experts."""


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 1])
def test_a_run_resumes_with_another_share_of_the_sums_on_the_device(
    tmp_path: Path, share: int
) -> None:
    sums_on = [f"offload.sums_on={{device={of}}}" for of in (0.4, share)]
    keys = ("offload.clip_norm=0.3", "train.grad_accum_steps=3", "train.micro_batch=1")
    first, other = (small_job(tmp_path, *keys, of) for of in sums_on)
    uninterrupted, parted = tmp_path / "uninterrupted", tmp_path / "parted"
    assert run(first, uninterrupted) == 0
    assert run(first, parted, stop_after=5) == 75
    assert run(other, parted, resume=str(parted)) == 0
    assert_same_run(parted, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        (["offload.update=speculative", "offload.state=int8", "offload.clip_norm=0.3"], (1, 4)),
        (["optim.name=muon", "optim.lr=0.02", "offload.state=split16"], (4, 3)),
        (["offload.update=delayed", "offload.working=host", "offload.state=split16"], (4, 3)),
        pytest.param(
            ["offload.compile_blocks=true", "offload.working=host", "offload.activation=recompute"],
            (4, 2),
            marks=[pytest.mark.filterwarnings("ignore"), generates],  # torch warns of torch
        ),
        ([*SKIPS, "offload.state=int8"], (4, 3)),
        ([*ENCODER, "optim.name=lamb", "optim.max_norm=10", "optim.lr=0.1"], (5,)),
    ],
)
def test_every_mode_and_placement_resumes(
    tmp_path: Path, overrides: list[str], limits: tuple[int, ...]
) -> None:
    job = small_job(tmp_path, *overrides)
    uninterrupted, parted = tmp_path / "uninterrupted", tmp_path / "parted"
    assert run(job, uninterrupted) == 0
    run_in_parts(job, parted, *limits)
    assert_same_run(parted, uninterrupted)
    of_experts = [read_steps(path) for path in (uninterrupted, parted)]
    assert of_experts[0] == of_experts[1] and (len(of_experts[0]) > 4) == (SKIPS[0] in overrides)


def read_steps(path: Path) -> set[int]:
    """Return the steps of experts in the last checkpoint."""
    last = checkpoint.verify(checkpoint.find(path / "checkpoints")[0])
    steps = last.state["optimizer"].get("expert_steps", {})
    return {step for of_parameter in steps.values() for step in of_parameter}


def test_killed_between_checkpoints_goes_on_from_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps after it are done again, with the same losses. A damaged checkpoint is set aside,
    and without a good one it is an error."""
    job = small_job(tmp_path)
    uninterrupted, parted = tmp_path / "uninterrupted", tmp_path / "parted"
    assert run(job, uninterrupted) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_between_steps", _crash_after(8))
        with pytest.raises(RuntimeError, match="crash"):
            run(job, parted)
    damaged = parted / "checkpoints" / "step-00000006" / "state.json"
    damaged.write_text(damaged.read_text().replace("0", "1", 1))
    assert run(job, parted, resume="auto") == 0
    assert sorted(set(history(parted))) == history(uninterrupted)
    assert tensor_hashes(parted, 12) == tensor_hashes(uninterrupted, 12)
    assert [w.code for w in events_of(parted, schema.Warning_)] == ["checkpoint-damaged"]
    assert "state.json has changed" in capsys.readouterr().err
    checkpoints = parted / "checkpoints"
    assert len(list(checkpoints.glob("damaged-step-00000006-*"))) == 1
    for saved in checkpoint.find(checkpoints):
        (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        run(small_job(tmp_path, "train.steps=13"), parted, resume="auto")


def _crash_after(step: int) -> Callable[[Trainer], None]:
    real = Trainer._between_steps

    def between_steps(self: Trainer) -> None:
        if self.progress.step == step:
            raise RuntimeError("crash")
        real(self)

    return between_steps


def test_all_random_states_come_back() -> None:
    saved_state.seed_all(5)
    before = saved_state.random_states().as_json
    drawn = [(random.random(), np.random.randn(), torch.rand(3).tolist()) for _ in range(2)]
    saved_state.restore_random_states(before)
    assert drawn == [(random.random(), np.random.randn(), torch.rand(3).tolist()) for _ in range(2)]


@pytest.mark.slow
def test_another_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert run(small_job(tmp_path), path, stop_after=2) == 75
    with pytest.raises(ConfigError, match=r"model\.num_heads: 2 -> 4"):
        run(small_job(tmp_path, "model.num_heads=4"), path, resume="auto")
    with pytest.raises(ConfigError, match="precision"):
        run(small_job(tmp_path, "offload.precision=fp32"), path, resume="auto")
    with pytest.raises(ConfigError, match=r"does not hold the state of optim\.name = 'sgd': '"):
        run(small_job(tmp_path, "optim.name=sgd"), path, resume="auto")
    assert run(small_job(tmp_path, "optim.lr=5e-3"), path, resume="auto") == 0
    changed = [e.message for e in events_of(path, schema.Warning_) if e.code == "job-changed"]
    assert changed == ["changed since the checkpoint: optim.lr: 0.01 -> 0.005"]


@pytest.mark.parametrize(("before", "now"), [(4.0, 0.2), (0.2, 4.0)])
def test_a_precision_that_was_measured_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    now: float,
) -> None:
    """ "auto" on a machine that would choose otherwise: the run goes on as it began."""
    job, path = small_job(tmp_path, "offload.precision=auto", "train.steps=4"), tmp_path / "run"
    for speedup, limit in ((before, 2), (now, None)):
        monkeypatch.setattr("offloadtrain.runtime.device.cpu_bf16_speedup", lambda x=speedup: x)
        assert run(job, path, resume="auto", stop_after=limit) == (75 if limit else 0)
    plans = [start.plan for start in events_of(path, schema.RunStarted)]
    precision = "bf16" if before > 1 else "fp32"
    assert [plan["precision"] for plan in plans] == [precision] * 2
    assert plans[1]["why"] == "as before"


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that makes torch begin with so many threads, as on another machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("overrides", "threads", "codes"),
    [
        ([], 1, []),
        pytest.param(["device.threads=2"], 2, ["threads-changed"], marks=pytest.mark.slow),
    ],
)
def test_torch_s_threads_are_kept(
    tmp_path: Path,
    torch_threads: Callable[[int], None],
    overrides: list[str],
    threads: int,
    codes: list[str],
) -> None:
    """Bits depend on their number: a run goes on with those it began with, or says so."""
    path = tmp_path / "run"
    torch_threads(1)
    assert run(small_job(tmp_path, "train.steps=4"), path, stop_after=2) == 75
    torch_threads(3)
    assert run(small_job(tmp_path, "train.steps=4", *overrides), path, resume="auto") == 0
    numbers = [start.plan["threads"] for start in events_of(path, schema.RunStarted)]
    assert numbers == [1, threads] and torch.get_num_threads() == threads
    warnings = [e for e in events_of(path, schema.Warning_) if e.code != "job-changed"]
    assert [warning.code for warning in warnings] == codes
    assert all("1 threads" in w.message and "2 now" in w.message for w in warnings)


# ---- a run folder that has lost a part

PARTS = ("events", "events/rank000.jsonl", "run.json", "job.toml",
         "resolved.toml", "lock", "control")  # fmt: skip


@pytest.fixture(scope="module")
def job_and_hashes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, str]]:
    """A job, and the hashes of its final tensors after a run without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = small_job(folder)
    assert run(job, folder / "run") == 0
    return job, tensor_hashes(folder / "run", 12)


@pytest.mark.slow
def test_a_stopped_run_without_one_of_its_parts_resumes_with_the_same_bits(
    tmp_path: Path, job_and_hashes: tuple[Config, dict[str, str]]
) -> None:
    job, expected = job_and_hashes
    assert run(job, tmp_path / "stopped", stop_after=7) == 75
    for number, part in enumerate(PARTS):
        folder = Path(shutil.copytree(tmp_path / "stopped", tmp_path / f"{number}"))
        _remove(folder / part)
        assert run(job, folder, resume=str(folder)) == 0
        assert tensor_hashes(folder, 12) == expected, part
        assert [step for step, *_ in history(folder)][-5:] == [8, 9, 10, 11, 12]


@pytest.mark.parametrize("part", ["events", "events/rank000.jsonl"])
def test_a_run_whose_log_is_removed_warns_at_once_and_continues_it(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job_and_hashes: tuple[Config, dict[str, str]],
) -> None:
    job, expected = job_and_hashes
    folder = tmp_path / "run"
    before_step = RunLog.before_step

    def remove_before_step_6(log: RunLog, optimizer: AnyOptimizer) -> None:
        before_step(log, optimizer)
        if log._progress.step == 5:
            log._writer.flush()
            _remove(folder / part)

    monkeypatch.setattr(RunLog, "before_step", remove_before_step_6)
    assert run(job, folder) == 0
    assert tensor_hashes(folder, 12) == expected
    assert [step for step, *_ in history(folder)] == list(range(6, 13))
    removal, *rest = events_of(folder, schema.Warning_)
    message = f"{folder / 'events' / 'rank000.jsonl'} was removed or renamed"
    assert removal.code == "log-removed" and removal.message.startswith(message)
    assert "log-removed" not in {warning.code for warning in rest}
    output = capsys.readouterr().err
    assert output.count("removed or renamed") == output.count(message) == 1


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
