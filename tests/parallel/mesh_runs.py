"""Train small models among ranks: undivided, in parts, or in stages of a pipeline; compare runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import offloadtrain as ot
from offloadtrain.optim import LossScaler
from offloadtrain.parallel.unused_experts import merged_steps
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.tensor_parts import Share, shares_of
from offloadtrain.step.layout.buffer_table import device_owners, host_owners
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.harsh_lanes import PausingLanes
from tests.parallel.models import KINDS, Kind, divide
from tests.recording_lanes import RecordingLanes

LR = 1e-2
Mesh = dict[str, int]
"""Axis → its size. "pp" are stages, "dp" replicas, "ep" experts and "tp" matrices in parts."""
Options = dict[str, Any]


@dataclass(frozen=True)
class Loop:
    """How a run trains, apart from the options of `offload` and `pipeline`.

    Attributes:
        skipped: the step that is skipped.
        synchronized: the step after which all updates are waited for.
        paused: the step after which nothing is in flight, and the delay continues.
        scale: loss scale of the beginning; it grows every two steps. 0: the usual one.
        groups: parameters of one dimension have no weight decay.
        on_meta: weights are filled in by `param_init_fn`.
        lanes: "proof", the recorded program is proved; "threads", with random delays.
    """

    steps: int = 3
    skipped: int = 0
    synchronized: int = 0
    paused: int = 0
    scale: float = 0.0
    groups: bool = False
    on_meta: bool = False
    lanes: str = ""
    schedule: str = "1f1b"


@dataclass(slots=True)
class MeshRun:
    """What one rank has come to.

    Attributes:
        steps: gradient norm, clip coefficient, loss scale, whether it was skipped, number of
            microbatches, and their losses.
        masters: master weights of what this rank holds.
        shares: where its parts are in the whole parameters.
        dims: parameter → the dimension that torch's styles divide.
        divided_numel: elements of the parts that it holds.
        memory: (owner, tier) → bytes.
        faults: of the recorded program.
    """

    steps: list[tuple[Any, ...]]
    masters: dict[str, Any] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=dict)
    divided_numel: int = 0
    memory: dict[tuple[str, str], int] = field(default_factory=dict)
    numel: int = 0
    comm_bytes: int = 0
    expert_steps: dict[str, list[int]] = field(default_factory=dict)
    faults: list[Any] = field(default_factory=list)

    def add(self, optimizer: ot.OffloadOptimizer, *, by_hand: bool) -> None:
        """Add what an optimizer of this rank holds."""
        params = dict(optimizer.model.named_parameters())
        shares = {} if by_hand else shares_of(optimizer.model)
        for name, param in params.items():
            if param in shares:
                self.shares[name] = shares[param]
            elif isinstance(param, DTensor) and hasattr(param.placements[0], "dim"):
                self.dims[name] = param.placements[0].dim
        for name, master in optimizer.master_weights():
            self.masters[name] = master.clone().numpy()
            if master.numel() < params[name].numel():
                self.divided_numel += master.numel()
        for row in optimizer.ledger.rows():
            key = (row.owner, row.tier)
            self.memory[key] = self.memory.get(key, 0) + row.bytes
        self.numel += sum(bucket.shard_numel for bucket in optimizer._engine.program.spec.buckets)
        self.expert_steps |= optimizer.expert_steps
        report = optimizer.last_step
        assert report is not None
        self.comm_bytes += report.comm_bytes


def train(kind_name: str, sizes: Mesh, **options: Any) -> MeshRun:
    """Train on this rank; in stages if the mesh has an axis "pp".

    Args:
        options: fields of `Loop`, and options of `offload` or `pipeline`.
    """
    names = [item.name for item in fields(Loop)]
    loop = Loop(**{name: options.pop(name) for name in names if name in options})
    lanes: Lanes | None = None
    if loop.lanes == "threads":
        lanes = PausingLanes(0.3, seed=dist.get_rank())
    if loop.lanes == "proof":
        lanes = RecordingLanes(SequentialLanes())
    with pytest.MonkeyPatch.context() as patch:
        if loop.scale:
            patch.setattr("offloadtrain.engine.step_report.LossScaler", _scaler(loop.scale))
        with on_lanes(lanes) if lanes else nullcontext():
            run = _train_in_stages if "pp" in sizes else _train_undivided
            result = run(KINDS[kind_name], sizes, loop, options)
    if isinstance(lanes, RecordingLanes):
        result.faults = prove(lanes.program)
    return result


def _scaler(scale: float) -> Callable[[int], LossScaler]:
    return lambda hysteresis: LossScaler(scale=scale, growth_interval=2, hysteresis=hysteresis)


def _train_undivided(kind: Kind, sizes: Mesh, loop: Loop, options: Options) -> MeshRun:
    """Train without stages."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = kind.make()
    if loop.on_meta:
        _fill_all(model)
    divide(kind, model, mesh)
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=LR),
        device="cpu",
        mesh=mesh if {"tp", "ep"} & sizes.keys() else None,
        grad_accum_steps=kind.microbatches,
        params=_groups(model) if loop.groups else None,
        **options,
    )
    more = {"use_cache": False} if hasattr(model, "generation_config") else {}
    replica, run = dist.get_rank() // sizes.get("tp", 1), MeshRun([])
    for step in range(1, loop.steps + 1):
        losses = []
        batch = (x.chunk(kind.microbatches) for x in kind.batch(step, replica))
        for x, target in zip(*batch, strict=True):
            output = model(x, **more)
            loss = kind.loss(output.logits if more else output, target)
            optimizer.backward(loss)
            losses.append(loss.detach().float())
        optimizer.step(skip=step == loop.skipped)
        if step == loop.synchronized:
            optimizer.synchronize()
        run.steps.append(_figures(optimizer.last_step, torch.stack(losses)))
    run.add(optimizer, by_hand=kind.by_hand)
    optimizer.close()
    return run


def pipeline_of(kind: Kind, sizes: Mesh, loop: Loop, **options: Any) -> ot.Pipeline:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with torch.device("meta") if loop.on_meta else nullcontext():
        model = kind.make()
    divide(kind, model, mesh)
    return ot.pipeline(
        model,
        mesh,
        ot.AdamW(lr=LR),
        example=kind.example(kind.rows),
        microbatches=options.pop("microbatches", kind.microbatches),
        loss_fn=kind.loss,
        schedule=loop.schedule,
        stages_per_rank=2 if loop.schedule == "interleaved" else 1,
        params=_groups(model) if loop.groups else None,
        device="cpu",
        param_init_fn=_fill_by_draws() if loop.on_meta else None,
        **options,
    )


def _train_in_stages(kind: Kind, sizes: Mesh, loop: Loop, options: Options) -> MeshRun:
    pipeline = pipeline_of(kind, sizes, loop, **options)
    optimizer = pipeline.optimizers[0]
    losses: list[Tensor | None] = []
    reports: list[ot.StepReport | None] = []
    for step in range(1, loop.steps + 1):
        inputs, target = kind.batch(step, pipeline.replicas.rank)
        losses.append(pipeline.run(inputs, target=target))
        reports.append(optimizer.last_step)  # of the step before
        pipeline.step(skip=step == loop.skipped)
        if step in (loop.synchronized, loop.paused):
            losses.append(pipeline.drain(newest=step == loop.synchronized))
            reports.append(optimizer.last_step)
    losses.append(pipeline.drain())
    reports.append(optimizer.last_step)
    # A run without a flush returns NaN for a step that has not ended; that step follows later.
    ended = [values for values in losses if values is not None and not values.isnan().any()]
    distinct = {id(report): report for report in reports if report is not None}.values()
    run = MeshRun([_figures(*pair) for pair in zip(distinct, ended, strict=True)])
    if loop.schedule == "2bw":
        _assert_allocated_as_planned(optimizer)
    for stage in pipeline.optimizers:
        run.add(stage, by_hand=kind.by_hand)
    pipeline.close()
    return run


def _assert_allocated_as_planned(optimizer: ot.OffloadOptimizer) -> None:
    spec = optimizer._engine.program.spec
    rows = optimizer.ledger.rows()
    on_host = {row.owner: row.bytes for row in rows if row.tier == Tier.HOST}
    planned = host_owners(spec)
    if spec.moves_inputs:  # their size shows in the first forward, and with it their padding
        assert on_host.pop(spec.config.activations.moved) > 0
        on_host.pop("padding", 0), planned.pop("padding", 0)
    assert on_host == planned
    on_device = {row.owner: row.bytes for row in rows if row.tier == Tier.DEVICE}
    assert on_device == device_owners(spec)


def _figures(report: ot.StepReport | None, losses: Tensor) -> tuple[Any, ...]:
    assert report is not None
    figures = (report.grad_norm, report.clip_coef, report.loss_scale, report.skipped)
    return (*figures, report.micro_steps, losses.tolist())


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    matrices = [param for param in params if param.ndim > 1]
    return [
        {"params": matrices},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def _fill_by_draws() -> Callable[[nn.Module], None]:
    """Return what fills a module's own parameters; each module draws after those before it."""
    generator = torch.Generator().manual_seed(11)

    def fill(module: nn.Module) -> None:
        for value in module.parameters(recurse=False):
            value.normal_(std=0.1, generator=generator)
        if hasattr(module, "inv_freq"):
            module.inv_freq.copy_(1.0 / 100.0 ** torch.linspace(0.0, 1.0, len(module.inv_freq)))

    return fill


def _fill_all(model: nn.Module) -> None:
    fill = _fill_by_draws()
    with torch.no_grad():
        for module in model.modules():
            fill(module)


# Comparisons.


def run_on(ranks: Run, kind: str, mesh: Mesh, options: Options) -> list[MeshRun]:
    runs: list[MeshRun] = ranks(math.prod(mesh.values()), train, kind, mesh, **options)
    return runs


def assert_same_bits(plain: Sequence[MeshRun], divided: Sequence[MeshRun]) -> None:
    """Compare figures of steps, masters, and counts of expert updates.

    Each rank of `plain` holds a part of the model. In `divided` as many ranks of each stage of a
    pipeline, one stage after the other, hold these parts.
    """
    masters: list[dict[str, Any]] = [{} for _ in plain]
    numel = [0] * len(plain)
    for rank, run in enumerate(divided):
        part = rank % len(plain)
        # As text, in which a norm that is no number equals itself.
        assert str(run.steps) == str(plain[part].steps), f"rank {rank}"
        assert not run.faults
        masters[part] |= run.masters
        numel[part] += run.divided_numel
    for part, expected in enumerate(plain):
        assert masters[part].keys() == expected.masters.keys()
        for name, value in expected.masters.items():
            assert (masters[part][name] == value).all(), name
        assert numel[part] == expected.divided_numel
    assert expert_steps_of(divided) == expert_steps_of(plain)


def expert_steps_of(runs: Sequence[MeshRun]) -> dict[str, list[int]]:
    return merged_steps(run.expert_steps for run in runs)


def whole_masters(runs: Sequence[MeshRun]) -> dict[str, Tensor]:
    """Put the masters of all parts together; elements that several ranks hold must be equal."""
    masters = {}
    for name in runs[0].masters:
        parts = [torch.from_numpy(run.masters[name]) for run in runs]
        if name in runs[0].dims:
            masters[name] = torch.cat(parts, runs[0].dims[name])
        elif name in runs[0].shares:
            masters[name] = _joined(parts, [run.shares[name] for run in runs])
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} drifts apart"
            masters[name] = parts[0]
    return masters


def _joined(parts: Sequence[Tensor], shares: Sequence[Share]) -> Tensor:
    """Place each element where its part says that it is in the whole."""
    flat = torch.full((math.prod(shares[0].shape),), torch.nan)
    for part, share in zip(parts, shares, strict=True):
        values = in_memory_order(part, share)
        for piece in share.ranges:
            target = flat[piece.at : piece.at + piece.length]
            source = values[piece.lo : piece.lo + piece.length]
            assert target.isnan().all() or torch.equal(target, source), "parts drift apart"
            target.copy_(source)
    return flat.as_strided(shares[0].shape, shares[0].stride).clone()


def in_memory_order(part: Tensor, share: Share) -> Tensor:
    """Flatten a part, with its dimensions in the order that the whole parameter has."""
    order = sorted(range(part.ndim), key=lambda axis: -share.stride[axis])
    return part.permute(order).reshape(-1)


def worst_difference(
    expected: dict[str, Any], masters: dict[str, Tensor], but: Sequence[str] = ()
) -> float:
    """The largest difference of a master weight whose name contains none of `but`."""
    assert expected.keys() == masters.keys()
    return max(
        float((masters[name] - torch.as_tensor(value)).abs().max())
        for name, value in expected.items()
        if not any(text in name for text in but)
    )
