"""Experts divided among ranks: tokens travel; gradients are summed where the same experts are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import offloadtrain as ot
from offloadtrain.runtime.process_group import all_gather_single, reduce_scatter_single
from offloadtrain.runtime.tensor_parts import local
from tests.distributed.conftest import Run
from tests.parallel.mesh_runs import LR
from tests.parallel.models import KINDS, token_loss, with_experts


def compare_with_resident(dp: int, ep: int, *, accum: int, stage: int = 2) -> None:
    """A plain loop: gradients summed over whom they are due to, torch's AdamW of whole masters."""
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    model, resident, kind = with_experts(), with_experts(), KINDS["experts"]
    for part in (model, resident):
        ot.expert_parallel(part, mesh)
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=LR),
        device="cpu",
        mesh=mesh,
        precision="fp32",
        grad_accum_steps=accum,
        zero_stage=stage,
    )
    params = dict(resident.named_parameters())
    masters = {name: local(p).detach().clone() for name, p in params.items()}
    adam = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=0.01, fused=True)
    buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
    for step in range(3):
        sums = {name: torch.zeros_like(value) for name, value in masters.items()}
        for micro in range(accum):
            tokens, targets = kind.batch(10 * step + micro, dist.get_rank())
            loss, expected = (token_loss(m(tokens), targets) for m in (model, resident))
            assert loss.item() == expected.item()
            optimizer.backward(loss)
            (expected / accum).backward()
            for bucket in buckets:
                of_experts = {"experts" in slot.name for slot in bucket.slots}
                assert len(of_experts) == 1
                group = mesh["dp"].get_group() if of_experts.pop() else dist.group.WORLD
                flat = torch.zeros(bucket.numel)
                for slot in bucket.slots:
                    slot.view(flat).copy_(local(params[slot.name].grad))
                    params[slot.name].grad = None
                if group.size() > 1:
                    shard = torch.empty(bucket.numel // group.size())
                    reduce_scatter_single(shard, flat, group=group)
                    all_gather_single(flat, shard, group=group)
                for slot in bucket.slots:
                    sums[slot.name] += slot.view(flat)
        optimizer.step()
        for name, value in masters.items():
            value.grad = sums[name] / (dp * ep)
        adam.step()
        for name, value in masters.items():
            local(params[name]).data.copy_(value)
    for name, value in optimizer.master_weights():
        assert torch.equal(value, masters[name]), name
    optimizer.close()


@pytest.mark.parametrize(
    ("dp", "ep", "accum", "stage"),
    [(1, 2, 1, 2), *(pytest.param(2, 2, 2, n, marks=pytest.mark.slow) for n in (2, 3))],
)
def test_bits_of_resident_ranks(ranks: Run, dp: int, ep: int, accum: int, stage: int) -> None:
    ranks(dp * ep, compare_with_resident, dp, ep, accum=accum, stage=stage)
