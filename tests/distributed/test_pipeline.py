"""Pipelines against one process with the same microbatches, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.loss import cross_entropy
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run

SHAPE = ModelShape(
    vocab_size=64,
    num_layers=8,
    d_model=32,
    num_heads=2,
    max_seq_len=16,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    bias=True,
)
MICROBATCHES, STEPS, ROWS = 4, 3, 2


def batches(replicas: int = 1) -> list[tuple[Tensor, Tensor]]:
    """The tokens and targets of each step, of all replicas."""
    generator = torch.Generator().manual_seed(7)
    rows = replicas * MICROBATCHES * ROWS
    tokens = torch.randint(0, SHAPE.vocab_size, (STEPS, rows, 17), generator=generator)
    return [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in tokens]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(seed: int = 1, experts: int = 0, *, checkpointed: bool = False) -> Transformer:
    """
    Args:
        experts: without the load-balancing loss, which no stage passes on.
        checkpointed: layers run again in backward by a checkpoint of their own.
    """
    shape = replace(SHAPE, num_experts=experts, router_aux_loss_coef=0.0)
    model = Transformer(shape, seed=seed)
    for layer in model.blocks if checkpointed else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


Told = dict[str, Any]


def of_step(report: ot.StepReport | None, losses: Tensor) -> tuple[Any, ...]:
    assert report is not None
    told = (report.grad_norm, report.clip_coef, report.loss_scale, report.skipped)
    return (*told, report.micro_steps, losses.tolist())


def one_process(
    groups: bool = False,
    synchronized: int = 0,
    skipped: int = 0,
    experts: int = 0,
    checkpointed: bool = False,
    **options: Any,
) -> Told:
    """A run of one process, or of all ranks as replicas; what it has come to.

    Args:
        synchronized: the step behind which all updates are waited for.
        skipped: the step that is skipped.
    """
    model = model_of(experts=experts, checkpointed=checkpointed)
    replicas = dist.get_world_size()
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2),
        device="cpu",
        grad_accum_steps=MICROBATCHES,
        params=decay(model) if groups else None,
        **options,
    )
    steps = []
    for number, (tokens, targets) in enumerate(batches(replicas), 1):
        tokens, targets = (x.chunk(replicas)[dist.get_rank()] for x in (tokens, targets))
        losses = []
        for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            loss = loss_of(model(x), y)
            optimizer.backward(loss)
            losses.append(loss.detach().float())
        optimizer.step(skip=number == skipped)
        if number == synchronized:
            optimizer.synchronize()
        steps.append(of_step(optimizer.last_step, torch.stack(losses)))
    return {"steps": steps, "masters": masters(optimizer)}


def masters(optimizer: ot.OffloadOptimizer) -> dict[str, Any]:
    found = {name: value.numpy() for name, value in optimizer.master_weights()}
    optimizer.close()
    return found


def decay(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def piped(
    stages: int,
    schedule: str = "1f1b",
    groups: bool = False,
    proof: bool = False,
    experts: int = 0,
    **options: Any,
) -> Told:
    """The same run on this process's stage."""
    mesh = init_device_mesh(
        "cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp")
    )
    model, lanes = model_of(experts=experts), RecordingLanes(SequentialLanes())
    with on_lanes(lanes) if proof else nullcontext():
        pipeline = ot.pipeline(
            model,
            mesh,
            ot.AdamW(lr=1e-2),
            example=torch.zeros(ROWS, 16, dtype=torch.int64),
            microbatches=MICROBATCHES,
            loss_fn=loss_of,
            schedule=schedule,
            stages_per_rank=2 if schedule == "interleaved" else 1,
            params=decay(model) if groups else None,
            device="cpu",
            **options,
        )
    steps = []
    replicas = pipeline.replicas
    for tokens, targets in batches(replicas.size):
        tokens, targets = (x.chunk(replicas.size)[replicas.rank] for x in (tokens, targets))
        losses = pipeline.run(tokens, target=targets)
        pipeline.step()
        steps.append(of_step(pipeline.optimizers[0].last_step, losses))
    found: dict[str, Any] = {}
    for optimizer in pipeline.optimizers:
        found |= masters(optimizer)
    pipeline.close()
    return {"steps": steps, "masters": found, "faults": prove(lanes.program) if proof else []}


def assert_same(ranks: Run, size: int, replicas: int, *args: Any, **options: Any) -> None:
    groups = options.get("groups", False)
    of_stages_only = ("schedule", "proof", "layers_per_stage")
    plain = {key: value for key, value in options.items() if key not in of_stages_only}
    whole = ranks(replicas, one_process, **plain)
    stages = ranks(size, piped, size // replicas, *args, **options)
    together: dict[str, Any] = {}
    for rank, found in enumerate(stages):
        assert found["steps"] == whole[rank % replicas]["steps"], f"rank {rank}, groups {groups}"
        assert not found["faults"]
        together |= found["masters"]
    assert together.keys() == whole[0]["masters"].keys()
    for name, value in whole[0]["masters"].items():
        assert (together[name] == value).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_same_bits(ranks: Run, schedule: str) -> None:
    assert_same(ranks, 2, 1, schedule=schedule, clip_norm=0.3)


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"precision": "fp16", "clip_norm": 0.3}),
    (2, 1, {"working": "host", "activation": "recompute", "schedule": "gpipe"}),
    (2, 1, {"update": "speculative", "clip_norm": 0.3, "schedule": "interleaved"}),
    (2, 1, {"update": "delayed", "clip_norm": 0.3, "layers_per_stage": (6, 2)}),
    (4, 1, {"clip_norm": 0.3, "state": "split16"}),
    (4, 2, {"clip_norm": 0.3, "zero_stage": 2}),
    (4, 2, {"clip_norm": 0.3, "zero_stage": 3}),
    (4, 2, {"clip_norm": 0.3, "zero_stage": 3, "working": "host"}),
    (2, 1, {"clip_norm": 0.3, "experts": 4, "activation": "recompute"}),
]
MORE: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"precision": "fp32", "groups": True, "state_on": "device"}),
    (2, 1, {"activation": "offload", "working": "host", "device_slots": 1}),
    (2, 1, {"working": "host", "device_slots": 1, "schedule": "gpipe"}),
    (2, 1, {"activation": "offload", "recompute_blocks": 1}),
    (2, 1, {"activation": "offload_saved", "offload_saved_above": 0}),
    (2, 1, {"skip_nonfinite": False}),
    (4, 1, {"precision": "fp16", "schedule": "interleaved"}),
    (2, 1, {"clip_norm": 0.3, "schedule": "interleaved", "layers_per_stage": (1, 3, 3, 1)}),
]


def in_words(case: tuple[int, int, dict[str, Any]]) -> str:
    size, replicas, options = case
    return "-".join([f"{size // replicas}x{replicas}", *(str(one) for one in options.values())])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "replicas", "options"),
    [
        *(pytest.param(*one, id=in_words(one)) for one in CASES),
        *(pytest.param(*one, id=in_words(one), marks=pytest.mark.long) for one in MORE),
    ],
)
def test_same_bits_everywhere(
    ranks: Run, size: int, replicas: int, options: dict[str, Any]
) -> None:
    """Placements, precisions and modes; the program of each stage has no race."""
    assert_same(ranks, size, replicas, proof=True, **options)
