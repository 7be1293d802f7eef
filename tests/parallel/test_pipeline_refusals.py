"""Pipelines refuse by name, on every stage, what would train silently wrong or leave stages waiting
for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

import offloadtrain as ot
from offloadtrain.parallel.pipeline.stage_modules import cut, divide
from offloadtrain.parallel.pipeline.steps import Pipeline
from tests.distributed.conftest import Run
from tests.distributed.pool import RankFailedError
from tests.parallel.messages import assert_messages, message_of
from tests.parallel.models import (
    DEEP_EXPERTS,
    EXPERTS,
    KINDS,
    MANY_EXPERTS,
    ComputesOutside,
    Residual,
    residual_layers,
    squares,
    token_loss,
    with_experts,
)


def layers(count: int = 4) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(count)]


class OwnsMore(nn.Module):
    """Owns a parameter itself, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(layers())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(8, 8), nn.ModuleList(layers())
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight


def repeated() -> nn.Sequential:
    block = Residual()
    return nn.Sequential(block, Residual(), block, Residual())


def half_frozen() -> nn.Sequential:
    model = residual_layers()
    model[:2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [
        (lambda: nn.Sequential(*layers()), 5, "5 stages for 4 layers"),
        (lambda: nn.Linear(2, 2), 2, "2 stages for 0 layers"),
        (OwnsMore, 2, "'OwnsMore' owns 'scale' and contains layers"),
        (Tied, 2, "'embedding.weight' and 'head.weight' are one tied parameter.* 0 and 1"),
        (repeated, 2, "'0' and '2' are one module"),
        (half_frozen, 2, "stage 0 has nothing to train"),
    ],
)
def test_models_that_cannot_be_cut(
    model: Callable[[], nn.Module], stages: int, message: str
) -> None:
    with pytest.raises(ot.PipelineError, match=message):
        divide(model(), stages)


def test_a_stage_is_the_model_without_the_others() -> None:
    """By name; a layer without parameters goes with the layer before it."""
    named = []
    for stage in range(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *layers(3), nn.Dropout())
        names = [[part.name for part in parts] for parts in divide(model, 2)]
        cut(model, names[stage], [name for part in names for name in part])
        named.append([name for name, _ in model.named_children()])
    assert named == [["0", "1", "2"], ["3", "4", "5"]]
    assert [len(parts) for parts in divide(Tied(), 1)] == [6]  # tied within a stage


def in_stages(
    model: nn.Module | None = None, schedule: str = "1f1b", *, mesh: Any = None, **options: Any
) -> Pipeline:
    """A pipeline of all ranks, by default of four layers."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    chosen: dict[str, Any] = {"loss_fn": squares, "microbatches": 4, "device": "cpu"}
    return ot.pipeline(
        model or residual_layers(),
        mesh,
        ot.AdamW(lr=1e-2),
        example=torch.zeros(2, 8),
        schedule=schedule,
        **{"stages_per_rank": 2} if schedule == "interleaved" else {},
        **chosen | options,
    )


class Blind(nn.Module):
    """Its forward does not know that it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Linear(8, 8), nn.ModuleList(layers())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).view(1, *x.shape)
        for layer in self.layers:
            x = layer(x)
        return x.view(3, 3)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "zero bubble": (
        {"schedule": "zero-bubble"},
        "^PipelineError: schedule = 'zero-bubble' is not one of",
    ),
    "stages": ({"stages_per_rank": 2}, "^PipelineError: .*'interleaved' is for 2 and more stages"),
    "few": ({"microbatches": 1}, "^PipelineError: schedule '1f1b': Number of microbatches"),
    "accumulation": (
        {"grad_accum_steps": 3},
        "^ValueError: grad_accum_steps = 3 and microbatches = 4",
    ),
    # A list has the value of each rank.
    "microbatches": (
        {"microbatches": [4, 8]},
        "^RankError: stage 1 and stage 0 differ in schedule",
    ),
    "layers": (
        {"layers_per_stage": [(3, 1), (1, 3)]},
        "^RankError: stage 1 .* differ in schedule",
    ),
    "too many layers": (
        {"layers_per_stage": (3, 2)},
        "^PipelineError: layers_per_stage = .* and 4 layers: give",
    ),
    "clipping": ({"clip_norm": [1.0, 2.0]}, r"^RankError: stage 1 .* in options: .*clip_norm"),
    "one layer": (
        {"schedule": "interleaved", "activation": "recompute"},
        "^PipelineError: stage 0 has one layer",
    ),
    # Without a flush.
    "speculative": ({"schedule": "2bw", "update": "speculative"}, "update = 'speculative'"),
    "warm-up": ({"schedule": "2bw", "warmup_steps": 2}, "warmup_steps = 2"),
    "disk": ({"schedule": "2bw", "working": "disk"}, "working = 'disk'"),
    "one microbatch": ({"schedule": "2bw", "microbatches": 1}, "1 microbatches and 2 stages"),
}
FORWARDS = {
    "scale": "^PipelineError: stage 1: 'layers.2' gets something else than the stage is given",
    "scale in place": "^PipelineError: stage 1: 'layers.2' gets something else than the stage is",
    "dropout": "^PipelineError: stage 1: 'layers.2' gets something else than the stage is given",
    "cap": "^PipelineError: stage 0: the stage returns something else than 'layers.1'",
    "number": "^PipelineError: stage 1: 'layers.2' gets 0, and 2 in the whole model",
    "twice": "^PipelineError: its forward calls layers in the order layers.0, layers.1, layers.2,",
    "transposed": "^PipelineError: stage 0: a stage returns .* with strides",
    "fails": "(?s)^PipelineError: stage 0: a stage's forward failed.*Modules of other stages are N",
}


def refused_calls() -> dict[str, str]:
    rank, messages = dist.get_rank(), {}
    for name, (options, _) in CALLS.items():
        chosen = {k: v[rank] if isinstance(v, list) else v for k, v in options.items()}
        messages[name] = message_of(lambda chosen=chosen: in_stages(**chosen))
    return messages


def refused_forwards() -> dict[str, str]:
    models = {name: ComputesOutside(name) for name in FORWARDS} | {"fails": Blind()}
    return {
        name: message_of(lambda model=model: in_stages(model)) for name, model in models.items()
    }


@pytest.mark.slow
def test_calls_that_every_stage_refuses(ranks: Run) -> None:
    assert_messages(ranks(2, refused_calls), {name: row[1] for name, row in CALLS.items()})


@pytest.mark.slow
def test_forwards_that_compute_something_else_in_stages(ranks: Run) -> None:
    assert_messages(ranks(2, refused_forwards), FORWARDS)


def refused_meshes() -> dict[str, str]:
    """Of two ranks: meshes, and divisions, that a pipeline cannot have."""
    messages = {}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    tokens = {"example": torch.zeros(2, 12, dtype=torch.int64), "loss_fn": token_loss}

    def tried(model: nn.Module, mesh: DeviceMesh, **more: Any) -> str:
        options = {"example": torch.ones(1, 8), "microbatches": 2, "device": "cpu"} | more
        return message_of(lambda: ot.pipeline(model, mesh, **options))

    single = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    messages["single"] = tried(residual_layers(), single)
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    messages["axis"] = message_of(lambda: ot.offload(nn.Linear(2, 2), device="cpu", mesh=axis))
    sparse = with_experts(MANY_EXPERTS)
    messages["no name"] = tried(sparse, mesh, skip_unused=("*.expert.*",), **tokens)
    late = {"skip_unused": ("*.experts.*",), "schedule": "2bw"}
    messages["skips late"] = tried(with_experts(MANY_EXPERTS), mesh, **late, **tokens)
    of_experts = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "ep"))
    balanced = with_experts(EXPERTS)
    ot.expert_parallel(balanced, of_experts)
    messages["balance"] = tried(balanced, of_experts, **tokens)
    order = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "pp"))
    messages["order"] = message_of(lambda: ot.expert_parallel(with_experts(), order))
    divided = with_experts(DEEP_EXPERTS)
    ot.expert_parallel(divided, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep")))
    messages["other mesh"] = tried(divided, mesh, **tokens)
    return messages


@pytest.mark.slow
def test_meshes_and_divisions_that_are_refused(ranks: Run) -> None:
    assert_messages(
        ranks(2, refused_meshes),
        {
            "single": "^PipelineError: the mesh has one rank along 'pp'",
            "axis": "mesh has an axis 'x'",
            "no name": r"no trained parameter is called '\*.expert.\*'",
            "skips late": r"schedule = '2bw' does not go with skip_unused = \['\*.experts.\*'\]",
            "balance": "router_aux_loss_coef = 0.01",
            "order": "axes 'ep', 'pp': experts take 'ep'",
            "other mesh": "are divided among 2 ranks, and offload\\(\\) knows of 1",
        },
    )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x) * mask
        return x


OTHER_SIZES = [(4, 8), (7, 8), (16, 8), (8, 5), (8, 8, 1)]
WRONG_CALLS = {
    "step": "^EngineError: step.. without (a backward|run)",
    "mask 1": "^PipelineError: 'mask' of 1 rows beside inputs of 8",
    "mask 4": "^PipelineError: 'mask' of 4 rows beside inputs of 8",
    "mask 0": "^PipelineError: 'mask' of no dimension beside inputs of 8",
    "target dict": "^PipelineError: target is a dict",
    "target 0": "^PipelineError: a target of no dimension",
    "target 7": "^PipelineError: a target of 7 rows for 4 microbatches",
    "evaluate": r"^PipelineError: inputs of \(1, 8\) for a microbatch of \(2, 8\)",
    **{
        f"inputs {size}": r"^PipelineError: inputs of \("
        + ", ".join(map(str, size))
        + r"\) for 4 microbatches of \(2, 8\): each .*drop_last=True"
        for size in OTHER_SIZES
    },
    "run": "^nothing",
    "run twice": "^EngineError: run.. between run.. and step..",
    "end": "^nothing",
}


def wrong_calls(schedule: str) -> dict[str, str]:
    pipeline, messages = in_stages(Masked(), schedule), {}
    inputs, target = KINDS["layers"].batch(0, 0)

    def tried(name: str, *args: Tensor, target: Any = target, **more: Any) -> None:
        messages[name] = message_of(lambda: pipeline.run(*args, target=target, **more))

    messages["step"] = message_of(pipeline.step)
    for mask in (torch.ones(1, 8), torch.ones(4, 1), torch.tensor(2.0)):
        tried(f"mask {len(mask) if mask.ndim else 0}", inputs, mask=mask)
    tried("target dict", inputs, target={"a": target})
    tried("target 0", inputs, target=torch.tensor(0.0))
    tried("target 7", inputs, target=torch.ones(7, 8))
    for size in OTHER_SIZES:  # a last, smaller batch of a loader
        tried(f"inputs {size}", torch.ones(size), target=torch.ones(size))
    single = torch.ones(1, 8)
    messages["evaluate"] = message_of(lambda: pipeline.evaluate(single, target=single))
    if schedule == "2bw":
        with torch.no_grad():
            tried("without gradients", inputs)
    mask = torch.ones(8, 1, dtype=torch.bfloat16)
    tried("run", inputs, mask=mask)
    tried("run twice", inputs, mask=mask)
    messages["end"] = message_of(pipeline.step)
    pipeline.close()
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_wrong_calls_are_refused_on_every_stage(ranks: Run, schedule: str) -> None:
    """Stages would wait for each other, or be ended by Gloo; the right call after them succeeds."""
    late = {"without gradients": "^PipelineError: run.. without gradients"}
    expected = WRONG_CALLS | (late if schedule == "2bw" else {})
    assert_messages(ranks(2, wrong_calls, schedule), expected)


def targets_of_the_loss() -> str:
    targets: list[Any] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        targets.append(target)
        return output.float().square().mean()

    pipeline = in_stages(Masked(), loss_fn=loss)
    pipeline.run(KINDS["layers"].batch(0, 0)[0])
    pipeline.close()
    return repr(targets)


@pytest.mark.slow
def test_a_forgotten_target_is_none(ranks: Run) -> None:
    """And not zeros, towards which a model would train."""
    assert ranks(2, targets_of_the_loss) == ["[]", "[None, None, None, None]"]


class ChangesDtype(Residual):
    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        out = super().forward(x, number)
        return out if x.is_meta else out.half()  # as many bytes as bf16


def run_with_another_dtype(folder: Path) -> None:
    pipeline = in_stages(nn.Sequential(*(ChangesDtype() for _ in range(4))))
    inputs, target = KINDS["layers"].batch(0, 0)
    message = message_of(lambda: pipeline.run(inputs, target=target))
    Path(folder, str(dist.get_rank())).write_text(message)
    os._exit(1)


@pytest.mark.slow
def test_an_output_of_another_dtype_is_named(own_ranks: Run, tmp_path: Path) -> None:
    """The next stage would read its bits as its own dtype's."""
    with pytest.raises(RankFailedError):
        own_ranks(2, run_with_another_dtype, tmp_path)
    first, second = (Path(tmp_path, str(rank)).read_text() for rank in range(2))
    assert first.startswith("ValueError: stage 0 returns (2, 8) torch.float16, and (2, 8) torch")
    assert "rank 0 (stage 1 of 2) has raised ValueError: stage 0 returns" in second


def message_of_torchs_schedule(kind: str) -> str:
    """The error of a loop of torch's parts over `offload`, with the defaults of torch."""
    rank, many = dist.get_rank(), 2 if kind == "zero bubble" else 1
    group = dist.new_group([rank], use_local_synchronization=True)
    stages, optimizers = [], []
    for number in range(many):
        model = nn.Sequential(*layers(2))
        optimizers.append(ot.offload(model, device="cpu", process_group=group, grad_accum_steps=4))
        x = torch.zeros(2, 8, dtype=torch.bfloat16, requires_grad=True)
        stages.append(PipelineStage(model, number * 2 + rank, 2 * many, torch.device("cpu"), x, x))
    schedules = {"zero bubble": ScheduleInterleavedZeroBubble, "scaling": Schedule1F1B}
    schedule = schedules[kind](stages if many > 1 else stages[0], 4, loss_fn=squares)
    target = {} if rank == 0 else {"target": torch.zeros(8, 8)}
    inputs = [torch.zeros(8, 8)] if rank == 0 else []
    message = message_of(lambda: schedule.step(*inputs, **target))
    for optimizer in optimizers:
        optimizer.close()
    return message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"), [("scaling", "scale_grads=True"), ("zero bubble", "zero-bubble schedule")]
)
def test_schedules_that_would_be_silently_wrong(own_ranks: Run, kind: str, message: str) -> None:
    messages = own_ranks(2, message_of_torchs_schedule, kind)
    assert any(message in text for text in messages), messages


def load_states_of_both_stages() -> list[str]:
    """Load the state of this stage, and that of the other one."""
    pipeline, rank = in_stages(), dist.get_rank()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, pipeline.optimizer.state_dict())
    load = pipeline.optimizer.load_state_dict
    messages = [message_of(lambda n=n: load(states[n])) for n in (rank, 1 - rank)]
    pipeline.close()
    return messages


@pytest.mark.slow
def test_the_state_of_another_stage_is_refused(ranks: Run) -> None:
    """Its shapes are the same."""
    for rank, (same, other) in enumerate(ranks(2, load_states_of_both_stages)):
        assert same == "nothing"
        assert f"the state is that of stage {1 - rank} of 2" in other


def continue_after_an_exception(folder: Path, schedule: str) -> None:
    """The last stage's loss fails once; its loop tries to continue with the next batch."""
    count, messages = 0, []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == 6:
            raise ValueError("a bad batch")
        return squares(output, target)

    pipeline = in_stages(Masked(), schedule, loss_fn=loss)
    for step in range(3):
        x, y = KINDS["layers"].batch(step, 0)
        messages.append(message_of(lambda x=x, y=y: pipeline.run(x, target=y)))
        messages.append(message_of(pipeline.step))
    messages.append(message_of(lambda: pipeline.evaluate(x[:2], target=y[:2])))
    pipeline.close()
    Path(folder, str(dist.get_rank())).write_text("\n".join(messages))
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_run_follows_an_exception(own_ranks: Run, tmp_path: Path, schedule: str) -> None:
    """It would get the messages of the microbatches that were left."""
    with pytest.raises(RankFailedError):
        own_ranks(2, continue_after_an_exception, tmp_path, schedule)
    for rank, head in enumerate(["LostRankError: rank 0", "ValueError: a bad batch"]):
        messages = Path(tmp_path, str(rank)).read_text().splitlines()
        assert messages[:2] == ["nothing", "nothing"] and messages[2].startswith(head)
        assert len(messages) == 7
        assert all(text.startswith("PipelineError: an exception has left") for text in messages[3:])
