"""A pipeline without flushes (PipeDream-2BW) against update mode "delayed" of one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.config.errors import PipelineError
from offloadtrain.engine.norm import EngineError
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.buffer_table import device_owners, host_owners
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline import (
    MICROBATCHES,
    ROWS,
    Told,
    batches,
    decay,
    in_words,
    loss_of,
    masters,
    model_of,
    of_step,
    one_process,
)


def lanes_of(kind: str) -> Lanes | None:
    if kind == "proof":
        return RecordingLanes(SequentialLanes())
    return ThreadLanes(seed=dist.get_rank(), longest_delay_ms=0.3) if kind == "threads" else None


def made(
    stages: int,
    groups: bool = False,
    microbatches: int = MICROBATCHES,
    checkpointed: bool = False,
    experts: int = 0,
    **options: Any,
) -> ot.Pipeline:
    shape = (stages, dist.get_world_size() // stages)
    model = model_of(experts=experts, checkpointed=checkpointed)
    return ot.pipeline(
        model,
        init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")),
        ot.AdamW(lr=1e-2),
        example=torch.zeros(ROWS, 16, dtype=torch.int64),
        microbatches=microbatches,
        loss_fn=loss_of,
        schedule="2bw",
        params=decay(model) if groups else None,
        device="cpu",
        **options,
    )


def unflushed(
    stages: int,
    lanes: str = "",
    synchronized: int = 0,
    skipped: int = 0,
    paused: int = 0,
    **options: Any,
) -> Told:
    """The run of `one_process` without a flush, but for one behind the step `synchronized`.

    Args:
        paused: the step behind which nothing is in flight, and the delay goes on.
    """
    chosen = lanes_of(lanes)
    with on_lanes(chosen) if chosen else nullcontext():
        pipeline = made(stages, **options)
    optimizer, losses, reports = pipeline.optimizers[0], [], []
    replicas = pipeline.replicas
    for number, (tokens, targets) in enumerate(batches(replicas.size), 1):
        tokens, targets = (x.chunk(replicas.size)[replicas.rank] for x in (tokens, targets))
        losses.append(pipeline.run(tokens, target=targets))
        reports.append(optimizer.last_step)
        pipeline.step(skip=number == skipped)
        if number in (synchronized, paused):
            losses.append(pipeline.drain(newest=number == synchronized))
            reports.append(optimizer.last_step)
    losses.append(pipeline.drain())
    reports.append(optimizer.last_step)
    told = list({id(one): one for one in reports if one is not None}.values())
    known = [one for one in losses if one is not None and not one.isnan().any()]
    steps = [of_step(report, one) for one, report in zip(known, told, strict=True)]
    spec = optimizer._engine.program.spec
    on_host, planned = booked(optimizer, Tier.HOST), host_owners(spec)
    if spec.moves_inputs:  # whose size shows in the first forward, and with it their padding
        assert on_host.pop(spec.config.activations.moved) > 0
        on_host.pop("padding", 0), planned.pop("padding", 0)
    assert on_host == planned
    assert booked(optimizer, Tier.DEVICE) == device_owners(spec)
    on_device, on_host = device_owners(spec), host_owners(spec)
    kept = [on_device.get("working weights", 0), on_host.get("gradient sums", 0)]
    found = masters(optimizer)
    pipeline.close()
    faults = prove(chosen.program) if isinstance(chosen, RecordingLanes) else []
    numel = sum(bucket.shard_numel for bucket in spec.buckets)
    return {"steps": steps, "masters": found, "faults": faults, "kept": kept, "numel": numel}


def booked(optimizer: ot.OffloadOptimizer, tier: Tier) -> dict[str, int]:
    return {row.owner: row.bytes for row in optimizer.ledger.rows() if row.tier == tier.value}


def assert_same(ranks: Run, size: int, replicas: int, **options: Any) -> list[Told]:
    plain = {key: value for key, value in options.items() if key not in ("lanes", "paused")}
    whole = ranks(replicas, one_process, update="delayed", **plain)
    of_stages = ranks(size, unflushed, size // replicas, **options)
    together: dict[str, Any] = {}
    for rank, found in enumerate(of_stages):
        assert found["steps"] == whole[rank % replicas]["steps"], f"rank {rank}"
        assert not found["faults"]
        together |= found["masters"]
    assert together.keys() == whole[0]["masters"].keys()
    for name, value in whole[0]["masters"].items():
        assert (together[name] == value).all(), name
    return of_stages


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_it_is_delayed_of_one_process(ranks: Run, size: int) -> None:
    """Losses, norms, coefficients and masters; the program of each stage has no race. Two versions
    of 2 bytes on all stages but the last, two sums of 4 bytes on all but the first."""
    of_stages = assert_same(ranks, size, 1, clip_norm=0.3, lanes="proof")
    for stage, found in enumerate(of_stages):
        versions, sums = 1 + (stage < size - 1), 1 + (stage > 0)
        assert found["kept"] == [2 * versions * found["numel"], 4 * sums * found["numel"]]


STREAMED = {"working": "host"}
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"groups": True, "precision": "fp32", "lanes": "threads"}),
    (2, 1, {"clip_norm": 0.3, "skipped": 2, "state": "split16", "lanes": "proof"}),
    (2, 1, {"synchronized": 2, "state_on": "device", "lanes": "proof"}),
    (4, 2, {"clip_norm": 0.3, "lanes": "proof"}),
    (2, 1, {"paused": 1, "lanes": "proof"}),
    (4, 2, {"paused": 2, "skipped": 1, "state_on": "device", "lanes": "threads"}),
    (4, 1, {"activation": "recompute", "clip_norm": 0.3, "lanes": "proof"}),
    (4, 2, {"activation": "offload", "skipped": 1, "lanes": "threads"}),
    (2, 1, {"checkpointed": True, "clip_norm": 0.3, "lanes": "proof"}),
    (4, 1, {"precision": "fp16", "clip_norm": 0.3, "lanes": "proof"}),
    (2, 1, {**STREAMED, "paused": 1, "device_slots": 1, "lanes": "threads"}),
    (4, 1, {**STREAMED, "state": "split16", "activation": "recompute", "lanes": "proof"}),
    (4, 2, {**STREAMED, "clip_norm": 0.3, "skipped": 2, "lanes": "proof"}),
]
MORE: list[tuple[int, int, dict[str, Any]]] = [
    (4, 1, {"lanes": "threads", "skipped": 1, "state": "int8"}),
    (2, 1, {"sums_on": "device", "clip_norm": 0.3, "lanes": "proof"}),
    (2, 1, {"activation": "recompute", "paused": 1, "precision": "fp32", "lanes": "proof"}),
    (4, 1, {"activation": "recompute", "recompute_blocks": 1}),
    (2, 1, {"activation": "offload", "state_on": "device", "lanes": "proof"}),
    (4, 1, {"activation": "offload_saved", "offload_saved_above": 0, "lanes": "proof"}),
    (4, 2, {"zero_stage": 1, "reduction": "fp32", "lanes": "threads"}),
    (2, 1, {**STREAMED, "checkpointed": True, "precision": "fp32", "lanes": "proof"}),
    (4, 1, {**STREAMED, "state": "int8", "activation": "offload", "synchronized": 2}),
    (4, 1, {**STREAMED, "activation": "offload_saved", "offload_saved_above": 0}),
    (2, 1, {**STREAMED, "resident_blocks": 1, "groups": True, "lanes": "proof"}),
    (2, 1, {**STREAMED, "experts": 4, "clip_norm": 0.3, "state": "split16", "lanes": "proof"}),
    (4, 2, {"zero_stage": 3, "paused": 1, "clip_norm": 0.3, "lanes": "proof"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "replicas", "options"),
    [
        *(pytest.param(*one, id=in_words(one)) for one in CASES),
        *(pytest.param(*one, id=in_words(one), marks=pytest.mark.long) for one in MORE),
    ],
)
def test_everywhere(ranks: Run, size: int, replicas: int, options: dict[str, Any]) -> None:
    """State formats and placements, skipped steps, a flush between steps, replicas."""
    assert_same(ranks, size, replicas, **options)


def order(stages: int) -> str:
    """What a stage does: F and B of each microbatch, | where a run ends."""
    pipeline, seen = made(stages), []
    model = pipeline.optimizers[0].model
    model.register_forward_pre_hook(lambda *_: seen.append("F"))
    last = next(p for p in model.parameters() if p.requires_grad)
    last.register_post_accumulate_grad_hook(lambda _: seen.append("B"))
    for tokens, targets in batches()[:2]:
        pipeline.run(tokens, target=targets)
        pipeline.step()
        seen.append("|")
    pipeline.drain()
    pipeline.close()
    return "".join(seen)


@pytest.mark.slow
def test_stages_do_not_wait_between_steps(ranks: Run) -> None:
    """Forwards of the second step come before the last backwards of the first one."""
    found = ranks(2, order, 2)
    assert found == ["FFBFBFB|FBFBFBFB|B", "FBFBFBFB|FBFBFBFB|"]


def refused(stages: int) -> list[str]:
    """The messages of what cannot be done with microbatches in flight."""
    pipeline, found = made(stages), []
    (tokens, targets), *_ = batches()
    optimizer = pipeline.optimizers[0]
    pipeline.run(tokens, target=targets)
    calls = [
        lambda: pipeline.run(tokens, target=targets),
        pipeline.drain,
        lambda: [pipeline.step(), pipeline.step()],
        lambda: pipeline.evaluate(tokens[:ROWS], target=targets[:ROWS]),
        optimizer.synchronize,
        optimizer.state_dict,
        optimizer.step,
        optimizer.zero_grad,
    ]
    for call in calls:
        with pytest.raises((EngineError, PipelineError)) as told:
            call()
        found.append(str(told.value))
    pipeline.drain()
    assert pipeline.drain() is None
    loss = pipeline.evaluate(tokens[:ROWS], target=targets[:ROWS])
    pipeline.close()
    return [*found, str(bool(loss.isfinite()))]


@pytest.mark.slow
def test_what_is_in_flight_is_told(ranks: Run) -> None:
    for told in ranks(2, refused, 2):
        run, drain, twice, evaluate, *others, evaluated = told
        assert "end the step first" in run and "end the step first" in drain and "twice" in twice
        assert "drain() first" in evaluate and evaluated == "True"
        assert all("pipeline.drain()" in one for one in others)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"update": "speculative"}, "update = 'speculative'"),
    ({"update": "delayed", "warmup_steps": 2}, "warmup_steps = 2"),
    ({"working": "disk"}, "working = 'disk'"),
    ({"microbatches": 1}, "1 microbatches and 2 stages"),
]


def all_refused(stages: int) -> list[str]:
    found = []
    for options, _ in BAD:
        with pytest.raises(PipelineError) as told:
            made(stages, **options)
        found.append(str(told.value))
    return found


@pytest.mark.slow
def test_what_does_not_compose_is_refused_by_name(ranks: Run) -> None:
    for told in ranks(2, all_refused, 2):
        for message, (_, what) in zip(told, BAD, strict=True):
            assert what in message


def closed_in_flight(precision: str, steps: bool) -> bool:
    pipeline = made(dist.get_world_size(), precision=precision, clip_norm=0.3)
    for number, (tokens, targets) in enumerate(batches(1)):
        pipeline.run(tokens, target=targets)
        if not steps and number == 1:
            break
        pipeline.step()
    pipeline.close()
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "steps"), [("bf16", True), ("bf16", False), ("fp16", True)])
def test_a_close_with_a_step_in_flight_ends(ranks: Run, precision: str, steps: bool) -> None:
    """It ends the step first: other stages would wait for its gradients and squares."""
    assert ranks(2, closed_in_flight, precision, steps) == [True] * 2
