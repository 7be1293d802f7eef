"""A run that was stopped and went on is, bit for bit, the run that was not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.events import schema
from offloadtrain.optim import LossScaler
from offloadtrain.train import saved_state
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.trainer import Trainer
from tests.numerics.test_compiled_blocks import generates
from tests.train.conftest import StopAfter
from tests.train.small_job import events_of, history, run, small_job, tensor_hashes


@pytest.mark.parametrize(
    "precision", ["fp16", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16", "fp32"))]
)
def test_resume_is_bit_exact(
    tmp_path: Path, stop_after: StopAfter, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    fast = partial(LossScaler, scale=64.0, growth_interval=3)  # grows within the test
    monkeypatch.setattr("offloadtrain.engine.step_report.LossScaler", fast)
    job = small_job(tmp_path, f"offload.precision={precision}")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(job, whole) == 0
    for already, limit in ((0, 1), (1, 4), (5, 2)):
        stop_after(limit)
        assert run(job, parted, resume="auto" if already == 0 else str(parted)) == 75
    stop_after(None)
    assert run(job, parted, resume=str(parted)) == 0

    assert history(parted) == history(whole)
    scales = {e.loss_scale for e in events_of(whole, schema.Step)}
    assert scales == ({64.0, 128.0, 256.0, 512.0} if precision == "fp16" else {None})
    assert [e.step for e in events_of(parted, schema.Step)] == list(range(1, 13))
    evaluated = [[(e.step, e.val_loss) for e in events_of(p, schema.Eval)] for p in (whole, parted)]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 4
    assert tensor_hashes(parted, 12) == tensor_hashes(whole, 12)
    starts = [e.start_step for e in events_of(parted, schema.RunStarted)]
    assert starts == [0, 1, 5, 7]


SKIPS = [
    *("model.num_experts=32", "model.experts_per_token=1", "train.micro_batch=1"),
    *("train.grad_accum_steps=1", 'offload.skip_unused=["*.experts.*"]'),
]
"""A few tokens for many experts."""


@pytest.mark.slow
@pytest.mark.draws(0.5)
@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        (["offload.working=host", "offload.activation=offload"], (1, 4, 2)),
        pytest.param(
            ["offload.update=speculative", "offload.state=int8", "offload.clip_norm=0.3"],
            (1, 4, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["offload.clip_norm=0", "offload.skip_nonfinite=false"],
            (1, 4, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["optim.name=muon", "optim.lr=0.02", "offload.state=split16", "offload.clip_norm=0.3"],
            (1, 4, 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["offload.update=delayed", "offload.warmup_steps=2"],
            (1, 4, 2),
            marks=pytest.mark.slow,
        ),
        (["offload.update=delayed", "offload.working=host", "offload.state=split16"], (4, 3)),
        pytest.param(
            ["offload.compile_blocks=true", "offload.working=host", "offload.activation=recompute"],
            (1, 4, 2),
            marks=[pytest.mark.filterwarnings("ignore"), generates],  # torch warns of torch
        ),
        pytest.param(SKIPS, (1, 4, 2), marks=pytest.mark.slow),
        pytest.param([*SKIPS, "offload.state=int8"], (4, 3), marks=pytest.mark.slow),
    ],
)
def test_every_mode_and_placement_resumes(
    tmp_path: Path, stop_after: StopAfter, overrides: list[str], limits: tuple[int, ...]
) -> None:
    job = small_job(tmp_path, *overrides)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(job, whole) == 0
    for number, limit in enumerate(limits):
        stop_after(limit)
        assert run(job, parted, resume="auto" if number == 0 else str(parted)) == 75
    stop_after(None)
    assert run(job, parted, resume=str(parted)) == 0
    assert history(parted) == history(whole)
    assert tensor_hashes(parted, 12) == tensor_hashes(whole, 12)
    of_experts = [read_steps(path) for path in (whole, parted)]
    assert of_experts[0] == of_experts[1] and (len(of_experts[0]) > 4) == (SKIPS[0] in overrides)


def read_steps(path: Path) -> set[int]:
    """The steps of experts that the last checkpoint knows."""
    found = checkpoint.verify(checkpoint.find(path / "checkpoints")[0])
    steps = found.state["optimizer"].get("expert_steps", {})
    return {step for one in steps.values() for step in one}


@pytest.mark.slow
def test_killed_between_checkpoints_goes_on_from_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after the checkpoint are done again, with the same losses."""
    job = small_job(tmp_path)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(job, whole) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_between_steps", _crash_after(5))
        with pytest.raises(RuntimeError, match="crash"):
            run(job, parted)
    assert run(job, parted, resume="auto") == 0
    assert sorted(set(history(parted))) == history(whole)
    assert tensor_hashes(parted, 12) == tensor_hashes(whole, 12)


def _crash_after(step: int) -> Callable[[Trainer], None]:
    real = Trainer._between_steps

    def between_steps(self: Trainer) -> None:
        if self.progress.step == step:
            raise RuntimeError("crash")
        real(self)

    return between_steps


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(
    tmp_path: Path, stop_after: StopAfter, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small_job(tmp_path)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(job, whole) == 0
    stop_after(7)
    assert run(job, parted) == 75
    state = parted / "checkpoints" / "step-00000007" / "state.json"
    state.write_text(state.read_text().replace("0", "1", 1))
    stop_after(None)
    assert run(job, parted, resume="auto") == 0
    warnings = events_of(parted, schema.Warning_)
    assert [w.code for w in warnings] == ["checkpoint-damaged"]
    assert "state.json has changed" in capsys.readouterr().err
    assert len(list((parted / "checkpoints").glob("damaged-step-00000007-*"))) == 1
    assert tensor_hashes(parted, 12) == tensor_hashes(whole, 12)


def test_all_random_states_come_back() -> None:
    saved_state.seed_all(5)
    before = saved_state.random_states().as_json
    drawn = [(random.random(), np.random.randn(), torch.rand(3).tolist()) for _ in range(2)]
    saved_state.restore_random_states(before)
    assert drawn == [(random.random(), np.random.randn(), torch.rand(3).tolist()) for _ in range(2)]


@pytest.mark.slow
def test_another_job_is_refused(tmp_path: Path, stop_after: StopAfter) -> None:
    path = tmp_path / "run"
    stop_after(2)
    assert run(small_job(tmp_path), path) == 75
    stop_after(None)
    with pytest.raises(ConfigError, match=r"model\.num_heads: 2 -> 4"):
        run(small_job(tmp_path, "model.num_heads=4"), path, resume="auto")
    with pytest.raises(ConfigError, match="precision"):
        run(small_job(tmp_path, "offload.precision=fp32"), path, resume="auto")
    assert run(small_job(tmp_path, "optim.lr=5e-3"), path, resume="auto") == 0
    changed = [e.message for e in events_of(path, schema.Warning_) if e.code == "job-changed"]
    assert changed == ["changed since the checkpoint: optim.lr: 0.01 -> 0.005"]


@pytest.mark.parametrize(("before", "now"), [(4.0, 0.2), (0.2, 4.0)])
def test_a_precision_that_was_measured_is_kept(
    tmp_path: Path,
    stop_after: StopAfter,
    monkeypatch: pytest.MonkeyPatch,
    before: float,
    now: float,
) -> None:
    """ "auto" on a machine that would choose otherwise: the run goes on as it began."""
    job, path = small_job(tmp_path, "offload.precision=auto", "train.steps=4"), tmp_path / "run"
    for speedup, limit in ((before, 2), (now, None)):
        monkeypatch.setattr("offloadtrain.runtime.device.cpu_bf16_speedup", lambda x=speedup: x)
        stop_after(limit)
        assert run(job, path, resume="auto") == (75 if limit else 0)
    told = [start.plan for start in events_of(path, schema.RunStarted)]
    precision = "bf16" if before > 1 else "fp32"
    assert [plan["precision"] for plan in told] == [precision] * 2
    assert told[1]["why"] == "as before"


@pytest.fixture
def torch_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that makes torch begin with so many threads, as on another machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("overrides", "threads", "codes"), [([], 1, []), (["device.threads=2"], 2, ["threads-changed"])]
)
def test_torch_s_threads_are_kept(
    tmp_path: Path,
    stop_after: StopAfter,
    torch_threads: Callable[[int], None],
    overrides: list[str],
    threads: int,
    codes: list[str],
) -> None:
    """Bits depend on their number: a run goes on with those it began with, or says so."""
    path = tmp_path / "run"
    torch_threads(1)
    stop_after(2)
    assert run(small_job(tmp_path, "train.steps=4"), path) == 75
    torch_threads(3)
    stop_after(None)
    assert run(small_job(tmp_path, "train.steps=4", *overrides), path, resume="auto") == 0
    told = [start.plan["threads"] for start in events_of(path, schema.RunStarted)]
    assert told == [1, threads] and torch.get_num_threads() == threads
    warnings = [e for e in events_of(path, schema.Warning_) if e.code != "job-changed"]
    assert [warning.code for warning in warnings] == codes
    assert all("1 threads" in w.message and "2 now" in w.message for w in warnings)


def test_training_on_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert run(small_job(tmp_path), path) == 0
    assert run(small_job(tmp_path, "train.steps=14"), path, resume=str(path)) == 0
    assert [e.step for e in events_of(path, schema.Step)] == list(range(1, 15))


def test_nothing_good_is_an_error(tmp_path: Path, stop_after: StopAfter) -> None:
    path = tmp_path / "run"
    stop_after(2)
    assert run(small_job(tmp_path), path) == 75
    (path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        run(small_job(tmp_path), path, resume="auto")
