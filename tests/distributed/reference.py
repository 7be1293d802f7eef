"""Data parallelism as everybody writes it, resident: whole gradients, summed over ranks bucket by
bucket, one fp32 master of everything on every rank under torch's AdamW.

The cut of a bucket and the owner of an element decide in which order Gloo adds, so they are taken
from the optimizer under test; nothing else is.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

import offloadtrain as ot
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.runtime.process_group import all_gather_single, reduce_scatter_single
from tests.numerics.reference import ResidentRun, segment_squares


class DataParallelRun(ResidentRun):
    """`ResidentRun` whose gradient is the sum over ranks of theirs, and whose step means it."""

    def follow(self, optimizer: ot.OffloadOptimizer, reduction: torch.dtype | None = None) -> None:
        """Take the cuts of `optimizer`'s buckets; parameters without elements are in none."""
        self.trained = {name: p for name, p in self.trained.items() if p.numel()}
        self.masters = {name: self.masters[name] for name in self.trained}
        self.buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
        self.reduction = reduction

    def sum_over_ranks(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """One microbatch's gradients, (working dtype) → fp32."""
        summed, shards = {}, []
        for bucket in self.buckets:
            dtype = self.reduction or bucket.dtype
            whole = torch.zeros(bucket.numel, dtype=dtype)
            for slot in bucket.slots:
                slot.view(whole).copy_(grads[slot.name])
            shard = torch.empty(bucket.numel // dist.get_world_size(), dtype=dtype)
            reduce_scatter_single(shard, whole)
            shards.append(shard.to(bucket.dtype).float())
        own = torch.cat(shards)[None]
        of_ranks = torch.empty(dist.get_world_size(), own.numel())
        all_gather_single(of_ranks, own)
        parts = of_ranks.split([shard.numel() for shard in shards], dim=1)
        for bucket, part in zip(self.buckets, parts, strict=True):
            summed |= {slot.name: slot.view(part.reshape(-1)) for slot in bucket.slots}
        return summed

    def step(self, batches, loss_of) -> list[float]:  # type: ignore[no-untyped-def]
        sums: dict[str, Tensor] = {}
        losses = []
        for batch in batches:
            loss = loss_of(self.model, batch)
            losses.append(loss.item())
            if len(batches) > 1:
                loss = loss / len(batches)
            (loss * self.scale if self.scale != 1.0 else loss).backward()
            grads = {
                name: torch.zeros_like(param) if param.grad is None else param.grad
                for name, param in self.trained.items()
            }
            for name, grad in self.sum_over_ranks(grads).items():
                sums[name] = sums[name] + grad if name in sums else grad.clone()
                self.trained[name].grad = None
        self.apply(sums)
        return losses

    def apply(self, sums: dict[str, Tensor]) -> None:
        ranks = dist.get_world_size()
        total = 0.0
        for name in self.trained:
            total += self.squares(name, sums[name])
        norm = math.sqrt(total) / (self.scale * ranks)
        self.norms.append(norm)
        if not math.isfinite(norm):
            self.skipped += 1
            self.scale /= 2
            return
        factor = torch.tensor(self.coef(norm) / (self.scale * ranks), dtype=torch.float32).item()
        self.update(sums, factor)

    def squares(self, name: str, grad: Tensor) -> float:
        """Shard by shard, added in the order of ranks."""
        bucket, slot = next((b, s) for b in self.buckets for s in b.slots if s.name == name)
        flat, size, total = slot.flattened(grad), bucket.numel // dist.get_world_size(), 0.0
        for rank in range(dist.get_world_size()):
            lo = min(max(rank * size - slot.offset, 0), slot.numel)
            hi = max(lo, min((rank + 1) * size - slot.offset, slot.numel))
            total += segment_squares(flat[lo:hi]) if lo < hi else 0.0
        return total


def whole_state(optimizer: ot.OffloadOptimizer, *keys: str) -> dict[str, dict[str, Tensor]]:
    """These fields of the state of every parameter, put together from the ranks' shards."""
    buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
    slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    held = {key: {name: _piece(optimizer, key, *slots[name]) for name in slots} for key in keys}
    of_ranks: list[dict[str, dict[str, Tensor]]] = [held] * dist.get_world_size()
    dist.all_gather_object(of_ranks, held)  # one for all: a collective costs more than its bytes
    return {
        key: {
            name: slot.shaped(torch.cat([pieces[key][name] for pieces in of_ranks]))
            for name, (_, slot) in slots.items()
        }
        for key in keys
    }


def _piece(optimizer: ot.OffloadOptimizer, key: str, bucket: Bucket, slot: Slot) -> Tensor:
    """(n,) what this rank's shard holds of a parameter."""
    piece = optimizer.state[slot.param][key]
    lo, hi = bucket.piece(slot)
    assert piece.numel() == hi - lo
    return slot.flattened(piece) if piece.numel() == slot.numel else piece.reshape(-1)
