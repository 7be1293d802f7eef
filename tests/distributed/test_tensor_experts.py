"""Experts divided among ranks whose attention is divided, too: dp x ep x tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offloadtrain as ot
from offloadtrain.engine.local_part import local
from offloadtrain.model.transformer import Transformer
from offloadtrain.parallel.tensor.own_model import divide_matrices
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.tensor_parts import keep_part
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_expert_parallel import (
    LR,
    SHAPE,
    STEPS,
    batch,
    loss_of,
    made,
    mesh_of,
)

AXES = ("dp", "ep", "tp")


def trained(dp: int, ep: int, tp: int, *, proof: bool = False, **options: Any) -> dict[str, Any]:
    """Some steps; the masters that this rank holds, and the shape of what it holds."""
    whole, mesh = made(), mesh_of(dp, ep, tp, names=AXES)
    with torch.device("meta"):
        model = Transformer(SHAPE)
    ot.expert_parallel(model, mesh)
    if tp > 1:
        divide_matrices(model, mesh["tp"])
    names = {module: name for name, module in model.named_modules()}

    def fill(module: nn.Module) -> None:
        values = whole.get_submodule(names[module]).named_parameters(recurse=False)
        for name, value in values:
            keep_part(module, name, value.detach())

    chosen: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.05} | options
    lanes = RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        given: dict[str, Any] = {"device": "cpu", "mesh": mesh, "param_init_fn": fill}
        optimizer = ot.offload(model, ot.AdamW(lr=LR), **given, **chosen)
    steps = []
    for step in range(STEPS):
        # The ranks of all parts have one batch.
        loss = loss_of(model, batch(step, rank=dist.get_rank() // tp))
        optimizer.backward(loss)
        optimizer.step()
        report = optimizer.last_step
        assert report is not None and not report.skipped
        steps.append((loss.item(), report.grad_norm, report.clip_coef))
    masters = {name: value.clone() for name, value in optimizer.master_weights()}
    held = {name: tuple(local(p).shape) for name, p in model.named_parameters()}
    optimizer.close()
    return {
        "steps": steps,
        "masters": {name: value.numpy() for name, value in masters.items()},
        "held": held,
        "faults": prove(lanes.program) if proof else [],
    }


def whole_of(found: list[dict[str, Any]], name: str, tp: int) -> bool:
    """Whether the ranks of all parts hold the same of a parameter."""
    return all((found[0]["masters"][name] == one["masters"][name]).all() for one in found[:tp])


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "ep", "tp"), [(1, 2, 2), (2, 1, 2)])
def test_near_attention_that_is_whole(
    ranks: Run, dp: int, ep: int, tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Norms count each expert once, though the ranks of all parts hold it; these stay equal."""
    plain = ranks(dp * ep, trained, dp, ep, 1)
    parts = ranks(dp * ep * tp, trained, dp, ep, tp, proof=True)
    worst, norms = 0.0, []
    for rank, one in enumerate(parts):
        other = plain[rank // tp]
        assert not one["faults"]
        for mine, theirs in zip(one["steps"], other["steps"], strict=True):
            assert mine[0] == pytest.approx(theirs[0], rel=1e-5)
            norms.append(abs(mine[1] / theirs[1] - 1))
        for name, value in one["masters"].items():
            if "attention." not in name:
                worst = max(worst, float(abs(value - other["masters"][name]).max()))
    with capsys.disabled():
        print(
            f"\ndp {dp} x ep {ep} x tp {tp}: the worst master of experts and norms differs by "
            f"{worst:.2g}, the worst norm by {max(norms):.2g} of itself"
        )
    assert 0 < worst < 0.01 * LR
    assert max(norms) < 1e-5
    for name in parts[0]["masters"]:
        assert whole_of(parts, name, tp) or "attention." in name, name
    assert parts[0]["held"]["blocks.0.mlp.experts.up"][0] == SHAPE.num_experts // ep
    assert parts[0]["held"]["blocks.0.attention.out.weight"] == (32, 32 // tp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "options"),
    [
        ({}, {"zero_stage": 3}),
        ({}, {"working": "host", "activation": "recompute"}),
        ({}, {"state_on": "device", "activation": "offload"}),
        ({}, {"update": "speculative", "zero_stage": 1}),
        ({"precision": "fp16"}, {"activation": "recompute", "partition_activations": True}),
        ({"precision": "bf16", "state": "split16"}, {"zero_stage": 3, "state_on": "device"}),
    ],
)
def test_placements_change_no_bit(
    ranks: Run, both: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = ranks(4, trained, 1, 2, 2, **both)
    other = ranks(4, trained, 1, 2, 2, proof=True, **both, **options)
    for one, found in zip(plain, other, strict=True):
        assert found["steps"] == one["steps"] and not found["faults"]
        for name, value in one["masters"].items():
            assert (found["masters"][name] == value).all(), name
