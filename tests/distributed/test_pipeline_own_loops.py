"""Pipelines in loops of one's own: what would train silently wrong, or leave stages waiting for
each other, is refused by name on every stage."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import offloadtrain as ot
from offloadtrain.parallel.pipeline.stage_modules import divide
from offloadtrain.parallel.pipeline.steps import Pipeline
from tests.distributed.conftest import Run
from tests.distributed.pool import RankFailedError
from tests.distributed.test_pipeline_misuse import squares, told

WIDTH, ROWS, MICROBATCHES, STEPS = 8, 2, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x))) / (1 + number)
        return out


class Own(nn.Module):
    """A forward that does something outside of its layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.dropout = kind, nn.Dropout(0.5)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        if self.embed is not None:
            x = self.embed(x)
        if self.kind == "scale":
            x = x * 3.0
        if self.kind == "scale in place":
            x.mul_(3.0)
        if self.kind == "dropout":
            x = self.dropout(x)
        for _ in range(2 if self.kind == "twice" else 1):
            for number, layer in enumerate(self.layers):
                x = layer(x, number if self.kind == "number" else 0)
                x = x / 2 if self.kind == "between" else x.view(-1, WIDTH)
        if self.kind == "cap":
            x = torch.tanh(x)
        if self.kind == "turned" and self.head is None:
            x = x.t().contiguous().t()
        if self.head is None:
            return x
        out = self.head(x)
        return (out, x) if self.kind == "pair" else out


def pipeline_of(model: nn.Module, schedule: str = "1f1b", **options: Any) -> Pipeline:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    chosen: dict[str, Any] = {"mesh": mesh, "loss_fn": squares} | options
    return ot.pipeline(
        model,
        chosen.pop("mesh"),
        ot.AdamW(lr=1e-2),
        example=torch.zeros(ROWS, WIDTH),
        microbatches=MICROBATCHES,
        schedule=schedule,
        stages_per_rank=2 if schedule == "interleaved" else 1,
        device="cpu",
        **chosen,
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = torch.randn(STEPS, 2, ROWS * MICROBATCHES, WIDTH, generator=generator)
    return [(inputs, target) for inputs, target in made]


def of_pair(output: Any, target: Tensor) -> Tensor:
    return squares(output[0], target) + 0.1 * squares(output[1], target)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))) if kind == "layers" else Own(kind)


def loss_of(kind: str) -> Any:
    return of_pair if kind == "pair" else squares


def in_one_process(kind: str) -> tuple[list[Any], dict[str, Any]]:
    model, losses = model_of(kind), []
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-2), device="cpu", grad_accum_steps=MICROBATCHES, clip_norm=1.0
    )
    for inputs, target in batches():
        for x, y in zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss = loss_of(kind)(model(x), y)
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
    found = {name: value.tolist() for name, value in optimizer.master_weights()}
    optimizer.close()
    return losses, found


def in_stages(kind: str, schedule: str) -> tuple[list[Any], dict[str, Any]]:
    pipeline = pipeline_of(model_of(kind), schedule, clip_norm=1.0, loss_fn=loss_of(kind))
    losses, found = [], {}
    for inputs, target in batches():
        losses += pipeline.run(inputs, target=target).tolist()
        pipeline.step()
    for optimizer in pipeline.optimizers:
        found |= {name: value.tolist() for name, value in optimizer.master_weights()}
    pipeline.close()
    return losses, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("layers", "interleaved"), ("between", "1f1b"), ("pair", "1f1b")],
)
def test_same_bits(ranks: Run, kind: str, schedule: str) -> None:
    """Stages of a single layer that gets the model's own fp32 input; forwards that compute between
    layers; outputs of several tensors."""
    losses, masters = ranks(1, in_one_process, kind)[0]
    together: dict[str, Any] = {}
    for own_losses, own in ranks(2, in_stages, kind, schedule):
        assert own_losses == losses
        together |= own
    assert together == masters


def refusals(kinds: list[str]) -> list[str]:
    return [told(lambda kind=kind: pipeline_of(Own(kind))) for kind in kinds]


REFUSED = {
    "scale": "stage 1: 'layers.2' gets something else than the stage is given",
    "scale in place": "stage 1: 'layers.2' gets something else than the stage is given",
    "dropout": "stage 1: 'layers.2' gets something else than the stage is given",
    "cap": "stage 0: the stage returns something else than 'layers.1'",
    "number": "stage 1: 'layers.2' gets 0, and 2 in the whole model",
    "twice": "its forward calls layers in the order layers.0, layers.1, layers.2, layers.3, layers",
    "turned": "stage 0: a stage returns .* with strides",
}


@pytest.mark.slow
def test_forwards_that_compute_something_else_in_stages(ranks: Run) -> None:
    for said in ranks(2, refusals, list(REFUSED)):
        for one, message in zip(said, REFUSED.values(), strict=True):
            assert re.match(f"PipelineError: {message}", one), one


@pytest.mark.slow
def test_models_that_every_stage_refuses() -> None:
    block = Block()
    with pytest.raises(ot.PipelineError, match="'0' and '2' are one module"):
        divide(nn.Sequential(block, Block(), block, Block()), 2)
    frozen = nn.Sequential(*(Block() for _ in range(4)))
    frozen[:2].requires_grad_(False)
    with pytest.raises(ot.PipelineError, match="stage 0 has nothing to train"):
        divide(frozen, 2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x) * mask
        return x


def calls(schedule: str) -> list[str]:
    pipeline, said = pipeline_of(Masked(), schedule), []
    (inputs, target), *_ = batches()
    said.append(told(pipeline.step))
    for mask in (torch.ones(1, WIDTH), torch.ones(4, 1), torch.tensor(2.0)):
        said.append(told(lambda mask=mask: pipeline.run(inputs, target=target, mask=mask)))
    for wrong in ({"a": target}, torch.tensor(0.0)):
        said.append(told(lambda wrong=wrong: pipeline.run(inputs, target=wrong)))
    if schedule == "2bw":
        with torch.no_grad():
            said.append(told(lambda: pipeline.run(inputs, target=target)))
    mask = torch.ones(8, 1, dtype=torch.bfloat16)
    for _ in range(2):
        said.append(told(lambda: pipeline.run(inputs, target=target, mask=mask)))
    said.append(told(pipeline.step))
    pipeline.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_calls_that_every_stage_refuses(ranks: Run, schedule: str) -> None:
    without = {"1f1b": "step.. without a backward", "2bw": "step.. without run"}
    messages = [
        f"EngineError: {without[schedule]}",
        "PipelineError: 'mask' of 1 rows beside inputs of 8",
        "PipelineError: 'mask' of 4 rows beside inputs of 8",
        "PipelineError: 'mask' of no dimension beside inputs of 8",
        "PipelineError: target is a dict",
        "PipelineError: a target of no dimension",
        *(["PipelineError: run.. without gradients"] if schedule == "2bw" else []),
        "nothing",
        "EngineError: run.. between run.. and step..",
        "nothing",
    ]
    for said in ranks(2, calls, schedule):
        for one, message in zip(said, messages, strict=True):
            assert re.match(message, one), one


def without_target() -> str:
    given: list[Any] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        given.append(target)
        return output.float().square().mean()

    pipeline = pipeline_of(Masked(), loss_fn=loss)
    pipeline.run(batches()[0][0])
    pipeline.close()
    return repr(given)


@pytest.mark.slow
def test_a_forgotten_target_is_none(ranks: Run) -> None:
    """And not zeros, towards which a model would train."""
    assert ranks(2, without_target) == ["[]", "[None, None, None, None]"]


def goes_on(folder: Path, schedule: str) -> None:
    """The last stage's loss fails once; its loop tries to go on with the next batch."""
    count, said = 0, []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == 6:
            raise ValueError("a bad batch")
        return squares(output, target)

    pipeline = pipeline_of(Masked(), schedule, loss_fn=loss)
    for inputs, target in batches():
        said.append(told(lambda x=inputs, y=target: pipeline.run(x, target=y)))
        said.append(told(pipeline.step))
    said.append(told(lambda: pipeline.evaluate(inputs[:2], target=target[:2])))
    pipeline.close()
    Path(folder, str(dist.get_rank())).write_text("\n".join(said))
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_run_follows_an_exception(own_ranks: Run, tmp_path: Path, schedule: str) -> None:
    """It would get the messages of the microbatches that were left."""
    with pytest.raises(RankFailedError):
        own_ranks(2, goes_on, tmp_path, schedule)
    for rank, head in enumerate(["LostRankError: rank 0", "ValueError: a bad batch"]):
        said = Path(tmp_path, str(rank)).read_text().splitlines()
        assert said[:2] == ["nothing", "nothing"] and said[2].startswith(head)
        assert len(said) == 7
        assert all(one.startswith("PipelineError: an exception has left") for one in said[3:])


def in_pieces() -> dict[str, Any]:
    model = nn.Sequential(*(Block() for _ in range(4)))
    groups = [{"params": layer.parameters(), "lr": 0.1 + n} for n, layer in enumerate(model)]
    pipeline = pipeline_of(model, "interleaved", params=groups)
    inputs, target = batches()[0]
    pipeline.run(inputs, target=target)
    first, second = pipeline.optimizers
    first.clip_grad_norm_(1e-3)
    found = {
        "weights": sorted(pipeline.module.state_dict()),
        "load": told(lambda: pipeline.module.load_state_dict({})),
        "groups": [[group["lr"] for group in one.param_groups] for one in pipeline.optimizers],
        "trained": [
            [len(group["params"]) for group in one.param_groups] for one in (first, second)
        ],
        "step": told(pipeline.step),
    }
    pipeline.close()
    return found


@pytest.mark.slow
def test_several_stages_of_a_process(own_ranks: Run) -> None:
    """All their weights are in `state_dict`; groups keep their numbers; all clip, or none."""
    names = [f"{part}.{kind}" for part in ("inner", "outer") for kind in ("bias", "weight")]
    for rank, found in enumerate(own_ranks(2, in_pieces)):
        own = (rank, rank + 2)
        assert found["weights"] == sorted(f"{n}.{name}" for n in own for name in names)
        assert "load the weights of each into its own model" in found["load"]
        assert found["groups"] == [[0.1, 1.1, 2.1, 3.1]] * 2
        assert found["trained"] == [[4 * (n == one) for n in range(4)] for one in own]
        assert found["step"].startswith("RankError: stages of one process disagree in step 1")


def of_another_stage() -> tuple[str, str]:
    pipeline = pipeline_of(nn.Sequential(*(Block() for _ in range(4))))
    states: list[Any] = [None, None]
    dist.all_gather_object(states, pipeline.optimizer.state_dict())
    own = dist.get_rank()
    said = [told(lambda n=n: pipeline.optimizer.load_state_dict(states[n])) for n in (own, 1 - own)]
    pipeline.close()
    return said[0], said[1]


@pytest.mark.slow
def test_the_state_of_another_stage_is_refused(ranks: Run) -> None:
    """Its shapes are the same."""
    for rank, (own, other) in enumerate(ranks(2, of_another_stage)):
        assert own == "nothing"
        assert f"the state is that of stage {1 - rank} of 2" in other


class Changes(Block):
    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        out = super().forward(x, number)
        return out if x.is_meta else out.half()  # as many bytes as bf16


def changes_its_output(folder: Path) -> None:
    pipeline = pipeline_of(nn.Sequential(*(Changes() for _ in range(4))))
    inputs, target = batches()[0]
    said = told(lambda: pipeline.run(inputs, target=target))
    Path(folder, str(dist.get_rank())).write_text(said)
    os._exit(1)


@pytest.mark.slow
def test_an_output_of_another_dtype_is_told(own_ranks: Run, tmp_path: Path) -> None:
    """The next stage would read its bits as its own dtype's."""
    with pytest.raises(RankFailedError):
        own_ranks(2, changes_its_output, tmp_path)
    said = [Path(tmp_path, str(rank)).read_text() for rank in range(2)]
    assert said[0].startswith("ValueError: stage 0 returns (2, 8) torch.float16, and (2, 8) torch")
    assert "rank 0 (stage 1 of 2) has raised ValueError: stage 0 returns" in said[1]


@pytest.mark.slow
def test_a_rank_outside_of_the_mesh_is_told(own_ranks: Run) -> None:
    *inside, outside = own_ranks(3, of_two_ranks)
    assert inside == ["nothing"] * 2
    assert outside.startswith("ValueError: rank 2 is not in the mesh of 2 ranks")


def of_two_ranks() -> str:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("pp",))
    return told(lambda: pipeline_of(Masked(), mesh=mesh).close())
