"""What pipelines refuse: models that cannot be cut, schedules that would train silently wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

import offloadtrain as ot
from offloadtrain.parallel.pipeline.stage_modules import cut, divide
from offloadtrain.parallel.pipeline.steps import Pipeline
from offloadtrain.runtime.process_group import RankError
from tests.distributed.conftest import Run


def layers(count: int = 4) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


class OwnsMore(nn.Module):
    """Owns a parameter itself, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(layers())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(8, 4), nn.ModuleList(layers())
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        (lambda: nn.Sequential(*layers()), 5, "5 stages for 4 layers"),
        (lambda: nn.Linear(2, 2), 2, "2 stages for 0 layers"),
        (OwnsMore, 2, "'OwnsMore' owns 'scale' and contains layers"),
        (Tied, 2, "'embedding.weight' and 'head.weight' are one tied parameter.* 0 and 1"),
    ],
)
def test_models_that_cannot_be_cut(
    model: Callable[[], nn.Module], stages: int, message: str
) -> None:
    with pytest.raises(ot.PipelineError, match=message):
        divide(model(), stages)


def test_a_stage_is_the_model_without_the_others() -> None:
    """By name; a layer without parameters goes with the one before it."""
    named = []
    for own in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *layers(3), nn.Dropout())
        names = [[part.name for part in parts] for parts in divide(model, 2)]
        cut(model, names[own], [name for part in names for name in part])
        named.append([name for name, _ in model.named_children()])
    assert named == [["0", "1", "2"], ["3", "4", "5"]]


def test_tied_within_a_stage_is_no_fault() -> None:
    assert [len(parts) for parts in divide(Tied(), 1)] == [6]


def of_two(schedule: str = "1f1b", **options: Any) -> Pipeline:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    chosen: dict[str, Any] = {"microbatches": 4, "loss_fn": squares, "device": "cpu"} | options
    return ot.pipeline(
        nn.Sequential(*layers()), mesh, example=torch.zeros(2, 4), schedule=schedule, **chosen
    )


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def told(fails: Callable[[], object]) -> str:
    try:
        fails()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(**options: Any) -> str:
    rank = dist.get_rank()
    return told(
        lambda: of_two(**{k: v[rank] if type(v) is list else v for k, v in options.items()})
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zero-bubble"}, "PipelineError: schedule = 'zero-bubble' is not one of"),
        ({"stages_per_rank": 2}, "PipelineError: .*'interleaved' is for 2 and more stages"),
        ({"microbatches": 1}, "PipelineError: schedule '1f1b': Number of microbatches"),
        ({"grad_accum_steps": 3}, "ValueError: grad_accum_steps = 3 and microbatches = 4"),
        ({"microbatches": [4, 8]}, "RankError: stage 1 and stage 0 differ in schedule"),
        ({"layers_per_stage": [(3, 1), (1, 3)]}, "RankError: stage 1 .* differ in schedule"),
        ({"layers_per_stage": (3, 2)}, "PipelineError: layers_per_stage = .* and 4 layers: give"),
        ({"clip_norm": [1.0, 2.0]}, r"RankError: stage 1 .* differ in options: .*clip_norm"),
        (
            {"schedule": "interleaved", "stages_per_rank": 2, "activation": "recompute"},
            "PipelineError: stage 0 has one layer",
        ),
    ],
)
def test_calls_that_are_refused(ranks: Run, options: dict[str, Any], message: str) -> None:
    for said in ranks(2, refused, **options):
        assert re.match(message, said), said


def other_batches(schedule: str) -> list[str]:
    """What is said of batches of other sizes, and of the right one behind them."""
    pipeline = of_two(schedule)
    said = [told(lambda x=x: pipeline.run(x, target=x)) for x in map(torch.ones, OTHER_SIZES)]
    said.append(told(lambda: pipeline.run(torch.ones(8, 4), target=torch.ones(7, 4))))
    said.append(told(lambda: pipeline.evaluate(torch.ones(1, 4), target=torch.ones(1, 4))))
    said.append(told(lambda: pipeline.run(torch.ones(8, 4), target=torch.ones(8, 4))))
    pipeline.step()
    pipeline.close()
    return said


OTHER_SIZES = [(4, 4), (7, 4), (16, 4), (8, 5), (8, 4, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_batches_of_another_size_are_told_on_every_stage(ranks: Run, schedule: str) -> None:
    """A last, smaller batch of a loader; stages would wait for each other, or be ended by Gloo."""
    for *inputs, target, single, right in ranks(2, other_batches, schedule):
        for said, size in zip(inputs, OTHER_SIZES, strict=True):
            head = f"PipelineError: inputs of {size} for 4 microbatches of (2, 4): each "
            assert said.startswith(head) and "drop_last=True" in said
        assert target.startswith("PipelineError: a target of 7 rows for 4 microbatches")
        assert single.startswith("PipelineError: inputs of (1, 4) for a microbatch of (2, 4)")
        assert right == "nothing"


class Blind(nn.Module):
    """Its forward does not know that it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Linear(4, 4), nn.ModuleList(layers())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).view(1, *x.shape)
        for layer in self.layers:
            x = layer(x)
        return x.view(3, 3)


def blind() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    build = lambda: ot.pipeline(  # noqa: E731
        Blind(), mesh, example=torch.zeros(2, 4), microbatches=4, loss_fn=squares, device="cpu"
    )
    return told(build)


@pytest.mark.slow
def test_a_forward_that_fails_fails_everywhere(ranks: Run) -> None:
    for said in ranks(2, blind):
        assert said.startswith("PipelineError: stage 0: a stage's forward failed"), said
        assert "Modules of other stages are None" in said


def with_torchs_schedule(kind: str) -> str:
    """A loop of torch's parts over `offload`, with the defaults of torch."""
    rank, many = dist.get_rank(), 2 if kind == "zero bubble" else 1
    group = dist.new_group([rank], use_local_synchronization=True)
    stages, optimizers = [], []
    for number in range(many):
        model = nn.Sequential(*layers(2))
        optimizers.append(ot.offload(model, device="cpu", process_group=group, grad_accum_steps=4))
        x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
        index, count = number * 2 + rank, 2 * many
        stages.append(PipelineStage(model, index, count, torch.device("cpu"), x, x))
    made = {"zero bubble": ScheduleInterleavedZeroBubble, "scaling": Schedule1F1B}[kind]
    schedule = made(stages if many > 1 else stages[0], 4, loss_fn=squares)
    given = {} if rank == 0 else {"target": torch.zeros(8, 4)}
    said = told(lambda: schedule.step(*([torch.zeros(8, 4)] if rank == 0 else []), **given))
    for optimizer in optimizers:
        optimizer.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"), [("scaling", "scale_grads=True"), ("zero bubble", "zero-bubble schedule")]
)
def test_schedules_that_would_be_silently_wrong(own_ranks: Run, kind: str, message: str) -> None:
    said = own_ranks(2, with_torchs_schedule, kind)
    assert any(message in one for one in said), said


def different_stages() -> str:
    """One stage has had fewer backwards."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = nn.Sequential(*layers(2))
    names = {0: "first", 1: "second"}
    whole = nn.ModuleDict({names[dist.get_rank()]: model})
    optimizer = ot.offload(whole, device="cpu", mesh=mesh, grad_accum_steps=2, clip_norm=1.0)
    for _ in range(1 + dist.get_rank()):
        model(torch.ones(1, 4)).float().sum().backward()
        optimizer.end_micro_step()
    said = told(optimizer.step)
    optimizer.close()
    return said


@pytest.mark.slow
def test_stages_that_differ_are_told(ranks: Run) -> None:
    for said in ranks(2, different_stages):
        assert "the number of backwards of stage 1 are not those of stage 0" in said
        assert said.startswith(RankError.__name__)


def shared_name() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = nn.Sequential(*layers(2))
    optimizer = ot.offload(model, device="cpu", mesh=mesh)
    model(torch.ones(1, 4)).float().sum().backward()
    said = told(optimizer.step)
    optimizer.close()
    return said


@pytest.mark.slow
def test_a_parameter_of_two_stages_is_told(ranks: Run) -> None:
    for said in ranks(2, shared_name):
        assert "parameter '0.weight' is in stages 0 and 1" in said


def one_stage() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    model, example = nn.Sequential(*layers(4)), torch.ones(1, 4)
    return told(lambda: ot.pipeline(model, mesh, example=example, microbatches=2, device="cpu"))


@pytest.mark.slow
def test_a_single_stage_is_refused(ranks: Run) -> None:
    for said in ranks(2, one_stage):
        assert re.match("PipelineError: the mesh has one rank along 'pp'", said), said


@pytest.mark.slow
def test_axes_have_names(ranks: Run) -> None:
    assert "mesh has an axis 'x'" in ranks(1, other_axis)[0]


def other_axis() -> str:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    return told(lambda: ot.offload(nn.Linear(2, 2), device="cpu", mesh=mesh))
