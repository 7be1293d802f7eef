"""Hybrid sharding: 2 groups of 2 ranks, each group with all the state.

The bits of its updates are in `tests/distributed/test_sharded.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import offloadtrain as ot
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.reference import GROUPS, own_batches
from tests.numerics.comparison import train
from tests.numerics.models import Chain, loss_of
from tests.parallel.messages import message_of, warnings_of
from tests.recording_lanes import RecordingLanes


def hybrid(*sizes: int, names: tuple[str, ...] = GROUPS) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def trained(
    sizes: tuple[int, ...], names: tuple[str, ...] = GROUPS, **options: Any
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
    run = {
        "losses": losses,
        "comm": report.comm_bytes,
        "elements": sum(b.numel for block in optimizer._blocks for b in block.buckets),
        "memory": [(row.owner, row.tier, row.bytes) for row in optimizer.ledger.rows()],
        "state": [x.clone() for _, state in optimizer.named_state() for x in state.values()],
    }
    optimizer.close()
    return run | {"faults": prove(lanes.program)}


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_group_holds_all_and_moves_what_theory_says(ranks: Run, stage: int) -> None:
    groups = ranks(4, trained, (2, 2), zero_stage=stage)
    alone = ranks(2, trained, (2,), ("dp",), zero_stage=stage)
    for rank, run in enumerate(groups):
        assert run["faults"] == []
        # Bytes are those of a group of two ranks by itself.
        assert run["memory"] == alone[rank % 2]["memory"]
        # In addition to what such a group sends, the all-reduce of each shard: it leaves once.
        assert run["comm"] - alone[rank % 2]["comm"] == run["elements"] // 2 * 2
    for rank in (0, 1):
        pairs = zip(groups[rank]["state"], groups[rank + 2]["state"], strict=True)
        assert all(torch.equal(value, copy) for value, copy in pairs)


def test_a_single_group_is_plain_sharding(ranks: Run) -> None:
    grouped, plain = (ranks(2, trained, *mesh) for mesh in [((1, 2), GROUPS), ((2,), ("dp",))])
    for run, expected in zip(grouped, plain, strict=True):
        assert run["losses"] == expected["losses"] and run["comm"] == expected["comm"]


def message_of_another_step(what: str) -> str:
    """Some ranks of one copy take another step."""
    torch.manual_seed(0)
    model, rank = Chain(), dist.get_rank()
    optimizer = ot.offload(model, device="cpu", mesh=hybrid(2, 2))
    copies = optimizer.ranks.copies
    all_reduce = copies.all_reduce

    def wrong(part: Tensor) -> None:
        all_reduce(part)
        part.mul_(1.5)

    if rank >= 2 and what == "gradient":
        copies.all_reduce = wrong  # type: ignore[method-assign]
    optimizer.backward(loss_of(model, own_batches(1)[0]))
    if rank >= {"hyperparameters": 2, "hyperparameters of rank 3": 3}.get(what, 4):
        optimizer.param_groups[0]["lr"] = 0.5
    message = message_of(optimizer.step)
    optimizer.close()
    return message


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        ("hyperparameters", "hyperparameters"),
        pytest.param("gradient", "the sums of squares", marks=pytest.mark.slow),
    ],
)
def test_a_group_that_would_make_another_update_is_named(
    own_ranks: Run, what: str, differs: str
) -> None:
    for message in own_ranks(4, message_of_another_step, what):
        assert message.startswith("RankError")
        assert f"{differs} of copy 1 and of copy 0 differ" in message


def refusal(*sizes: int, names: tuple[str, ...]) -> str:
    return message_of(lambda: ot.offload(Chain(), device="cpu", mesh=hybrid(*sizes, names=names)))


def test_meshes_that_are_not_hybrid_are_refused(ranks: Run) -> None:
    for sizes, names, message in (
        ((2, 1), GROUPS, "'dp_shard' of size 1"),
        ((2,), GROUPS[:1], "takes 'dp_replicate' and behind it 'dp_shard'"),
        ((1, 2), GROUPS[::-1], "takes 'dp_replicate' and behind it 'dp_shard'"),
    ):
        assert all(message in text for text in ranks(2, refusal, *sizes, names=names))


def warnings_while_clipping(of_pairs: bool) -> list[str]:
    """The warnings of a mesh of all ranks, or of each pair alone."""
    pairs = [DeviceMesh("cpu", pair, mesh_dim_names=("dp",)) for pair in ([0, 1], [2, 3])]
    mesh = pairs[dist.get_rank() // 2] if of_pairs else hybrid(2, 2)
    with warnings_of("offloadtrain.engine") as messages:
        model = Chain()
        optimizer = ot.offload(model, device="cpu", mesh=mesh, clip_norm=0.5)
        optimizer.backward(loss_of(model, own_batches(1)[0]))
        optimizer.step()
        optimizer.close()
    return messages


def test_the_norm_of_all_groups_is_that_of_the_model(ranks: Run) -> None:
    """A mesh that is a part of the world clips by a norm of its own, and warns of it."""
    assert ranks(4, warnings_while_clipping, False) == [[]] * 4
    for (message,) in ranks(4, warnings_while_clipping, True):
        assert "clip_norm = 0.5" in message and "2 of 4 ranks" in message
