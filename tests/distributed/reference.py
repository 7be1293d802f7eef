"""Data parallelism as everybody writes it, resident: whole gradients, summed over ranks bucket by
bucket, one fp32 master of everything on every rank under torch's AdamW.

The cut of a bucket and the owner of an element decide in which order Gloo adds, so they are taken
from the optimizer under test; nothing else is. `compare` trains both, and compares every bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import offloadtrain as ot
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.parameters import past_the_class
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.process_group import all_gather_single, reduce_scatter_single
from tests.harsh_lanes import PausingLanes, poisoned
from tests.numerics import skipping, test_float8
from tests.numerics.comparison import DTYPES
from tests.numerics.models import MODELS, VOCAB, WIDTH, Chain, Layer, batches, loss_of
from tests.numerics.reference import ResidentRun, segment_squares
from tests.parallel.models import PartlyUsed
from tests.seeded_lanes import SeededLanes

LANES: dict[str, Callable[[], Lanes]] = {
    "in order": SequentialLanes,
    "threads": lambda: PausingLanes(1.0, seed=dist.get_rank()),
    "seeded": lambda: SeededLanes(dist.get_rank()),
    "late": lambda: SeededLanes(dist.get_rank(), late=True),
}
GROUPS = ("dp_replicate", "dp_shard")
"""Axes of hybrid sharding."""


class Routed(nn.Module):
    """Every rank takes another way through the experts: they are ready in another order."""

    turn = 0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.experts = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x, first = self.embed(tokens), self.turn + dist.get_rank()
        self.turn += 1
        for step in range(3):
            x = self.experts[(first + step * (1 + dist.get_rank())) % 4](x)
        return self.head(x)


class Adapted(Chain):
    """Frozen embedding and head, as with LoRA: they are in shards, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


class TwoTowers(nn.Module):
    """Two towers with tables of their own, a head used twice, and no other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({key: nn.Embedding(VOCAB, WIDTH) for key in ("left", "right")})
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tables["left"](tokens) + self.tables["right"](tokens.flip(-1))
        for layer in self.layers:
            x = self.head(layer(x))
        return self.out(x)


RANK_MODELS: dict[str, Callable[..., nn.Module]] = {
    "wide": test_float8.Model,
    "routed": Routed,
    "adapted": Adapted,
    "two towers": TwoTowers,
    "routed parts": PartlyUsed,
    "unused experts": skipping.Routed,
}
"""Models that know of ranks, or that only these tests train."""


def own_batches(count: int, source: Callable[[int], list[Tensor]] = batches) -> list[Tensor]:
    """As many batches of this rank alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return source(count * size)[rank::size]


def same_start(model: nn.Module) -> nn.Module:
    """A copy with the weights of rank 0."""
    resident = copy.deepcopy(model)
    weights = parameters_to_vector(resident.parameters()).detach()
    dist.broadcast(weights, 0)
    vector_to_parameters(weights, resident.parameters())
    return resident


class DataParallelRun(ResidentRun):
    """`ResidentRun` whose gradient is the sum over ranks of theirs, and whose step means it."""

    def follow(self, optimizer: ot.OffloadOptimizer, reduction: torch.dtype | None = None) -> None:
        """Take the cuts of `optimizer`'s buckets; parameters without elements are in none."""
        self.trained = {name: p for name, p in self.trained.items() if p.numel()}
        self.masters = {
            key: master
            for key, master in self.masters.items()
            if key.partition("[")[0] in self.trained  # experts have masters of their own
        }
        self.buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
        self.reduction = reduction

    def sum_over_ranks(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """One microbatch's gradients, (working dtype) → fp32."""
        summed, shards = {}, []
        for bucket in self.buckets:
            dtype = self.reduction or bucket.dtype
            flat = torch.zeros(bucket.numel, dtype=dtype)
            for slot in bucket.slots:
                slot.view(flat).copy_(grads[slot.name])
            shard = torch.empty(bucket.numel // dist.get_world_size(), dtype=dtype)
            reduce_scatter_single(shard, flat)
            shards.append(shard.to(bucket.dtype).float())
        joined = torch.cat(shards)[None]
        of_ranks = torch.empty(dist.get_world_size(), joined.numel())
        all_gather_single(of_ranks, joined)
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
        flat, total = slot.flattened(grad), 0.0
        for lo, hi in bucket.pieces(slot):
            total += segment_squares(flat[lo:hi]) if lo < hi else 0.0
        return total


class GroupsRun(DataParallelRun):
    """Hybrid sharding of 2 x 2 ranks: gradients are added within a group, then among groups."""

    def sum_over_ranks(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._sum(grads[name]) for name in self.trained}

    def _sum(self, grad: Tensor) -> Tensor:
        dtype = self.reduction or grad.dtype
        of_ranks = [torch.empty(grad.shape, dtype=dtype) for _ in range(4)]
        dist.all_gather(of_ranks, grad.to(dtype).contiguous())
        summed = (of_ranks[0] + of_ranks[1]) + (of_ranks[2] + of_ranks[3])
        return summed.to(grad.dtype).float()


class SkippingRanksRun(DataParallelRun, skipping.SkippingRun):
    """Skips the experts without a token on any rank."""

    def apply(self, sums: dict[str, Tensor]) -> None:
        hits: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(hits, self.model.take_hits())
        self.used = set().union(*hits)
        DataParallelRun.apply(self, sums)


@dataclass(frozen=True)
class Loop:
    """How `compare` trains, apart from the options of `offload`.

    Attributes:
        explicit: by `optimizer.backward(loss)`, or else by `loss.backward()`.
        clips: of calls of `clip_grad_norm_` before each step.
        reentrant: layers run again in backward by torch's checkpoint of this kind.
    """

    steps: int = 3
    lanes: str = "in order"
    explicit: bool = True
    clips: Sequence[float] = ()
    reentrant: bool | None = None


def compare(
    name: str | nn.Module, *, loop: dict[str, Any] | None = None, **options: Any
) -> dict[str, list[int]]:
    """Train a model on this rank and in the resident loop: losses, norms, weights, masters and
    moments must have the same bits. Returns how often each expert has been updated."""
    training = Loop(**loop or {})
    torch.manual_seed(dist.get_rank())  # rank 0's weights have to become everybody's
    arguments = {} if training.reentrant is None else {"reentrant": training.reentrant}
    model = (RANK_MODELS | MODELS)[name](**arguments) if isinstance(name, str) else name
    resident = same_start(model)
    chosen = {"precision": "bf16", "clip_norm": 0.5, "reduction": "working"} | options
    if chosen.get("mesh"):
        chosen["mesh"] = init_device_mesh("cpu", chosen["mesh"], mesh_dim_names=GROUPS)
    if "fp8" in chosen:
        resident = test_float8.converted(resident, chosen["fp8"])
    skips = "skip_unused" in chosen
    with on_lanes(poisoned(LANES[training.lanes]())):
        optimizer = ot.offload(
            model,
            ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
            device="cpu",
            **chosen,
        )
    kind = SkippingRanksRun if skips else GroupsRun if chosen.get("mesh") else DataParallelRun
    run = kind(
        resident,
        DTYPES[chosen["precision"]],
        clip_norm=chosen["clip_norm"],
        scale=optimizer.loss_scale,
    )
    run.clips = training.clips
    run.follow(optimizer, torch.float32 if chosen["reduction"] == "fp32" else None)
    accum = chosen.get("grad_accum_steps", 1)
    stream = own_batches(training.steps * accum, skipping.batches if skips else batches)
    steps = [stream[step * accum : (step + 1) * accum] for step in range(training.steps)]
    # All of the reference first: its collectives must not meet those that a lane puts off.
    expected = [run.step(micro, loss_of) for micro in steps]
    for step, micro in enumerate(steps):
        losses = []
        for tokens in micro:
            loss = loss_of(model, tokens)
            losses.append(loss.item())
            if training.explicit:
                optimizer.backward(loss)
            else:
                (loss / accum if accum > 1 else loss).backward()
        for max_norm in training.clips:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert losses == expected[step], step
        assert optimizer.grad_norm == run.norms[step], step
    assert run.skipped < training.steps
    assert_same_state(optimizer, model, run)
    counts: dict[str, list[int]] = {}
    for name, param in model.named_parameters() if skips else ():
        counts[name] = optimizer.state[param]["step"].reshape(-1).int().tolist()
        assert counts[name] == run.steps(name), name
    optimizer.close()
    return counts


def assert_same_state(
    optimizer: ot.OffloadOptimizer, model: nn.Module, run: DataParallelRun
) -> None:
    optimizer.synchronize()
    for name, param in model.named_parameters():
        with past_the_class():  # a read of weights in shards would raise
            values = param.detach()
        if not values.isnan().any():  # of a streamed block without a slot
            assert torch.equal(values, run.params[name]), name
    for key, values in whole_state(optimizer, "master", "exp_avg", "exp_avg_sq").items():
        for name, value in values.items():
            expected = run.master(name) if key == "master" else run.moment(name, key)
            assert torch.equal(value, expected), (name, key)


def whole_state(optimizer: ot.OffloadOptimizer, *keys: str) -> dict[str, dict[str, Tensor]]:
    """These fields of the state of every parameter, put together from the ranks' shards."""
    buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
    slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    shards = {key: {name: _shard(optimizer, key, *slots[name]) for name in slots} for key in keys}
    of_ranks: list[dict[str, dict[str, Tensor]]] = [shards] * dist.get_world_size()
    dist.all_gather_object(of_ranks, shards)  # once for all: a collective costs more than its bytes
    of_group = of_ranks[: optimizer.ranks.size]  # other groups hold copies
    return {
        key: {
            name: slot.shaped(torch.cat([of_rank[key][name] for of_rank in of_group]))
            for name, (_, slot) in slots.items()
        }
        for key in keys
    }


def _shard(optimizer: ot.OffloadOptimizer, key: str, bucket: Bucket, slot: Slot) -> Tensor:
    """(n,) what this rank's shard holds of a parameter."""
    values = optimizer.state[slot.param][key]
    lo, hi = bucket.piece(slot)
    assert values.numel() == hi - lo
    return slot.flattened(values) if values.numel() == slot.numel else values.reshape(-1)
