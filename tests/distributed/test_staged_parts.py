"""Stages of a pipeline whose matrices are divided among ranks (PTD-P): the bits of the same parts
without stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import offloadtrain as ot
from offloadtrain.engine.local_part import is_divided, local
from offloadtrain.optim import LossScaler
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline import loss_of
from tests.distributed.test_pipeline_misuse import told
from tests.distributed.test_tensor_parallel import (
    VOCABULARY,
    WIDTH,
    Layer,
    Llama,
    of_sequences,
    outside_of_layers,
    plan,
)

MICROBATCHES, STEPS, ROWS, LENGTH = 4, 3, 2, 16
AXES = ("pp", "dp", "tp")


class Decoder(Llama):
    """Passes over what other stages hold."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def in_parts(mesh: DeviceMesh, *, sequence: bool, layers: int = 4) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(layers)
    for layer in model.layers:
        parallelize_module(layer, mesh, of_sequences() if sequence else plan())
    if sequence:
        parallelize_module(model, mesh, outside_of_layers())
    return model


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets of a step, of one replica."""
    generator = torch.Generator().manual_seed(17 * step + replica)
    sizes = (MICROBATCHES * ROWS, LENGTH + 1)
    tokens = torch.randint(0, VOCABULARY, sizes, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def report_of(report: ot.StepReport | None, losses: Tensor) -> tuple[Any, ...]:
    assert report is not None
    told = (report.grad_norm, report.clip_coef, report.loss_scale, report.skipped)
    return *told, losses.tolist()


BOTH: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.3}


def flat(dp: int, tp: int, sequence: bool = False, **options: Any) -> dict[str, Any]:
    """A run without stages."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=AXES[1:])
    model = in_parts(mesh["tp"], sequence=sequence)
    given = BOTH | {"grad_accum_steps": MICROBATCHES, "mesh": mesh} | options
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **given)
    steps = []
    for step in range(STEPS):
        losses = []
        tokens, targets = batch(step, dist.get_rank() // tp)
        for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = loss_of(model(x), y)
            optimizer.backward(loss)
            losses.append(loss.detach().float())
        optimizer.step()
        steps.append(report_of(optimizer.last_step, torch.stack(losses)))
    found = {name: value.numpy() for name, value in optimizer.master_weights()}
    optimizer.close()
    return {"steps": steps, "masters": found}


def staged(
    sizes: tuple[int, ...],
    lanes: str = "proof",
    schedule: str = "1f1b",
    sequence: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The same run on this rank's stages; `sizes` of two axes are stages and parts."""
    names = AXES if len(sizes) == 3 else ("pp", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    chosen: Lanes = RecordingLanes(SequentialLanes())
    if lanes == "threads":
        chosen = ThreadLanes(seed=dist.get_rank(), longest_delay_ms=0.3)
    with on_lanes(chosen) if lanes else nullcontext():
        pipeline = ot.pipeline(
            in_parts(mesh["tp"], sequence=sequence),
            mesh,
            ot.AdamW(lr=1e-2),
            example=torch.zeros(ROWS, LENGTH, dtype=torch.int64),
            microbatches=MICROBATCHES,
            loss_fn=loss_of,
            schedule=schedule,
            stages_per_rank=2 if schedule == "interleaved" else 1,
            device="cpu",
            **BOTH | options,
        )
    losses: list[Tensor | None] = []
    reports = []
    for step in range(STEPS):
        tokens, targets = batch(step, pipeline.replicas.rank)
        losses.append(pipeline.run(tokens, target=targets))
        reports.append(pipeline.optimizers[0].last_step)  # of the step before, without a flush
        pipeline.step()
    losses.append(pipeline.drain())
    reports.append(pipeline.optimizers[0].last_step)
    known = [one for one in losses if one is not None and not one.isnan().any()]
    done = zip(known, [one for one in reports if one is not None], strict=True)
    named = pipeline.module.named_parameters()
    params = [param for name, param in named if name.startswith("layers")]
    found: dict[str, Any] = {
        "steps": [report_of(report, one) for one, report in done],
        "masters": {},
        "held": sum(local(param).numel() for param in params if is_divided(param)),
    }
    for optimizer in pipeline.optimizers:
        found["masters"] |= {name: value.numpy() for name, value in optimizer.master_weights()}
    inputs = [row.bytes for row in pipeline.optimizer.ledger.rows() if row.owner == "block inputs"]
    pipeline.close()
    faults = prove(chosen.program) if isinstance(chosen, RecordingLanes) else []
    return found | {"faults": faults, "inputs": sum(inputs)}


def overflowing(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A run whose loss scale begins where gradients overflow."""

    def scaler(hysteresis: int) -> LossScaler:
        return LossScaler(scale=2.0**24, growth_interval=2, hysteresis=hysteresis)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offloadtrain.engine.step_report.LossScaler", scaler)
        patch.setattr("tests.distributed.test_staged_parts.STEPS", 9)
        return run(*args, **options)


OF_LAYER = 4 * WIDTH * WIDTH + 3 * 4 * WIDTH * WIDTH
"""Elements of a layer's matrices."""

PARTITIONED = {"partition_activations": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "both", "options"),
    [
        pytest.param(*((2, 1, 2), {}, {}), marks=pytest.mark.long),
        ((2, 2), {"precision": "fp16"}, {"schedule": "gpipe"}),
        pytest.param(*((2, 1, 2), {}, {"schedule": "interleaved"}), marks=pytest.mark.long),
        pytest.param(
            *((2, 1, 2), {"update": "delayed"}, {"schedule": "2bw"}), marks=pytest.mark.long
        ),
        ((2, 1, 2), {"sequence": True}, {"activation": "recompute"}),
        ((2, 1, 2), {"sequence": True, "update": "delayed"}, {"schedule": "2bw"}),
        ((2, 1, 2), {}, {"working": "host", "activation": "recompute"} | PARTITIONED),
        ((2, 1, 2), {}, {"activation": "offload"} | PARTITIONED),
        pytest.param(
            *((2, 1, 2), {}, {"activation": "offload", "lanes": "threads"} | PARTITIONED),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *((2, 1, 2), {"precision": "bf16"}, {"update": "speculative", "state_on": "device"}),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *((2, 2, 2), {}, {"zero_stage": 3, "activation": "recompute"} | PARTITIONED),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else str(one),
)
def test_stages_change_no_bit(
    ranks: Run, sizes: tuple[int, ...], both: dict[str, Any], options: dict[str, Any]
) -> None:
    """Losses, norms, clip coefficients, loss scales, skips and masters of every part; the program
    of each rank has no race."""
    pp, dp, tp = sizes[0], sizes[1] if len(sizes) > 2 else 1, sizes[-1]
    run = (overflowing,) if both.get("precision") == "fp16" else ()
    plain = ranks(dp * tp, *run, flat, dp, tp, **both)
    found = ranks(pp * dp * tp, *run, staged, sizes, **both | options)
    together: list[dict[str, Any]] = [{} for _ in plain]
    for rank, one in enumerate(found):
        # As text, in which a norm that is no number equals itself.
        assert str(one["steps"]) == str(plain[rank % (dp * tp)]["steps"]), rank
        assert not one["faults"]
        together[rank % (dp * tp)] |= one["masters"]
        assert one["held"] == 4 // pp * OF_LAYER // tp
    for whole, parts in zip(plain, together, strict=True):
        assert parts.keys() == whole["masters"].keys()
        for name, value in whole["masters"].items():
            assert (parts[name] == value).all(), name
    assert {step[3] for step in plain[0]["steps"]} == ({False, True} if run else {False})


def refusals() -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=AXES)

    def made(model: nn.Module, mesh: Any = mesh, **changes: Any) -> Callable[[], object]:
        given: dict[str, Any] = {"loss_fn": loss_of, "microbatches": MICROBATCHES, "device": "cpu"}
        example = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        return lambda: ot.pipeline(model, mesh, example=example, **given | changes)

    def fresh() -> nn.Module:
        return in_parts(mesh["tp"], sequence=False)

    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES[:2])
    found["mesh"] = told(made(fresh(), replicas))
    found["part"] = told(made(fresh(), clip_norm=1.0 + rank % 2))
    found["schedule"] = told(made(fresh(), schedule="1f1b" if rank % 2 else "gpipe"))
    experts = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "ep", "tp"))
    found["experts"] = told(made(in_parts(experts["tp"], sequence=False), experts))
    pipeline: Any = made(fresh())()
    pipeline.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 + rank % 2)
    tokens, targets = batch(0, 0)
    pipeline.run(tokens, target=targets)
    found["rate"] = told(pipeline.step)
    pipeline.close()
    return found


@pytest.mark.slow
def test_misuse_is_refused_by_name(own_ranks: Run) -> None:
    for said in own_ranks(4, refusals):
        assert "is a DTensor on 2 ranks, and 1 hold parts of the model" in said["mesh"]
        assert "part 1 and part 0 differ in options: ('clip_norm', '2.0')" in said["part"]
        assert "part 1 and part 0 differ in schedule" in said["schedule"]
        assert "stages of a pipeline divide experts or matrices" in said["experts"]
        assert "hyperparameters of part 1 are not those of part 0" in said["rate"]
