"""Experts divided among ranks: tokens travel, gradients are summed where the same experts are."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.engine.local_part import local
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.process_group import all_gather_single, reduce_scatter_single
from offloadtrain.step.proof.prove import prove
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import save
from tests.distributed.conftest import Run
from tests.distributed.test_pipeline_misuse import told
from tests.distributed.test_ranks import Heard

SHAPE = ModelShape(
    vocab_size=61,
    num_layers=2,
    d_model=32,
    num_heads=2,
    d_ff=48,
    max_seq_len=16,
    num_experts=4,
    router_aux_loss_coef=0.01,
)
STEPS, LR = 3, 1e-2


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "ep")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def made(shape: ModelShape = SHAPE) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(shape)
    for name, param in model.named_parameters():
        nn.init.normal_(param, 1.0 if "norm" in name else 0.0, 0.15)
    return model


def batch(step: int, micro: int = 0, rank: int | None = None) -> Tensor:
    """(2, 13) tokens, other ones on every rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randint(0, SHAPE.vocab_size, (2, 13), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


def trained(
    dp: int,
    ep: int,
    *,
    shape: ModelShape = SHAPE,
    model: Transformer | None = None,
    proof: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Some steps; what this rank has come to, experts put together. `ep` = 0: without a mesh."""
    model = model or made(shape)
    mesh = mesh_of(dp, ep) if ep else None
    if mesh is not None:
        ot.expert_parallel(model, mesh)
    chosen: dict[str, Any] = {"precision": "fp32", "clip_norm": 0.05} | options
    lanes = RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(model, ot.AdamW(lr=LR), device="cpu", mesh=mesh, **chosen)
    steps = []
    for step in range(STEPS):
        losses = []
        for micro in range(chosen.get("grad_accum_steps", 1)):
            loss = loss_of(model, batch(step, micro))
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        report = optimizer.last_step
        assert report is not None and not report.skipped
        steps.append((losses, report.grad_norm, report.clip_coef))
    held = {row.owner: row.bytes for row in optimizer.ledger.rows()}
    masters = whole_masters(optimizer, mesh)
    experts = sum(local(p).numel() for n, p in model.named_parameters() if "experts" in n)
    optimizer.close()
    return {
        "steps": steps,
        "masters": {name: value.numpy() for name, value in masters.items()},
        "held": held.get("master weights", 0),  # split16 has none
        "experts": experts,
        "faults": prove(lanes.program) if proof else [],
    }


def whole_masters(optimizer: ot.OffloadOptimizer, mesh: DeviceMesh | None) -> dict[str, Tensor]:
    placed = dict(optimizer.model.named_parameters())
    found = {}
    for name, value in optimizer.master_weights():
        found[name] = value.clone()
        if isinstance(placed[name], DTensor):
            assert mesh is not None
            parts = [torch.empty_like(value) for _ in range(mesh["ep"].size())]
            dist.all_gather(parts, value.contiguous(), group=mesh["ep"].get_group())
            found[name] = torch.cat(parts)
    return found


def worst_of(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(abs(value - other["masters"][n]).max()) for n, value in one["masters"].items())


@pytest.mark.parametrize(
    ("dp", "ep", "options"),
    [
        (1, 2, {}),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"grad_accum_steps": 2}, marks=pytest.mark.slow),
        pytest.param(1, 4, {"activation": "recompute"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"grad_accum_steps": 2, "zero_stage": 1}, marks=pytest.mark.slow),
    ],
)
def test_near_all_experts_on_every_rank(
    ranks: Run, dp: int, ep: int, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One difference: the gradient of an expert sums the tokens of `ep` ranks in one product, where
    plain ranks make a product each and add them."""
    plain = ranks(dp * ep, trained, 1, 0, **options)
    divided = ranks(dp * ep, trained, dp, ep, proof=True, **options)
    assert [one["faults"] for one in divided] == [[]] * dp * ep
    worst = max(map(worst_of, divided, plain))
    norms = [
        abs(a[1] / b[1] - 1) for a, b in zip(divided[0]["steps"], plain[0]["steps"], strict=True)
    ]
    with capsys.disabled():
        print(
            f"\ndp {dp} x ep {ep} {options}: the worst master differs by {worst:.2g}, "
            f"the worst norm by {max(norms):.2g} of itself"
        )
    # A hundredth of a step; experts summed over all ranks, or scaled by dp alone, are a step off.
    assert worst < 0.01 * LR
    assert max(norms) < 1e-5
    for one, other in zip(divided, plain, strict=True):
        assert one["steps"][0][0] == other["steps"][0][0]  # forward has the same bits
        assert one["steps"][0][2] < 0.9  # it clips
        assert one["steps"][0][1:] == divided[0]["steps"][0][1:]
        assert one["experts"] * ep == other["experts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"state_on": "device"},
        {"zero_stage": 1},
        {"activation": "recompute"},
        {"activation": "offload"},
        {"update": "speculative"},
        {"reduction": "fp32"},
        {"zero_stage": 3},
        {"zero_stage": 3, "state_on": "device", "activation": "offload"},
        {"working": "host", "activation": "recompute", "device_slots": 1},
        {"working": "host", "update": "speculative"},
    ],
)
@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (2, 2)])
def test_placements_and_modes_change_no_bit(
    ranks: Run, dp: int, ep: int, options: dict[str, Any]
) -> None:
    plain = ranks(dp * ep, trained, dp, ep)
    other = ranks(dp * ep, trained, dp, ep, proof=True, **options)
    for one, found in zip(plain, other, strict=True):
        assert found["steps"] == one["steps"] and not found["faults"]
        assert worst_of(found, one) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "options"),
    [
        ({"precision": "bf16"}, {"activation": "recompute"}),
        ({"precision": "bf16", "state": "split16"}, {"activation": "offload"}),
        ({"precision": "fp16"}, {"update": "speculative"}),
        ({"update": "delayed"}, {"activation": "recompute"}),
        ({"grad_accum_steps": 2}, {"sums_on": "device"}),
        ({}, {"activation": "offload_saved", "offload_saved_above": 0}),
        ({}, {"state_on": "disk"}),
        ({}, {"state_on": "disk", "working": "disk"}),
        ({"precision": "bf16", "state": "split16"}, {"zero_stage": 3, "activation": "recompute"}),
        ({"precision": "fp16", "update": "delayed"}, {"working": "host"}),
        ({"shape": replace(SHAPE, num_layers=1)}, {"zero_stage": 3}),
        ({"shape": replace(SHAPE, num_layers=1)}, {"working": "host"}),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_formats_and_modes_change_no_bit(
    ranks: Run, tmp_path: Path, both: dict[str, Any], options: dict[str, Any]
) -> None:
    on_disk = {"scratch_dir": f"{tmp_path}"} if "state_on" in options else {}
    plain = ranks(2, trained, 1, 2, **both)
    other = ranks(2, trained, 1, 2, proof=True, **both, **options, **on_disk)
    for one, found in zip(plain, other, strict=True):
        assert found["steps"] == one["steps"] and not found["faults"]
        assert worst_of(found, one) == 0.0


def against_resident(dp: int, ep: int, *, accum: int, stage: int = 2) -> None:
    """A plain loop: gradients summed over whom they are due to, torch's AdamW of whole masters."""
    mesh = mesh_of(dp, ep)
    model, twin = made(), made()
    ot.expert_parallel(model, mesh)
    ot.expert_parallel(twin, mesh)
    options = {"precision": "fp32", "grad_accum_steps": accum, "zero_stage": stage}
    optimizer = ot.offload(model, ot.AdamW(lr=LR), device="cpu", mesh=mesh, **options)
    trained_by = dict(twin.named_parameters())
    masters = {name: local(p).detach().clone() for name, p in trained_by.items()}
    adam = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=0.01, fused=True)
    buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
    for step in range(STEPS):
        sums = {name: torch.zeros_like(value) for name, value in masters.items()}
        for micro in range(accum):
            loss = loss_of(model, batch(step, micro))
            optimizer.backward(loss)
            own = loss_of(twin, batch(step, micro))
            assert own.item() == loss.item()
            (own / accum).backward()
            for bucket in buckets:
                of_experts = {"experts" in slot.name for slot in bucket.slots}
                assert len(of_experts) == 1
                group = mesh["dp"].get_group() if of_experts.pop() else dist.group.WORLD
                whole = torch.zeros(bucket.numel)
                for slot in bucket.slots:
                    slot.view(whole).copy_(local(trained_by[slot.name].grad))
                    trained_by[slot.name].grad = None
                if group.size() > 1:
                    part = torch.empty(bucket.numel // group.size())
                    reduce_scatter_single(part, whole, group=group)
                    all_gather_single(whole, part, group=group)
                for slot in bucket.slots:
                    sums[slot.name] += slot.view(whole)
        optimizer.step()
        for name, value in masters.items():
            value.grad = sums[name] / (dp * ep)
        adam.step()
        for name, value in masters.items():
            local(trained_by[name]).data.copy_(value)
    found = dict(optimizer.master_weights())
    for name, value in masters.items():
        assert torch.equal(found[name], value), name
    optimizer.close()


@pytest.mark.parametrize(
    ("dp", "ep", "accum", "stage"),
    [
        (1, 2, 1, 2),
        pytest.param(2, 2, 2, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, 3, marks=pytest.mark.slow),
    ],
)
def test_bits_of_resident_ranks(ranks: Run, dp: int, ep: int, accum: int, stage: int) -> None:
    ranks(dp * ep, against_resident, dp, ep, accum=accum, stage=stage)


def same_choice(dp: int, ep: int) -> dict[str, Any]:
    """Every token goes to the first expert, which the first rank has."""
    shape = replace(SHAPE, experts_per_token=1, router_aux_loss_coef=0.0)
    model = made(shape)
    chosen: list[int] = []
    first = torch.tensor([9.0, 0.0, 0.0, 0.0])
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda _, given, logits: logits + first)
        block.mlp.experts.register_forward_pre_hook(
            lambda _, given: chosen.append(int(given[1][0]))
        )
    found = trained(dp, ep, shape=shape, model=model)
    assert chosen == [24] * len(chosen) and chosen
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ep", [2, 4])
def test_all_tokens_to_one_expert(ranks: Run, ep: int) -> None:
    """The other ranks get no row in any layer, send what they have, and train the rest alike."""
    plain, divided = ranks(ep, same_choice, 1, 0), ranks(ep, same_choice, 1, ep)
    assert max(map(worst_of, divided, plain)) < 0.01 * LR
    for one, other in zip(divided, plain, strict=True):
        assert one["steps"][0][0] == other["steps"][0][0]


def saved(folder: Path, dp: int, ep: int, **options: Any) -> dict[str, Any]:
    model, mesh = made(), mesh_of(dp, ep) if ep else None
    if mesh is not None:
        ot.expert_parallel(model, mesh)
    given = {"precision": "fp32"} | options
    optimizer = ot.offload(model, ot.AdamW(lr=LR), device="cpu", mesh=mesh, **given)
    for step in range(2):
        optimizer.backward(loss_of(model, batch(step)))
        optimizer.step()
    optimizer.synchronize()
    save(folder, 2, model, optimizer, {"step": 2}, ranks=optimizer.ranks)
    return ended(model, optimizer, mesh)


def loaded(folder: Path, dp: int, ep: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    model, mesh = Transformer(SHAPE), mesh_of(dp, ep) if ep else None
    if mesh is not None:
        ot.expert_parallel(model, mesh)
    given = {"precision": "fp32"} | options
    optimizer = ot.offload(model, ot.AdamW(lr=LR), device="cpu", mesh=mesh, **given)
    found = checkpoint.newest_good(folder, refuse, optimizer.ranks)
    assert found is not None
    restore(found, model, optimizer)
    optimizer.finish_load(step=2)
    return ended(model, optimizer, mesh)


def refuse(path: Path, damage: Exception) -> None:
    raise damage


def ended(model: nn.Module, optimizer: Any, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Masters, moments of this rank's shards by where they are in the whole, and a loss."""
    masters = {n: v.numpy() for n, v in whole_masters(optimizer, mesh).items()}
    moments = {
        (name, own.lo): own.fields["exp_avg_sq"][0].tolist()
        for name, pieces in optimizer.own_states().items()
        for own in pieces
    }
    with torch.no_grad():
        loss = loss_of(model, batch(0, rank=0)).item()
    optimizer.close()
    return {"masters": masters, "moments": moments, "loss": loss}


def moments_of(of_ranks: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Those of all ranks, in the order of elements."""
    found: dict[str, dict[int, list[float]]] = {}
    for one in of_ranks:
        for (name, lo), values in one["moments"].items():
            if values:
                found.setdefault(name, {})[lo] = values
    return {n: [x for lo in sorted(at) for x in at[lo]] for n, at in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrote", "reads", "first", "then"),
    [
        ((1, 2), (1, 2), {}, {}),
        ((1, 2), (1, 0), {}, {}),
        ((2, 2), (1, 0), {}, {}),
        ((2, 2), (1, 2), {}, {}),
        ((1, 0), (2, 2), {}, {}),
        ((2, 2), (1, 2), {"zero_stage": 3}, {}),
        ((1, 2), (2, 2), {}, {"zero_stage": 3}),
        ((2, 2), (1, 0), {"working": "host"}, {"working": "host"}),
        ((1, 2), (2, 2), {"working": "host"}, {"zero_stage": 3}),
    ],
)
def test_checkpoints_are_those_of_the_whole_model(
    ranks: Run,
    tmp_path: Path,
    wrote: tuple[int, int],
    reads: tuple[int, int],
    first: dict[str, Any],
    then: dict[str, Any],
) -> None:
    before = ranks(max(1, wrote[0] * wrote[1]), saved, tmp_path, *wrote, **first)
    after = ranks(max(1, reads[0] * reads[1]), loaded, tmp_path, *reads, **then)
    assert moments_of(after) == moments_of(before)
    for one in after:
        assert worst_of(one, before[0]) == 0.0
        assert one["loss"] == pytest.approx(before[0]["loss"], rel=1e-6)


def refusals() -> dict[str, str]:
    found = {}
    model = made(replace(SHAPE, num_experts=3))
    found["divisible"] = told(lambda: ot.expert_parallel(model, mesh_of(1, 2)))
    found["axes"] = told(lambda: ot.expert_parallel(made(), mesh_of(2, names=("dp",))))
    dense = made(replace(SHAPE, num_experts=0, router_aux_loss_coef=0.0))
    found["none"] = told(lambda: ot.expert_parallel(dense, mesh_of(1, 2)))
    twice = made()
    ot.expert_parallel(twice, mesh_of(1, 2))
    found["twice"] = told(lambda: ot.expert_parallel(twice, mesh_of(1, 2)))
    found["no mesh"] = told(lambda: ot.offload(twice, device="cpu"))
    found["muon"] = told(lambda: ot.offload(twice, ot.Muon(), device="cpu", mesh=mesh_of(1, 2)))
    other = mesh_of(1, 2, names=("tp", "ep"))
    found["tp"] = told(lambda: ot.offload(made(), device="cpu", mesh=other))
    found["undivided"] = told(lambda: ot.offload(made(), device="cpu", mesh=mesh_of(1, 2)))
    late = made()
    optimizer = ot.offload(late, device="cpu")
    found["late"] = told(lambda: ot.expert_parallel(late, mesh_of(1, 2)))
    optimizer.close()
    return found


def warned_of_no_checkpoints(state: str) -> tuple[list[str], str]:
    """Return what offload() warns of, and what a save says."""
    model, mesh = made(), mesh_of(1, 2)
    ot.expert_parallel(model, mesh)
    heard, logger = Heard(), logging.getLogger("offloadtrain.engine")
    logger.addHandler(heard)
    optimizer = ot.offload(model, device="cpu", mesh=mesh, state=state, precision="bf16")
    logger.removeHandler(heard)
    refused = told(optimizer.flat_states) if heard.messages else ""
    optimizer.close()
    return heard.messages, refused


@pytest.mark.slow
def test_parts_that_no_checkpoint_can_hold_are_told_at_once(ranks: Run) -> None:
    assert ranks(2, warned_of_no_checkpoints, "split16") == [([], "")] * 2
    for (said,), refused in ranks(2, warned_of_no_checkpoints, "int8"):
        why = refused.removeprefix("PartError: ")
        assert said == f"these weights train, and no checkpoint of them can be saved: {why}"
        assert "state = 'int8' of 'blocks.0.mlp.experts" in refused and "'split16'" in refused


@pytest.mark.slow
def test_misuse_is_refused_by_name(ranks: Run) -> None:
    for said in ranks(2, refusals):
        assert "num_experts = 3 cannot be divided among the 2 ranks" in said["divisible"]
        assert "mesh has the axes 'dp': experts take 'ep'" in said["axes"]
        assert "has no experts" in said["none"]
        assert "divided already" in said["twice"]
        assert "are divided among 2 ranks, and offload() knows of 1" in said["no mesh"]
        assert "Muon updates whole ones" in said["muon"]
        assert "'tp', 'ep': experts take 'ep'" in said["tp"]
        assert "no experts of the model are divided along it: call ot.exp" in said["undivided"]
        assert "expert_parallel after offload()" in said["late"]


def held_in_state_dicts() -> bool:
    model, mesh = made(), mesh_of(1, 2)
    ot.expert_parallel(model, mesh)
    optimizer = ot.offload(model, device="cpu", mesh=mesh, precision="fp32")
    own = dict(model.named_parameters())
    found = {n: torch.equal(local(x), local(own[n])) for n, x in model.state_dict().items()}
    optimizer.close()
    return all(found.values()) and any("experts" in name for name in found)


@pytest.mark.slow
def test_a_state_dict_has_the_experts_of_each_layer(ranks: Run) -> None:
    """A DTensor has no address of its own: those of one shape are not one tensor."""
    assert ranks(2, held_in_state_dicts) == [True, True]
