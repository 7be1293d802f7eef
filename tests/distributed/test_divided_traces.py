"""The trace of a model of transformers that ranks divide, and what a plan decides by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.config.batch_split import of_stage, shared
from offloadtrain.config.job import Config
from offloadtrain.hardware.machine import find
from offloadtrain.plan.automatic import FULL
from offloadtrain.plan.costs.microbatch import TracedStep
from offloadtrain.plan.placement import resolved
from offloadtrain.plan.plan import make
from offloadtrain.train.build import needed_trace, tracer_of
from tests.distributed.rank_jobs import job_of, save_hf_model
from tests.train.small_job import write_text

pytest.importorskip("transformers")

AGAIN = {"offload.activation": '"recompute"', "offload.recompute_blocks": '"auto"'}
TENSOR, PIPELINE = {"ranks.tensor": 2}, {"ranks.pipeline": 2}


def traced(folder: Path, kind: str, **changes: Any) -> list[TracedStep]:
    """Of each stage; of one process, or a part, of itself."""
    _, machine = find("cpu2")
    job = job_of(folder, hf=kind, **changes)
    ranks = job.ranks.pipeline * job.ranks.tensor
    trace, of_rank = tracer_of(job, machine, ranks), shared(resolved(job, machine), ranks)
    if job.ranks.pipeline == 1:
        return [trace(of_rank)]
    return [trace(of_stage(of_rank, number)) for number in range(job.ranks.stages)]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"train.chunked_loss": "true"}])
def test_stages_compute_what_the_undivided_model_does(tmp_path: Path, more: dict[str, Any]) -> None:
    """The same blocks with the same work, and saved activations that add up."""
    write_text(tmp_path)
    save_hf_model(tmp_path, "Qwen3")
    (undivided,) = traced(tmp_path, "Qwen3", **more)
    first, last = traced(tmp_path, "Qwen3", **PIPELINE, **more)
    assert [*first.blocks, *last.blocks] == [*undivided.blocks]
    layers = [name for name in undivided.blocks if "layers" in name]
    for name, cost in (first.blocks | last.blocks).items():
        expected = undivided.blocks[name]
        if name in layers:
            assert cost.forward.products == expected.forward.products, name
            assert cost.backward.products == expected.backward.products, name
    assert first.flops + last.flops == pytest.approx(undivided.flops, rel=1e-9)
    of_layers = first.activations.saved + last.activations.saved
    assert of_layers == pytest.approx(undivided.activations.saved, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3", "Phi3"])
def test_a_part_computes_half_of_the_products(tmp_path: Path, kind: str) -> None:
    """Of the weights of layers; head and embedding are not divided, nor is what is gathered."""
    write_text(tmp_path)
    save_hf_model(tmp_path, kind)
    (undivided,), (part,) = traced(tmp_path, kind), traced(tmp_path, kind, **TENSOR)

    def flops(step: TracedStep, layer: bool) -> float:
        costs = [cost for name, cost in step.blocks.items() if ("layers" in name) == layer]
        return sum(sum(cost.forward.products.values()) for cost in costs)

    assert flops(part, False) == flops(undivided, False)
    assert flops(part, True) == pytest.approx(flops(undivided, True) / 2, rel=1e-9)
    share = part.activations.saved / undivided.activations.saved
    assert 0.5 < share < (0.85 if kind == "Qwen3" else 1.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "counts"),
    [
        ("Qwen3", {}, range(5)),
        ("Qwen3", TENSOR, (0, 4)),
        ("Phi3", TENSOR, (1,)),
        ("Qwen3", PIPELINE, (1, 2)),
    ],
)
def test_how_many_layers_run_again(
    tmp_path: Path, kind: str, ranks: dict[str, Any], counts: Sequence[int]
) -> None:
    """Of each number of layers with a device that just holds it; of a stage the layers of each."""
    write_text(tmp_path)
    save_hf_model(tmp_path, kind)
    changes = AGAIN | {"train.micro_batch": 8, "device.kind": '"auto"'} | ranks
    open_ = job_of(tmp_path, hf=kind, **changes)
    (name, machine), size = find("rtx4090"), 2 if ranks else 1
    trace = needed_trace(open_, machine, size)
    assert trace is not None
    for count in counts:
        fixed = with_blocks(open_, count)
        assert ranks or needed_trace(fixed, machine, size) is None
        used = sum(make(fixed, name, machine, size, trace).device.values())
        room = int(used / FULL) + 1024 + machine.gpu_reserved_bytes
        tight = replace(machine, gpu_memory=f"{room / 1024:.0f} KiB")
        plan = make(open_, name, tight, size, trace)
        assert plan.job.offload.activations.recompute_blocks == count


def with_blocks(job: Config, count: int) -> Config:
    return replace(job, offload=job.offload.replace(recompute_blocks=count))
