"""Jobs with `offload.activation = "offload_saved"`: the bits of one that keeps its activations, and
a plan whose trace tells every byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.config.job import Config
from offloadtrain.hardware.machine import Machine, find
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.report import hidden_above, text
from offloadtrain.plan.search.suggest import settled
from offloadtrain.plan.times import compute_seconds
from offloadtrain.plan.tracing.tracer import ShapeTrace
from offloadtrain.train.build import assemble, needed_trace
from offloadtrain.train.losses import loss_divisor, loss_of
from tests.train.small_job import assert_same_run, run, run_in_parts, small_job

SAVED = ("offload.activation=offload_saved", "offload.offload_saved_above=1024")


@pytest.mark.slow
def test_it_trains_and_goes_on_with_the_bits_of_kept_activations(tmp_path: Path) -> None:
    keeping, moved = tmp_path / "kept", tmp_path / "moved"
    assert run(small_job(tmp_path), keeping) == 0
    run_in_parts(small_job(tmp_path, *SAVED, "offload.working=host"), moved, 5)
    assert_same_run(moved, keeping)


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("data.packing=isolated", "offload.working=host"), marks=pytest.mark.slow),
        ("train.chunked_loss=true", "train.z_loss=0.1", "offload.precision=fp32"),
        pytest.param(("model.dropout=0.0", "model.num_experts=4"), marks=pytest.mark.slow),
        pytest.param(
            ("model.objective=mlm", "model.vocab_size=257", "data.packing=isolated"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: options[0] if options else "plain",
)
def test_the_plan_knows_every_byte_on_the_host(tmp_path: Path, options: tuple[str, ...]) -> None:
    context = assemble(small_job(tmp_path, *SAVED, *options))
    for _ in range(2):
        divisor = loss_divisor(context.batches, 2, 1)
        for _ in range(2):
            loss = loss_of(context.model, context.batches.next(), divisor)
            context.optimizer.backward(loss, divide=False)
        context.optimizer.step()
    context.optimizer.synchronize()
    rows = context.optimizer.ledger.rows()
    (moved,) = (row.bytes for row in rows if row.owner == "saved tensors")
    assert context.plan.placed.host()["saved tensors"] == moved > 0
    context.optimizer.close()


JOB = """
name = "saved"
[model]
size = "gpt2-124m"
[data]
source = "python-stdlib"
seq_len = 512
[device]
kind = "cuda"
[offload]
precision = "bf16"
[train]
steps = 10
micro_batch = 8
grad_accum_steps = 16
chunked_loss = true
"""


def of_gpu(*overrides: str) -> Config:
    return jobs.loads(JOB, "job.toml", overrides)


TRACE = ShapeTrace(on_cpu=False)
"""Of the model, whatever is moved; each shape is traced once."""


def planned(above: str, machine: Machine) -> Plan:
    job = of_gpu(SAVED[0], f"offload.offload_saved_above={above}")
    return make(settled(job, "h100", machine, 1, TRACE), "h100", machine, 1, TRACE)


@pytest.mark.slow
def test_smaller_memory_stays_on_the_device() -> None:
    """What is planned for a GPU: the more is moved, the less stays; all of it is one or the
    other's. Without a trace there is no plan."""
    machine = find("h100")[1]
    plans = [planned(above, machine) for above in ("16 MiB", "4 MiB", "0 B")]
    moved = [sum(plan.placed.block_inputs) for plan in plans]
    stays = [plan.activations.total for plan in plans]
    assert moved == sorted(set(moved)) and stays == sorted(set(stays), reverse=True)
    assert all(min(plan.placed.block_inputs) >= 4 << 20 for plan in plans[:2])
    keeping = make(of_gpu(), "h100", machine)
    assert needed_trace(keeping.job, machine, 1) is None
    # But for what is in flight, and the loss, which is not saved.
    assert keeping.activations.total < moved[-1] + stays[-1] < 1.6 * keeping.activations.total
    with pytest.raises(PlanError, match="known from a trace of the model"):
        make(of_gpu(*SAVED), *find("h100"))


@pytest.mark.slow
def test_the_plan_tells_what_compute_hides() -> None:
    fast = replace(find("h100")[1], host_link_gbps=1e6, h2d_gbps=1e6, d2h_gbps=1e6)
    plan = planned("0 B", fast)
    assert hidden_above(plan.placed, fast) == 0
    saved, forward_s = sum(plan.placed.block_inputs), compute_seconds(plan.placed, fast).forward
    machine = replace(fast, d2h_gbps=0.5 * saved / forward_s / 1e9)
    plan = planned("0 B", machine)
    above = hidden_above(plan.placed, machine)
    assert above in plan.placed.block_inputs and f"offload_saved_above = {above}" in text(plan)
    next_size = max(size for size in plan.placed.block_inputs if size < above)
    hidden, more = (planned(f"{size} B", machine) for size in (above, next_size))
    assert hidden_above(hidden.placed, machine) == 0 and "no longer than forward" in text(hidden)
    assert hidden_above(more.placed, machine) == above
    assert hidden.prediction.exposed < plan.prediction.exposed
    nothing = planned("10 GiB", machine)
    assert "none has 10.0 GiB, so nothing moves" in text(nothing)
