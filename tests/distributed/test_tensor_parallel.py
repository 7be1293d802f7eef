"""DTensor parameters of `parallelize_module`: parts offloaded, norms counted once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import offloadtrain as ot
from offloadtrain.engine.local_part import local
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.tensor_parts import kept_by_columns
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline_misuse import told
from tests.distributed.test_ranks import Heard

VOCABULARY, WIDTH, HEAD = 64, 32, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        q, k, v = (
            project(x).view(rows, length, -1, HEAD).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(rows, length, -1))


class Layer(nn.Module):
    """As Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan() -> dict[str, Any]:
    """Megatron-LM's: matrices into heads and hidden units by columns, those out of them by rows."""
    columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
    rows = ("attention.o", "down")
    return dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())


def of_sequences() -> dict[str, Any]:
    """Between the matrices each rank has a part of the sequence, which its norms work on."""
    into: dict[str, Any] = dict.fromkeys(("norm", "mlp_norm"), SequenceParallel())
    into["attention"] = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    columns = dict.fromkeys(("gate", "up"), ColwiseParallel(input_layouts=Shard(1)))
    rows = dict.fromkeys(("attention.o", "down"), RowwiseParallel(output_layouts=Shard(1)))
    return into | plan() | columns | rows


def outside_of_layers() -> dict[str, Any]:
    """Embedding and head in parts of the vocabulary."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def trained(
    parts: int,
    replicas: int = 1,
    proof: bool = False,
    sequence: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Three steps in so many parts; what this rank has come to."""
    torch.manual_seed(0)
    model, mesh = Llama(), None
    if parts > 1:
        mesh = init_device_mesh("cpu", (replicas, parts), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], of_sequences() if sequence else plan())
        if sequence:
            parallelize_module(model, mesh["tp"], outside_of_layers())
    lanes = RecordingLanes(SequentialLanes())
    chosen: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.5} | options
    with on_lanes(lanes):
        optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", mesh=mesh, **chosen)
    own = dist.get_rank() // parts if parts > 1 else 0
    steps, generator = [], torch.Generator().manual_seed(7)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (4, 17), generator=generator)
        tokens = tokens.chunk(replicas)[own]
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.backward(loss)
        optimizer.step()
        report = optimizer.last_step
        assert report is not None
        steps.append((loss.item(), report.grad_norm, report.clip_coef))
    placed = {
        name: getattr(param.placements[0], "dim", None) if isinstance(param, DTensor) else None
        for name, param in model.named_parameters()
    }
    masters = {name: value.clone() for name, value in optimizer.master_weights()}
    held = {row.owner: row.bytes for row in optimizer.ledger.rows()}
    assert (
        all(
            torch.equal(local(p).float(), masters[n].to(local(p).dtype).float())
            for n, p in model.named_parameters()
        )
        or options.get("update") == "delayed"
    )
    optimizer.close()
    return {
        "steps": steps,
        "masters": {name: value.numpy() for name, value in masters.items()},
        "placed": placed,
        "held": held["master weights"],
        "faults": prove(lanes.program) if proof else [],
    }


def whole(of_ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The masters of all parts, put together."""
    found = {}
    for name, dim in of_ranks[0]["placed"].items():
        parts = [torch.from_numpy(one["masters"][name]) for one in of_ranks]
        if dim is None:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} drifts apart"
        found[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_two_parts(ranks: Run, capsys: pytest.CaptureFixture[str], sequence: bool) -> None:
    """Replicated weights stay equal; the norm is that of one process but for the order of sums."""
    (one,) = ranks(1, trained, 1)
    two = ranks(2, trained, 2, proof=True, sequence=sequence)
    assert [found["faults"] for found in two] == [[], []]
    assert two[0]["steps"] == two[1]["steps"]
    masters = whole(two)
    worst = max(
        float((masters[name] - torch.from_numpy(value)).abs().max())
        for name, value in one["masters"].items()
    )
    with capsys.disabled():
        print(f"\nworst difference of a master to one process after 3 steps: {worst:.2g}")
    assert worst < 1e-3  # a tenth of what one step of lr moves
    for (loss, norm, _), (loss_of_one, norm_of_one, _) in zip(
        two[0]["steps"], one["steps"], strict=True
    ):
        assert loss == pytest.approx(loss_of_one, rel=1e-4)
        assert norm == pytest.approx(norm_of_one, rel=1e-4)
    assert two[0]["held"] < 0.65 * one["held"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"working": "host", "device_slots": 1},
        {"activation": "recompute"},
        {"update": "speculative"},
        {"working": "host", "activation": "offload"},
        {"state_on": "device"},
    ],
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
@pytest.mark.parametrize("sequence", [False, True])
def test_placements_and_modes_change_no_bit(
    ranks: Run, precision: str, sequence: bool, options: dict[str, Any]
) -> None:
    plain = ranks(2, trained, 2, precision=precision, sequence=sequence)
    other = ranks(2, trained, 2, precision=precision, sequence=sequence, proof=True, **options)
    for one, found in zip(plain, other, strict=True):
        assert found["steps"] == one["steps"] and not found["faults"]
        assert all(
            (found["masters"][name] == one["masters"][name]).all() for name in one["masters"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_parts_and_replicas(ranks: Run, sequence: bool) -> None:
    """Two replicas of two parts: the state of each part is shared; near two replicas of one."""
    four = ranks(4, trained, 2, 2, zero_stage=2, sequence=sequence)
    for first in (0, 2):
        assert four[first]["steps"][-1][1:] == four[first + 1]["steps"][-1][1:]
    masters = whole(four[:2])
    (one,) = ranks(1, trained, 1)
    for name, value in one["masters"].items():
        assert (masters[name] - torch.from_numpy(value)).abs().max() < 1e-3, name


def without_mesh() -> str:
    model, mesh = Llama(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, plan())
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return told(lambda: ot.offload(model, device="cpu", process_group=group))


def with_rule(rule: Any) -> str:
    model, mesh = Llama(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, plan())
    return told(lambda: ot.offload(model, rule, device="cpu", mesh=mesh))


@pytest.mark.slow
def test_parts_without_their_mesh_are_refused(ranks: Run) -> None:
    for said in ranks(2, without_mesh):
        assert "'layers.0.attention.q.weight' is a DTensor on 2 ranks, and 1 hold" in said, said
    for rule in (ot.Muon(), ot.LAMB()):
        for said in ranks(2, with_rule, rule):
            expected = f"is a part of a tensor, and {type(rule).__name__} updates whole ones"
            assert expected in said, said


def warned(by_columns: bool) -> list[str]:
    """What is said of a plan whose `RowwiseParallel` divides weights by columns."""
    heard, logger = Heard(), logging.getLogger("offloadtrain.engine")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Llama()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan())
        for module in (layer.attention.o, layer.down) if by_columns else ():
            kept_by_columns(module)
    logger.addHandler(heard)
    ot.offload(model, device="cpu", mesh=mesh).close()
    logger.removeHandler(heard)
    return heard.messages


@pytest.mark.slow
def test_a_division_that_no_checkpoint_can_name_is_told_at_once(ranks: Run) -> None:
    for (message,) in ranks(2, warned, False):
        assert "no checkpoint of them can be saved: 'layers.0.attention.o.weight'" in message
    assert ranks(2, warned, True) == [[], []]
