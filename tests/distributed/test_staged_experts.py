"""Experts divided among the ranks of each stage of a pipeline: the bits of ranks without stages."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.engine.local_part import local
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_expert_parallel import SHAPE, batch, made, mesh_of, whole_masters
from tests.distributed.test_pipeline import loss_of
from tests.distributed.test_pipeline_misuse import told

DEEP = replace(SHAPE, num_layers=4, router_aux_loss_coef=0.0)
MICROBATCHES, STEPS = 2, 3
BOTH: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.05}


def report_of(optimizer: Any, losses: list[float]) -> tuple[Any, ...]:
    report = optimizer.last_step
    return losses, report.grad_norm, report.clip_coef, report.loss_scale, report.skipped


def flat(dp: int, ep: int, **options: Any) -> dict[str, Any]:
    """A run without stages."""
    model, mesh = made(DEEP), mesh_of(dp, ep)
    ot.expert_parallel(model, mesh)
    given = BOTH | {"grad_accum_steps": MICROBATCHES} | options
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", mesh=mesh, **given)
    steps = []
    for step in range(STEPS):
        losses = []
        for micro in range(MICROBATCHES):
            tokens = batch(step, micro)
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        steps.append(report_of(optimizer, losses))
    found = {name: value.numpy() for name, value in whole_masters(optimizer, mesh).items()}
    optimizer.close()
    return {"steps": steps, "masters": found}


def staged(
    sizes: tuple[int, ...], names: tuple[str, ...], proof: bool, **options: Any
) -> dict[str, Any]:
    """The same run on this rank's stages."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model, lanes = made(DEEP), RecordingLanes(SequentialLanes())
    ot.expert_parallel(model, mesh)
    schedule = options.pop("schedule", "1f1b")
    with on_lanes(lanes) if proof else nullcontext():
        pipeline = ot.pipeline(
            model,
            mesh,
            ot.AdamW(lr=1e-2),
            example=torch.zeros(2, 12, dtype=torch.int64),
            microbatches=MICROBATCHES,
            loss_fn=loss_of,
            schedule=schedule,
            stages_per_rank=2 if schedule == "interleaved" else 1,
            device="cpu",
            **BOTH | options,
        )
    steps = []
    for step in range(STEPS):
        some = [batch(step, micro, pipeline.replicas.rank) for micro in range(MICROBATCHES)]
        tokens = torch.cat(some)
        losses = pipeline.run(tokens[:, :-1].contiguous(), target=tokens[:, 1:].contiguous())
        pipeline.step()
        steps.append(report_of(pipeline.optimizers[0], losses.tolist()))
    found: dict[str, Any] = {}
    for optimizer in pipeline.optimizers:
        masters = whole_masters(optimizer, mesh)
        found |= {name: value.numpy() for name, value in masters.items()}
    experts = sum(local(p).numel() for n, p in pipeline.module.named_parameters() if "experts" in n)
    pipeline.close()
    faults = prove(lanes.program) if proof else []
    return {"steps": steps, "masters": found, "faults": faults, "experts": experts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "names", "both", "options"),
    [
        ((2, 2), ("pp", "ep"), {}, {}),
        ((2, 1, 2), ("pp", "dp", "ep"), {"precision": "fp16"}, {"schedule": "gpipe"}),
        ((2, 1, 2), ("pp", "dp", "ep"), {}, {"schedule": "interleaved"}),
        ((2, 1, 2), ("pp", "dp", "ep"), {}, {"zero_stage": 3, "activation": "recompute"}),
        ((2, 1, 2), ("pp", "dp", "ep"), {}, {"working": "host", "activation": "offload"}),
        ((2, 1, 2), ("pp", "dp", "ep"), {"update": "delayed"}, {"state_on": "device"}),
        ((2, 1, 2), ("pp", "dp", "ep"), {}, {"update": "speculative"}),
        ((2, 2, 1), ("pp", "dp", "ep"), {}, {}),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else str(one),
)
def test_stages_change_no_bit(
    ranks: Run,
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    both: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Losses, norms, clip coefficients and masters; the program of each rank has no race."""
    pp, dp, ep = sizes[0], sizes[1] if len(sizes) > 2 else 1, sizes[-1]
    plain = ranks(dp * ep, flat, dp, ep, **both)
    found = ranks(pp * dp * ep, staged, sizes, names, True, **both, **options)
    together: dict[str, Any] = {}
    for rank, one in enumerate(found):
        assert one["steps"] == plain[rank % (dp * ep)]["steps"], rank
        assert not one["faults"]
        together |= one["masters"]
    assert together.keys() == plain[0]["masters"].keys()
    for name, value in plain[0]["masters"].items():
        assert (together[name] == value).all(), name
    per_layer = sum(p.numel() for n, p in made(DEEP).named_parameters() if ".0.mlp.experts" in n)
    assert {one["experts"] for one in found} == {per_layer // ep * (4 // pp)}


def refusals() -> dict[str, str]:
    found = {}
    example = torch.zeros(2, 12, dtype=torch.int64)
    given: dict[str, Any] = {"example": example, "microbatches": 2, "device": "cpu"}
    mesh = mesh_of(2, 1, 1, names=("pp", "dp", "ep"))
    balanced = made(replace(DEEP, router_aux_loss_coef=0.01))
    ot.expert_parallel(balanced, mesh)
    found["balance"] = told(lambda: ot.pipeline(balanced, mesh, loss_fn=loss_of, **given))
    order = mesh_of(1, 2, names=("ep", "pp"))
    found["order"] = told(lambda: ot.expert_parallel(made(DEEP), order))
    divided: nn.Module = Transformer(DEEP)
    ot.expert_parallel(divided, mesh_of(1, 2))
    other = mesh_of(2, 1, names=("pp", "dp"))
    found["mesh"] = told(lambda: ot.pipeline(divided, other, loss_fn=loss_of, **given))
    return found


@pytest.mark.slow
def test_misuse_is_refused_by_name(ranks: Run) -> None:
    for said in ranks(2, refusals):
        assert "router_aux_loss_coef = 0.01" in said["balance"]
        assert "axes 'ep', 'pp': experts take 'ep'" in said["order"]
        assert "are divided among 2 ranks, and offload() knows of 1" in said["mesh"]
