"""Hybrid sharding: 2 groups of 2 ranks, each group with all the state."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import offloadtrain as ot
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.process_group import RankError
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_ranks import Heard
from tests.distributed.test_sharded import LANES, own_batches, same_start
from tests.numerics.models import MODELS, Chain, loss_of
from tests.numerics.reference import ResidentRun, segment_squares
from tests.numerics.test_offload import DTYPES, train

AXES = ("dp_replicate", "dp_shard")


def hybrid(*sizes: int, names: tuple[str, ...] = AXES) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class HybridRun(ResidentRun):
    """Everything on every rank; gradients of neighbours are added, then those of both pairs."""

    reduction: torch.dtype | None = None
    buckets: list[Any]

    def gathered(self, grad: Tensor) -> Tensor:
        dtype = self.reduction or grad.dtype
        of_ranks = [torch.empty(grad.shape, dtype=dtype) for _ in range(4)]
        dist.all_gather(of_ranks, grad.to(dtype).contiguous())
        summed = (of_ranks[0] + of_ranks[1]) + (of_ranks[2] + of_ranks[3])
        return summed.to(grad.dtype).float()

    def step(self, batches, loss_of) -> list[float]:  # type: ignore[no-untyped-def]
        sums: dict[str, Tensor] = {}
        losses = []
        for batch in batches:
            loss = loss_of(self.model, batch)
            losses.append(loss.item())
            loss = loss / len(batches) if len(batches) > 1 else loss
            (loss * self.scale if self.scale != 1.0 else loss).backward()
            for name, param in self.trained.items():
                grad = self.gathered(torch.zeros_like(param) if param.grad is None else param.grad)
                sums[name] = sums[name] + grad if name in sums else grad
                param.grad = None
        total = 0.0
        for name in self.trained:
            total += self.squares(name, sums[name])
        norm = math.sqrt(total) / (self.scale * 4)
        self.norms.append(norm)
        if not math.isfinite(norm):
            self.skipped += 1
            self.scale /= 2
        else:
            factor = torch.tensor(self.coef(norm) / (self.scale * 4), dtype=torch.float32).item()
            self.update(sums, factor)
        return losses

    def squares(self, name: str, grad: Tensor) -> float:
        """In the order of the two shards."""
        bucket, slot = next((b, s) for b in self.buckets for s in b.slots if s.name == name)
        flat, total = slot.flattened(grad), 0.0
        for lo, hi in bucket.pieces(slot):
            total += segment_squares(flat[lo:hi]) if lo < hi else 0.0
        return total


def compare(
    name: str,
    precision: str = "bf16",
    *,
    lanes: str = "in order",
    accum: int = 1,
    clip: float | None = 0.5,
    steps: int = 3,
    **options: Any,
) -> None:
    torch.manual_seed(dist.get_rank())
    model = MODELS[name]()
    twin = same_start(model)
    chosen = LANES[lanes]()
    chosen.poison = True
    with on_lanes(chosen):
        optimizer = ot.offload(
            model,
            ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
            device="cpu",
            precision=precision,
            mesh=hybrid(2, 2),
            clip_norm=clip,
            grad_accum_steps=accum,
            **options,
        )
    run = HybridRun(twin, DTYPES[precision], clip_norm=clip, scale=optimizer.loss_scale)
    run.buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
    run.reduction = torch.float32 if options.get("reduction") == "fp32" else None
    stream = own_batches(steps * accum)
    micros = [stream[step * accum : (step + 1) * accum] for step in range(steps)]
    expected = [run.step(micro, loss_of) for micro in micros]
    for step, micro in enumerate(micros):
        assert train(optimizer, model, micro) == expected[step], step
        assert optimizer.grad_norm == run.norms[step], step
    assert run.skipped < steps
    for name, master in optimizer.master_weights():
        assert name not in run.trained or torch.equal(master, run.master(name)), name
    optimizer.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain", {"zero_stage": 2, "lanes": "threads"}),
        ("tied", {"zero_stage": 3, "accum": 2}),
        pytest.param("chain", {"zero_stage": 1, "lanes": "late"}, marks=pytest.mark.slow),
        pytest.param(
            "chain",
            {"working": "host", "reduction": "fp32", "lanes": "seeded"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "chain", {"update": "speculative", "clip": 1e9, "steps": 6}, marks=pytest.mark.slow
        ),
        pytest.param("frozen", {"precision": "fp16", "steps": 10}, marks=pytest.mark.slow),
        pytest.param(
            "chain", {"clip": None, "skip_nonfinite": False, "steps": 4}, marks=pytest.mark.slow
        ),
    ],
)
def test_bits_of_resident_ranks(ranks: Run, name: str, options: dict[str, Any]) -> None:
    """Gradients are added within a group, then among groups, in the dtype of the reduction."""
    ranks(4, compare, name, **options)


def trained(
    sizes: tuple[int, int], names: tuple[str, ...] = AXES, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, lanes = Chain(4), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        mesh = hybrid(*sizes, names=names)
        optimizer = ot.offload(model, device="cpu", mesh=mesh, **options)
    stream = own_batches(3)
    losses = [train(optimizer, model, stream[step : step + 1]) for step in range(3)]
    report = optimizer.last_step
    assert report is not None
    elements = sum(b.numel for block in optimizer._blocks for b in block.buckets)
    held = [(row.owner, row.tier, row.bytes) for row in optimizer.ledger.rows()]
    state = [[x.clone() for x in flat] for flat in (s.values() for _, s in optimizer.named_state())]
    optimizer.close()
    return {
        "faults": prove(lanes.program),
        "losses": losses,
        "comm": report.comm_bytes,
        "elements": elements,
        "held": held,
        "state": state,
    }


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_group_holds_all_and_moves_what_theory_says(ranks: Run, stage: int) -> None:
    found = ranks(4, trained, (2, 2), zero_stage=stage)
    alone = ranks(2, trained, (2,), ("dp",), zero_stage=stage)
    for rank, one in enumerate(found):
        assert one["faults"] == []
        # Bytes are those of a group of two ranks by itself.
        assert one["held"] == alone[rank % 2]["held"]
        # Beside what such a group sends, the all-reduce of each shard: it leaves a rank once.
        assert one["comm"] - alone[rank % 2]["comm"] == one["elements"] // 2 * 2
    for rank in (0, 1):
        for own, copy in zip(found[rank]["state"], found[rank + 2]["state"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, copy, strict=True))


def spoiled(what: str) -> str:
    """One copy takes another step."""
    torch.manual_seed(0)
    model = Chain()
    optimizer = ot.offload(model, device="cpu", mesh=hybrid(2, 2))
    other = dist.get_rank() >= 2
    copies = optimizer.ranks.copies
    summed = copies.all_reduce

    def wrong(part: Tensor) -> None:
        summed(part)
        part.mul_(1.5)

    if other and what == "gradient":
        copies.all_reduce = wrong  # type: ignore[method-assign]
    try:
        optimizer.backward(loss_of(model, own_batches(1)[0]))
        if (other and what == "hyperparameters") or (dist.get_rank() == 3 and what == "one"):
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    except RankError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.parametrize(
    ("what", "differs"),
    [("hyperparameters", "hyperparameters"), ("gradient", "the sums of squares")],
)
def test_a_group_that_would_make_another_update_is_told(
    own_ranks: Run, what: str, differs: str
) -> None:
    for told in own_ranks(4, spoiled, what):
        assert f"{differs} of copy 1 are not those of copy 0" in told


@pytest.mark.slow
def test_what_one_rank_of_a_group_would_do_is_told_to_all(own_ranks: Run) -> None:
    first, second, third, last = own_ranks(4, spoiled, "one")
    assert "the agreement among the ranks of copy 1 are not those of copy 0" in first
    assert "hyperparameters of copy 1 are not those of copy 0" in second
    assert "hyperparameters of rank 1 are not those of rank 0" in third and third == last


def refused(*sizes: int, names: tuple[str, ...]) -> str:
    try:
        ot.offload(Chain(), device="cpu", mesh=hybrid(*sizes, names=names))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sizes", "names", "told"),
    [
        ((2, 1), AXES, "'dp_shard' of size 1"),
        ((2,), AXES[:1], "takes 'dp_replicate' and behind it 'dp_shard'"),
        ((1, 2), AXES[::-1], "takes 'dp_replicate' and behind it 'dp_shard'"),
    ],
)
def test_meshes_that_are_not_hybrid(
    ranks: Run, sizes: tuple[int, ...], names: tuple[str, ...], told: str
) -> None:
    for found in ranks(2, refused, *sizes, names=names):
        assert told in found


def said_while_clipping(of_pairs: bool) -> list[str]:
    """What is said of a mesh of all ranks, or of each pair's own."""
    pairs = [DeviceMesh("cpu", pair, mesh_dim_names=("dp",)) for pair in ([0, 1], [2, 3])]
    mesh = pairs[dist.get_rank() // 2] if of_pairs else hybrid(2, 2)
    heard, logger = Heard(), logging.getLogger("offloadtrain.engine")
    logger.addHandler(heard)
    model = Chain()
    optimizer = ot.offload(model, device="cpu", mesh=mesh, clip_norm=0.5)
    optimizer.backward(loss_of(model, own_batches(1)[0]))
    optimizer.step()
    optimizer.close()
    logger.removeHandler(heard)
    return heard.messages


def test_the_norm_of_all_groups_is_that_of_the_model(ranks: Run) -> None:
    """A mesh that is a part of the world clips by a norm of its own, and says so."""
    assert ranks(4, said_while_clipping, False) == [[]] * 4
    for (message,) in ranks(4, said_while_clipping, True):
        assert "clip_norm = 0.5" in message and "2 of 4 ranks" in message


def test_one_group_is_plain_sharding(ranks: Run) -> None:
    one, other = (
        ranks(2, trained, sizes, names) for sizes, names in [((1, 2), AXES), ((2,), ("dp",))]
    )
    for found, expected in zip(one, other, strict=True):
        assert found["losses"] == expected["losses"] and found["comm"] == expected["comm"]
