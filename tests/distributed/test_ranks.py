"""Ranks that share an optimizer: what moves, what each holds, what is proved and what refused."""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime import process_group
from offloadtrain.step.layout.block_spec import ALIGN
from offloadtrain.step.layout.tiers import Tier
from tests import levels
from tests.distributed.conftest import Run
from tests.distributed.reference import compare, own_batches
from tests.numerics.comparison import train
from tests.numerics.models import Chain, Frozen, batches, loss_of
from tests.parallel.messages import assert_messages, message_of, warnings_of

Options = dict[str, Any]
STATE = ("master weights", "exp_avg", "exp_avg_sq")


def offloaded(model: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    chosen = {"device": "cpu", "precision": "bf16", "clip_norm": 0.5} | options
    return ot.offload(model, ot.AdamW(lr=1e-2), **chosen)


def train_steps(model: nn.Module, optimizer: ot.OffloadOptimizer, steps: int, accum: int) -> None:
    stream = own_batches(steps * accum)
    for step in range(steps):
        train(optimizer, model, stream[step * accum : (step + 1) * accum])


# What moves, and what each rank holds.


def figures_of(depth: int, steps: int, **options: Any) -> dict[str, float]:
    """Bytes of the last step on this rank, bytes that it holds, and elements."""
    torch.manual_seed(0)
    model, accum = Chain(depth), options.get("grad_accum_steps", 1)
    optimizer = offloaded(model, **options)
    train_steps(model, optimizer, steps - 1, accum)
    optimizer.sample_timeline()
    train_steps(model, optimizer, 1, accum)
    report, size = optimizer.last_step, optimizer.ranks.size
    assert report is not None
    collectives = [span.num_bytes for span in report.timeline if span.lane == "comm"]
    of_blocks = {
        block.name: sum(bucket.numel for bucket in block.buckets) for block in optimizer._blocks
    }
    repeated = [block.name for block in optimizer._blocks if block.spec.repeated]
    rows = optimizer.ledger.rows()
    figures = {
        "elements": sum(of_blocks.values()),
        "repeated": sum(of_blocks[name] for name in repeated),
        **{name: numel for name, numel in of_blocks.items() if name not in repeated},
        "d2h": report.d2h_bytes,
        "h2d": report.h2d_bytes,
        "comm": report.comm_bytes,
        "timeline": sum(num_bytes // size * (size - 1) for num_bytes in collectives),
        "device": optimizer.ledger.total(Tier.DEVICE),
        "state": sum(row.bytes for row in rows if row.owner in STATE),
    }
    optimizer.close()
    return figures


SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("stage", "accum"), [(1, 3), (2, 1)])
def test_bytes_are_those_of_theory(ranks: Run, size: int, stage: int, accum: int) -> None:
    for figures in ranks(size, figures_of, 4, 3, zero_stage=stage, grad_accum_steps=accum):
        shard = 2 * figures["elements"] // size
        assert figures["d2h"] == accum * shard
        assert figures["h2d"] == shard
        assert figures["comm"] == (accum + 1) * (size - 1) * shard
        assert figures["timeline"] == figures["comm"], "each collective names its bytes"


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_stage_3(ranks: Run, size: int) -> None:
    """Every block is gathered for forward and again for backward, but those that a slot still
    holds from forward: with one slot the last one. Outside of layers that is the head; the backward
    of an embedding reads no weights."""
    for figures in ranks(size, figures_of, 6, 3, zero_stage=3, working="host", device_slots=1):
        outside = figures["embed"] + 2 * figures["norm"] + figures["head"]
        gathered = outside + figures["repeated"] * (2 * 6 - 1) // 6
        assert figures["comm"] == 2 * (size - 1) * (figures["elements"] + gathered) // size
        assert figures["h2d"] == 2 * gathered // size


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_holds_its_part(ranks: Run, size: int) -> None:
    unsharded = ranks(size, figures_of, 16, 1)
    for figures in unsharded:
        assert figures["state"] == 12 * figures["elements"] // size
    sharded = ranks(size, figures_of, 16, 1, zero_stage=3, device_slots=2)
    for figures, other in zip(sharded, unsharded, strict=True):
        saved = 2 * figures["repeated"] * (1 - 1 / size - 2 / 16)
        outside = [figures[name] for name in ("embed", "norm", "head")]
        saved += 2 * (sum(outside) - sum(outside) // size - max(outside))
        assert figures["device"] == other["device"] - saved


class OddSizes(nn.Module):
    """Parameters of any sizes, smaller than a shard and larger."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 4)
        self.scales = nn.ParameterList(torch.randn(n) for n in sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for scale in self.scales:
            x = x + x * scale.sum()
        return x @ self.embed.weight.T


def compare_odd_sizes(sizes: list[int], **options: Any) -> None:
    torch.manual_seed(dist.get_rank())
    compare(OddSizes(sizes), precision="fp32", loop={"steps": 2}, **options)


@pytest.mark.draws
def test_sizes_that_no_rank_count_divides(ranks: Run) -> None:
    @levels.examples(12)
    @example(sizes=[1], size=3, stage=3)  # nobody calls a `ParameterList`
    @given(
        sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
        size=st.sampled_from([2, 3, 4]),
        stage=st.sampled_from([1, 2, 3]),
    )
    def check(sizes: list[int], size: int, stage: int) -> None:
        ranks(size, compare_odd_sizes, sizes, zero_stage=stage)

    check()
    assert 4 * ALIGN > 500  # so that some shards hold no parameter


# Programs.


# Groups of some ranks.


def warnings_of_a_local_norm(*, alone: bool, clip_norm: float | None, calls: int = 0) -> list[str]:
    """The warnings where the norm is that of a part of the world."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else None
    with warnings_of("offloadtrain.engine") as messages:
        model = Chain()
        optimizer = offloaded(model, process_group=group, clip_norm=clip_norm)
        for _ in range(calls):
            optimizer.backward(loss_of(model, own_batches(1)[0]))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.close()
    return messages


def test_a_norm_of_a_part_of_the_world_is_warned_of(own_ranks: Run) -> None:
    # torch names a group after its ranks and the number of live groups, which other tests change.
    for (message,) in own_ranks(2, warnings_of_a_local_norm, alone=True, clip_norm=0.5):
        assert "clip_norm = 0.5" in message and "1 of 2 ranks" in message
    for (message,) in own_ranks(2, warnings_of_a_local_norm, alone=True, clip_norm=None, calls=2):
        assert "1 of 2 ranks" in message
    assert own_ranks(2, warnings_of_a_local_norm, alone=True, clip_norm=None) == [[], []]
    assert own_ranks(2, warnings_of_a_local_norm, alone=False, clip_norm=0.5, calls=1) == [[], []]


def norms_of_halves() -> list[float]:
    """Two optimizers over two halves of a world, each training its own model."""
    rank = dist.get_rank()
    half = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    torch.manual_seed(rank // 2)
    model = Chain()
    optimizer = offloaded(model, process_group=half)
    assert optimizer.ranks.size == 2
    norms = []
    for tokens in own_batches(2):
        train(optimizer, model, [tokens])
        norms.append(optimizer.grad_norm)
    optimizer.close()
    return norms


def test_a_part_of_the_world(ranks: Run) -> None:
    for _ in range(2):  # a second group of the same ranks must not meet the first one's addresses
        first, same, other, again = ranks(4, norms_of_halves)
        assert first == same != other == again


# Ranks that differ.


def train_differently(what: str) -> None:
    """Build an optimizer and train; rank 1 does something else."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Chain(3 + (what == "model" and rank))
    model.embed.weight.requires_grad_(what not in ("frozen", "buffer"))
    model.register_buffer("scale", torch.ones(()))
    options: Options = {}
    if rank == 1:
        options = {"options": {"state": "split16"}, "default": {"zero_stage": 2}}.get(what, {})
    optimizer = offloaded(model, **options)
    try:
        for tokens in own_batches(3):
            if what == "hyperparameters" and rank == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            if what == "loaded" and rank == 1:
                model.load_state_dict({n: x + 1 for n, x in model.state_dict().items()})
            if what == "buffer":
                model.load_state_dict(model.state_dict() | {"scale": torch.full((), 1.0 + rank)})
            if what == "written":
                optimizer.synchronize()
            if what == "written" or (what == "frozen" and rank == 1):
                weight = model.embed.weight if what == "frozen" else model.layers[0].down.weight
                with torch.no_grad():
                    weight.fill_(rank)
                optimizer.adopt_written_weights()
            optimizer.backward(loss_of(model, tokens))
            if what in ("skips after clipping", "clips"):
                optimizer.clip_grad_norm_(0.1 if what == "clips" and rank else 1.0)
            if what == "calls of clipping" and rank == 0:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step(skip=what.startswith("skips") and rank == 1)
    finally:
        optimizer.close()


def written_and_reset(stage: int) -> dict[str, list[float]]:
    """Return the masters after writes into parameters and resets of moments; all ranks have the
    same batches."""
    torch.manual_seed(0)
    model = Chain(3)
    optimizer = offloaded(model, zero_stage=stage)
    for number, tokens in enumerate(batches(6)):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        if number == 1 and stage < 3:
            for param in model.parameters():
                param.data.clamp_(-0.1, 0.1)
        if number == 2:
            optimizer.state.clear()
        if number == 3:
            optimizer.reset_state(model.head.parameters())
    masters = {name: x.flatten().tolist() for name, x in optimizer.master_weights()}
    optimizer.close()
    return masters


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_and_resets_of_ranks_are_those_of_one(ranks: Run, stage: int) -> None:
    expected = written_and_reset(stage)
    assert ranks(2, written_and_reset, stage) == [expected] * 2


DIFFERENCES = {
    "model": "layers.3",
    "options": "split16",
    "hyperparameters": "step 1: hyperparameters of rank 1 and of rank 0 differ",
    "loaded": r"step 1: 'embed.weight' \(and ",
    "written": "step 1: 'layers.0.down.weight' was loaded or written",
    "frozen": "step 1: 'embed.weight' was loaded or written",
    "buffer": "step 1: 'scale' was loaded",
    "skips": "step 1: the skips asked for",
    "skips after clipping": "step 1: the skips asked for",
    "clips": "clip_grad_norm_ of rank 1",
    "calls of clipping": "clip_grad_norm_ of rank 1",
}


def messages_of_differences() -> dict[str, str]:
    names = [*DIFFERENCES, "default"]
    return {name: message_of(lambda name=name: train_differently(name)) for name in names}


def test_ranks_that_differ_are_refused(ranks: Run) -> None:
    """But not a default that one rank spells out."""
    of_ranks = ranks(2, messages_of_differences)
    expected = {name: f"^RankError.*{text}" for name, text in DIFFERENCES.items()}
    assert_messages(of_ranks, expected | {"default": "^nothing"})
    for messages in of_ranks:
        assert all("rank 1" in messages[name] for name in DIFFERENCES)


def refusals() -> dict[str, str]:
    """A stage that cannot stream, and a second gradient that came first in the second step."""
    messages = {
        "stage": message_of(lambda: offloaded(Chain(), working="host", zero_stage=2)),
        "name": message_of(lambda: offloaded(Chain(), keep_whole=["haed"], zero_stage=3)),
    }
    model = DeliversTwiceLater()
    optimizer = offloaded(model)
    messages["second"] = message_of(lambda: train_steps(model, optimizer, 2, 1))
    optimizer.close()
    torch.manual_seed(0)
    model = Chain()
    masters = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    optimizer = offloaded(model, zero_stage=3)
    messages["state dict"] = message_of(model.state_dict)
    weights = dict(optimizer.full_weights())
    assert weights.keys() == masters.keys()
    assert all(torch.equal(weights[name], value) for name, value in masters.items())
    train_steps(model, optimizer, 1, 1)
    params = [model.head.requires_grad_(False).weight]
    messages["frozen"] = message_of(lambda: loss_of(model, batches(1)[0]))
    messages["group"] = message_of(lambda: optimizer.add_param_group({"params": params}))
    messages["microbatches"] = message_of(lambda: setattr(optimizer, "grad_accum_steps", 2))
    optimizer.close()
    return messages


class DeliversTwiceLater(Chain):
    """Delivers twice in one backward, but not in the first one."""

    turn = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.turn:
            x = torch.utils.checkpoint.checkpoint(self.layers[0], x, use_reentrant=True)
        self.turn += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_what_ranks_cannot_do_is_refused(ranks: Run) -> None:
    """And weights in shards are gathered by all ranks together."""
    assert_messages(
        ranks(2, refusals),
        {
            "stage": "set zero_stage = 3",
            "name": "'haed' matches no module.*'embed', 'norm', 'head'",
            "second": "^GradientError.*second gradient",
            "state dict": r"^ModelError.*full_weights\(\)",
            "frozen": "^ModelError.*with several ranks",
            "group": "^ModelError.*with several ranks",
            "microbatches": "^ModelError.*with several ranks",
        },
    )


# Weights and state.


def test_full_weights_of_one_rank() -> None:
    for options in ({}, {"working": "host"}):
        torch.manual_seed(0)
        model = Chain()
        optimizer = offloaded(model, **options)
        train(optimizer, model, batches(1))
        full, weights = dict(optimizer.full_weights()), model.state_dict()
        assert all(torch.equal(full[name], weights[name]) for name in weights)
        train(optimizer, model, batches(1))
        optimizer.close()


def master_weights(state: str, **options: Any) -> dict[str, list[float]]:
    """After two steps; all ranks see the same batches: their sum, divided by their number, is
    exact."""
    torch.manual_seed(0)
    model = Frozen()
    optimizer = offloaded(model, state=state, clip_norm=None, **options)
    ema = ot.EMA(optimizer, 0.5)
    for tokens in batches(2):
        train(optimizer, model, [tokens])
        ema.update()
    masters = dict(optimizer.master_weights())
    shapes = {name: value.shape for name, value in masters.items()}
    assert shapes == {name: param.shape for name, param in Frozen().named_parameters()}
    working = {name: weights.clone() for name, weights in optimizer.working_weights()}
    for name, weights in working.items():
        assert weights.dtype is torch.bfloat16 and weights.shape == shapes[name]
        # Formats that hold the weight round ties in their own way.
        assert state != "fp32" or torch.equal(weights, masters[name].bfloat16())
    before = dict(ema.weights())
    ema.load_state_dict(copy.deepcopy(ema.state_dict()))
    averages = dict(ema.weights())
    assert all(torch.equal(before[name], value) for name, value in averages.items())
    values = {name: value.reshape(-1).tolist() for name, value in masters.items()}
    values |= {f"average of {name}": value.flatten().tolist() for name, value in averages.items()}
    optimizer.close()
    return values


@pytest.mark.parametrize(("state", "zero_stage"), [("fp32", 1), ("split16", 2), ("fp32", 3)])
def test_every_rank_has_the_masters_of_one_rank(ranks: Run, state: str, zero_stage: int) -> None:
    first, second = ranks(2, master_weights, state, zero_stage=zero_stage)
    assert first == second == master_weights(state)


def train_from_a_copy(copies: str, **options: Any) -> None:
    """An optimizer that takes over another one's state, or weights, trains with the same bits."""
    torch.manual_seed(1)
    models = Chain(), Chain()
    weights = {name: value.clone() for name, value in models[0].state_dict().items()}
    optimizers = [offloaded(model, clip_norm=0.5, **options) for model in models]
    stream = own_batches(4)
    if copies == "state":
        for tokens in stream[2:]:
            train(optimizers[0], models[0], [tokens])
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    else:
        models[1].load_state_dict(weights)
    pairs = zip(*(optimizer.named_state() for optimizer in optimizers), strict=True)
    for (name, state), (_, other) in pairs:
        assert all(torch.equal(other[key], value) for key, value in state.items()), name
    for tokens in stream[:2]:
        losses, norms = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            losses.append(train(optimizer, model, [tokens]))
            norms.append(optimizer.grad_norm)
        assert losses[0] == losses[1] and norms[0] == norms[1]
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize(
    ("size", "copies", "options"),
    [
        (2, "state", {}),
        (3, "state", {"state": "int8"}),
        (4, "state", {"zero_stage": 3}),
        (2, "weights", {"zero_stage": 1}),
        (2, "weights", {"zero_stage": 2, "state": "split16"}),
        (2, "weights", {"zero_stage": 2, "state": "int8"}),
    ],
)
def test_states_and_weights_are_taken_over(
    ranks: Run, size: int, copies: str, options: Options
) -> None:
    ranks(size, train_from_a_copy, copies, **options)


def save_or_load(path: str, place: int | None) -> str:
    """Save each rank's state (None), or load that of the rank so many places after this one."""
    model = Chain()
    optimizer = offloaded(model)
    rank = optimizer.ranks.rank
    if place is None:
        train(optimizer, model, batches(1))
        torch.save(optimizer.state_dict(), f"{path}/{rank}")
        message = ""
    else:
        saved = len(list(Path(path).iterdir()))
        state = torch.load(f"{path}/{(rank + place) % saved}")
        message = message_of(lambda: optimizer.load_state_dict(state))
    optimizer.close()
    return message


@pytest.mark.slow
def test_the_state_of_another_rank_is_refused(ranks: Run, tmp_path: Path) -> None:
    """Its shards may have the sizes of this one's."""
    of_two, of_single = tmp_path / "two", tmp_path / "single"
    for folder, size in ((of_two, 2), (of_single, 1)):
        folder.mkdir()
        ranks(size, save_or_load, str(folder), None)
    assert ranks(2, save_or_load, str(of_two), 0) == ["nothing"] * 2
    for rank, message in enumerate(ranks(2, save_or_load, str(of_two), 1)):
        assert f"is that of rank {1 - rank} of 2 (counted" in message
    (alone,) = ranks(1, save_or_load, str(of_two), 1)
    assert "is that of rank 1 of 2 (counted" in alone
    assert "this process is rank 0 of 1" in alone and "as many ranks, each its own" in alone
    # Of one process: whole tensors, of which any number of ranks take their shards.
    assert ranks(2, save_or_load, str(of_single), 0) == ["nothing"] * 2


# Ranks that wait, and weights that are not there.


def wait_for_a_warning(log: Path) -> str:
    """Rank 0 calls alone, until it has been warned; returns the warning."""
    process_group.LONG_S = process_group.LOOK_EVERY_S = 0.05
    optimizer = offloaded(Chain())
    handler = logging.FileHandler(log) if dist.get_rank() == 0 else logging.NullHandler()
    logging.getLogger(process_group.__name__).addHandler(handler)
    while dist.get_rank() and not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.01)
    for _ in optimizer.master_weights():
        pass
    optimizer.close()
    return log.read_text()


def test_a_call_that_only_one_rank_makes_is_named(own_ranks: Run, tmp_path: Path) -> None:
    message = own_ranks(2, wait_for_a_warning, tmp_path / "log")[0]
    assert "rank 0 has waited" in message
    assert "in master_weights() at" in message
    assert f"{Path(__file__).name}:" in message
    assert "its last collective was 'all-gather " in message
