"""Block inputs kept in parts among the ranks of tensor parallel (ZeRO-R Pa and Pa+cpu)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.engine.autograd.offload import ActivationError
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.program.operations import Kind, Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Launched
from tests.distributed.conftest import Run
from tests.distributed.test_tensor_parallel import VOCABULARY, WIDTH, Llama, plan
from tests.step.specs import chain

ROWS, LENGTH, LAYERS = 4, 16, 3
OURS = (Kind.FORWARD, Kind.BACKWARD, Kind.DECIDE)


def trained(parts: int, accum: int = 1, lanes: str = "proof", **options: Any) -> dict[str, Any]:
    """Three steps in so many parts; what this rank has come to, holds and sends."""
    torch.manual_seed(0)
    replicas = dist.get_world_size() // parts
    mesh = init_device_mesh("cpu", (replicas, parts), mesh_dim_names=("dp", "tp"))
    model = Llama()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan())
    chosen: Lanes = RecordingLanes(SequentialLanes())
    if lanes == "threads":
        chosen = ThreadLanes(seed=dist.get_rank(), longest_delay_ms=0.5)
    with on_lanes(chosen):
        optimizer = ot.offload(
            model,
            ot.AdamW(lr=1e-2),
            device="cpu",
            mesh=mesh,
            clip_norm=0.5,
            grad_accum_steps=accum,
            **options,
        )
    found, generator = [], torch.Generator().manual_seed(7)
    for _ in range(3):
        start = len(chosen.program) if isinstance(chosen, RecordingLanes) else 0
        for _ in range(accum):
            tokens = torch.randint(
                0, VOCABULARY, (ROWS * replicas, LENGTH + 1), generator=generator
            )
            tokens = tokens.chunk(replicas)[dist.get_rank() // parts]
            logits = model(tokens[:, :-1]).float().flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
            optimizer.backward(loss)
            found.append(loss.item())
        optimizer.step()
        report = optimizer.last_step
        assert report is not None
        found.append(report.grad_norm)
    masters = [value.clone() for _, value in optimizer.master_weights()]
    inputs = {r.tier: r.bytes for r in optimizer.ledger.rows() if r.owner == "block inputs"}
    spec, rank = optimizer._engine.program.spec, optimizer.ranks.rank
    optimizer.close()
    told: dict[str, Any] = {"losses": found, "masters": masters, "inputs": inputs}
    told["comm"] = report.comm_bytes
    if isinstance(chosen, RecordingLanes):
        told["faults"] = prove(chosen.program)
        told["launched"] = [e.name for e in chosen.program[start:] if isinstance(e, Launched)]
        told["driven"] = _inputs_of(Program(spec, rank, dist.get_rank() % parts))
    return told


def _inputs_of(program: Program) -> list[str]:
    """What a driven step does with inputs."""
    launches = [op for op in steps(program, 1, input_bytes=64) if isinstance(op, Launch)]
    return [op.name for op in launches if op.name in MOVES]


MOVES = ("offload input", "fetch input", "keep input", "fetch part", "gather input")


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert all(torch.equal(a, b) for a, b in zip(one["masters"], other["masters"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "tier"), [("recompute", "device"), ("offload", "host")])
def test_same_bits_in_parts_of_the_bytes(ranks: Run, activation: str, tier: str) -> None:
    whole = ranks(2, trained, 2, activation=activation)
    parts = ranks(2, trained, 2, activation=activation, partition_activations=True)
    of_input = ROWS * LENGTH * WIDTH * 2
    for one, other in zip(whole, parts, strict=True):
        assert_same(one, other)
        assert other["faults"] == []
        assert other["inputs"] == {tier: LAYERS * of_input // 2}
        assert other["comm"] - one["comm"] == LAYERS * of_input // 2
        moved = [name for name in other["launched"] if name in MOVES]
        assert moved == other["driven"] and moved.count("gather input") == LAYERS
    if activation == "offload":
        assert whole[0]["inputs"] == {tier: LAYERS * of_input}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parts", "options"),
    [
        (2, 2, {"activation": "offload", "accum": 2, "lanes": "threads"}),
        (2, 2, {"activation": "recompute", "working": "host", "lanes": "threads"}),
        (4, 2, {"activation": "offload", "zero_stage": 3, "update": "speculative"}),
        pytest.param(4, 4, {"activation": "recompute", "accum": 2}, marks=pytest.mark.long),
    ],
)
def test_with_other_placements_and_replicas(
    ranks: Run, size: int, parts: int, options: dict[str, Any]
) -> None:
    whole = ranks(size, trained, parts, **options)
    divided = ranks(size, trained, parts, partition_activations=True, **options)
    for one, other in zip(whole, divided, strict=True):
        assert_same(one, other)
        assert not other.get("faults")


@pytest.mark.parametrize("activation", ["recompute", "offload"])
def test_what_the_ranks_do_not_divide_is_kept_whole(activation: str) -> None:
    program = Program(replace(chain(1, activation=activation), input_parts=3), part=2)
    for number, (numel, kept, gathers) in enumerate([(100, 100, 0), (99, 33, 1)]):
        done = program.activation_saved(number, numel, "bfloat16")
        done += program.activation_needed(number) + program.activation_dropped(number)
        launches = [op for op in done if isinstance(op, Launch)]
        (source,), (buffer,) = launches[0].reads, launches[0].writes
        assert (source.lo, source.hi, buffer.hi) == (numel - kept, numel, kept)
        assert sum(op.kind is Kind.GATHER_INPUT for op in launches) == gathers


def different() -> str:
    """Each rank has inputs of its own, as with sequence parallel."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Llama()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan())
    keys: dict[str, Any] = {"activation": "offload", "partition_activations": True}
    optimizer = ot.offload(model, device="cpu", mesh=mesh, **keys)
    try:
        model(torch.full((2, 4), dist.get_rank()))
    except ActivationError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.slow
def test_inputs_that_differ_are_refused(own_ranks: Run) -> None:
    for told in own_ranks(2, different):
        assert "differs among the 2 ranks of 'tp'" in told and "sequence parallel" in told


def test_without_ranks_that_could_keep_parts() -> None:
    with pytest.raises(OptionError, match=r"partition_activations .* an axis 'tp'"):
        ot.offload(Llama(), device="cpu", activation="offload", partition_activations=True)
    with pytest.raises(OptionError, match=r"partition_activations .* 'keep'"):
        ot.offload(Llama(), device="cpu", partition_activations=True)
