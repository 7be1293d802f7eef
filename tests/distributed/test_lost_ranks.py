"""A rank whose own code fails ends the others with an error that names it and says why."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from tests.distributed.conftest import Run
from tests.distributed.pool import RankFailedError
from tests.numerics.models import Chain, batches

FAILS_AT = 6
"""The microbatch, of 4 in each step."""


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Failing) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.layer.count("backward")
        return grads[0], None


class Failing(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear, self.place, self.calls = nn.Linear(4, 4), place, 0

    def count(self, place: str) -> None:
        self.calls += place == self.place
        if self.calls == FAILS_AT:
            raise ValueError("the real cause")

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.count("forward")
        out: Tensor = Fails.apply(self.linear(x), self)  # type: ignore[no-untyped-call]
        return out


def ends(folder: Path, run: Callable[[], object]) -> None:
    """Write how it ends, and end the process, as a script does."""
    try:
        run()
    except Exception:
        Path(folder, str(dist.get_rank())).write_text(traceback.format_exc())
        os._exit(1)


def run_stages(schedule: str, place: str, failing: int) -> None:
    failing_place = place if dist.get_rank() == failing else ""
    counted = Failing(failing_place)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        counted.count("loss")
        return (output.float() - target).square().mean()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    more = {"stages_per_rank": 2} if schedule == "interleaved" else {}
    pipeline = ot.pipeline(
        nn.Sequential(*(Failing(failing_place) for _ in range(4))),
        mesh,
        example=torch.zeros(2, 4),
        microbatches=4,
        schedule=schedule,
        loss_fn=loss,
        device="cpu",
        **more,
    )
    if failing_place == "hook":
        first = next(iter(pipeline.module.parameters()))
        first.register_hook(lambda _: counted.count("hook"))
    for _ in range(4):
        pipeline.run(torch.ones(8, 4), target=torch.zeros(8, 4))
        pipeline.step()


def stages_end(folder: Path, *how: Any) -> None:
    ends(folder, lambda: run_stages(*how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "schedule", "place", "failing"),
    [
        (2, "2bw", "backward", 0),
        (4, "1f1b", "hook", 2),
        (2, "interleaved", "forward", 1),
        (2, "gpipe", "loss", 1),
    ],
)
def test_a_stage_that_fails_is_named_by_the_others(
    own_ranks: Run, tmp_path: Path, size: int, schedule: str, place: str, failing: int
) -> None:
    with pytest.raises(RankFailedError):
        own_ranks(size, stages_end, tmp_path, schedule, place, failing)
    errors = [Path(tmp_path, str(rank)).read_text().splitlines()[-1] for rank in range(size)]
    assert errors[failing] == "ValueError: the real cause"
    for rank in set(range(size)) - {failing}:
        assert errors[rank].startswith("offloadtrain.runtime.process_group.LostRankError: rank ")
        assert "has lost another rank: rank " in errors[rank]
        assert f"rank {failing} (stage {failing + 1} " in errors[rank]
        assert errors[rank].endswith("has raised ValueError: the real cause")


class Headless(Chain):
    """Rank 1 stops in front of the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if dist.get_rank() == 1 else self.head(x)


def run_headless() -> None:
    model = Headless()
    optimizer = ot.offload(model, device="cpu", working="host")
    for tokens in batches(2):
        optimizer.backward(model(tokens).float().square().mean())
        optimizer.step()


def headless_end(folder: Path) -> None:
    ends(folder, run_headless)


@pytest.mark.slow
def test_a_head_that_one_rank_alone_uses_is_named(own_ranks: Run, tmp_path: Path) -> None:
    """Gloo ends rank 0 itself, which gets messages of another size than it gathers."""
    with pytest.raises(RankFailedError):
        own_ranks(2, headless_end, tmp_path)
    error = Path(tmp_path, "1").read_text().splitlines()[-1]
    assert "LostRankError: rank 1, in '" in error and "', has lost another rank" in error
    assert "has not used 'head.weight' so far" in error and 'keep_whole = ["head"]' in error
