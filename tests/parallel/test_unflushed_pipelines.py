"""Pipelines without a flush between steps (PipeDream-2BW): order, waits, and what is in flight.

Their bits are in `test_same_bits.py`, jobs in `tests/distributed/test_unflushed_jobs.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.optim import LossScaleError, LossScaler
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.program.operations import Lane
from offloadtrain.step.program.updates import UpdatePath
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.parallel.mesh_runs import KINDS, Loop, pipeline_of
from tests.parallel.messages import assert_messages, message_of
from tests.recording_lanes import RecordingLanes

GPT = KINDS["gpt"]


def two_versions(**options: Any) -> ot.Pipeline:
    mesh = {"pp": dist.get_world_size(), "dp": 1}
    return pipeline_of(GPT, mesh, Loop(schedule="2bw"), **options)


def order_of_stage() -> str:
    """Return F and B of each microbatch, and | where a run ends."""
    pipeline, order = two_versions(), list[str]()
    model = pipeline.optimizers[0].model
    model.register_forward_pre_hook(lambda *_: order.append("F"))
    last = next(p for p in model.parameters() if p.requires_grad)
    last.register_post_accumulate_grad_hook(lambda _: order.append("B"))
    for step in range(2):
        tokens, targets = GPT.batch(step, 0)
        pipeline.run(tokens, target=targets)
        pipeline.step()
        order.append("|")
    pipeline.drain()
    pipeline.close()
    return "".join(order)


@pytest.mark.slow
def test_stages_do_not_wait_between_steps(ranks: Run) -> None:
    """Forwards of the second step come before the last backwards of the first."""
    assert ranks(2, order_of_stage) == ["FFBFBFB|FBFBFBFB|B", "FBFBFBFB|FBFBFBFB|"]


IN_FLIGHT = {
    "run": "end the step first",
    "drain": "end the step first",
    "steps": "twice",
    "evaluate": r"drain\(\) first",
    "synchronize": r"pipeline.drain\(\)",
    "state_dict": r"pipeline.drain\(\)",
    "step": r"pipeline.drain\(\)",
    "zero_grad": r"pipeline.drain\(\)",
    "drained": "^nothing",
}


def calls_in_flight() -> dict[str, str]:
    """Call what cannot be done with microbatches in flight; each is an error of its own."""
    pipeline = two_versions()
    optimizer = pipeline.optimizers[0]
    tokens, targets = GPT.batch(0, 0)
    pipeline.run(tokens, target=targets)
    calls: dict[str, Any] = {
        "run": lambda: pipeline.run(tokens, target=targets),
        "drain": pipeline.drain,
        "steps": lambda: [pipeline.step(), pipeline.step()],
        "evaluate": lambda: pipeline.evaluate(tokens[:2], target=targets[:2]),
    }
    calls |= {name: getattr(optimizer, name) for name in IN_FLIGHT if hasattr(optimizer, name)}
    messages = {name: message_of(call) for name, call in calls.items()}
    pipeline.drain()
    assert pipeline.drain() is None
    messages["drained"] = message_of(calls["evaluate"])
    pipeline.close()
    return messages


@pytest.mark.slow
def test_calls_with_a_step_in_flight_are_refused(ranks: Run) -> None:
    assert_messages(ranks(2, calls_in_flight), IN_FLIGHT)


def run_until_overflow(scale: float = 2.0**24) -> tuple[int, str]:
    """Return the number of the run that raises at the smallest loss scale, and its error."""
    tokens, targets = GPT.batch(0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "offloadtrain.engine.step_report.LossScaler",
            lambda hysteresis: LossScaler(scale=scale, growth_interval=2, hysteresis=hysteresis),
        )
        patch.setattr("offloadtrain.optim.loss_scaler.SMALLEST", scale)
        pipeline = two_versions(precision="fp16")
        for number in range(1, 9):
            try:
                pipeline.run(tokens, target=targets)
            except LossScaleError as error:
                pipeline.drain()
                pipeline.close()
                return number, str(error)
            pipeline.step()
    raise AssertionError("no overflow was reported")


@pytest.mark.slow
def test_overflows_at_the_smallest_scale_are_raised_on_all_stages(ranks: Run) -> None:
    """Before anything is sent that other stages would wait for."""
    for number, message in ranks(2, run_until_overflow):
        assert number == 3 and "gradients overflow fp16" in message


class ReadsOnceMore(nn.Module):
    """Its backward reads the weight again when its gradient has left: without a gradient of its own
    for what is read, nothing else makes the engine wait."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # As the input of a later stage is: a gradient for it is computed.
        x = x if x.requires_grad else x.detach().requires_grad_()
        return x + self.inner(F.linear(x, self.inner.weight.detach()))


def faults_of_uploads(*, waits: bool) -> list[Any]:
    """Prove the program of this stage; `waits`: uploads wait for what compute has read."""
    torch.manual_seed(0)
    lanes = RecordingLanes(SequentialLanes())
    model = nn.Sequential(*(ReadsOnceMore() for _ in range(4)))
    with pytest.MonkeyPatch.context() as patch, on_lanes(lanes):
        if not waits:
            no_wait = lambda self, _: self._order.record(Lane.COMPUTE, "backward")  # noqa: E731
            patch.setattr(UpdatePath, "end_backward", no_wait)
        pipeline = ot.pipeline(
            model,
            init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp")),
            ot.AdamW(lr=1e-2),
            example=torch.zeros(2, 24),
            microbatches=4,
            loss_fn=F.mse_loss,
            schedule="2bw",
            precision="fp32",
            device="cpu",
        )
        for _ in range(4):
            x = torch.randn(8, 24)
            pipeline.run(x, target=x.tanh())
            pipeline.step()
        pipeline.drain()
        pipeline.close()
    return prove(lanes.program)


@pytest.mark.slow
def test_uploads_wait_for_the_last_reads_of_the_version_that_they_replace(ranks: Run) -> None:
    """The wait that no other one implies."""
    assert ranks(2, faults_of_uploads, waits=True) == [[], []]
    first, _ = ranks(2, faults_of_uploads, waits=False)
    assert any("h2d" in str(fault) and "backward" in str(fault) for fault in first)
