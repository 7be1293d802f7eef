"""What moves, what is held where, what is proved, and what is refused among ranks."""

from __future__ import annotations

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
from offloadtrain.engine import EngineError, GradientError, ModelError
from offloadtrain.runtime import long_waits
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.runtime.process_group import RankError
from offloadtrain.step.layout.block_spec import ALIGN
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Launched
from tests import levels
from tests.distributed.conftest import Run
from tests.distributed.test_sharded import compare, own_batches
from tests.numerics.models import Chain, MixedReentrant, batches, loss_of
from tests.numerics.test_offload import train


def offloaded(model: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    chosen = {"device": "cpu", "precision": "bf16", "clip_norm": 0.5} | options
    return ot.offload(model, ot.AdamW(lr=1e-2), **chosen)


def moved(depth: int, steps: int, **options: Any) -> dict[str, float]:
    """Bytes of the last step on this rank, and bytes held."""
    torch.manual_seed(0)
    model = Chain(depth)
    optimizer = offloaded(model, **options)
    accum = options.get("grad_accum_steps", 1)
    stream = own_batches(steps * accum)
    for step in range(steps):
        train(optimizer, model, stream[step * accum : (step + 1) * accum])
    report = optimizer.last_step
    assert report is not None
    buckets = [b for block in optimizer._blocks for b in block.buckets]
    held = {(row.owner, row.tier): row.bytes for row in optimizer.ledger.rows()}
    numbers = {
        "elements": sum(b.numel for b in buckets),
        "repeated": sum(b.numel for k in optimizer._blocks if k.repeated for b in k.buckets),
        **{k.name: sum(b.numel for b in k.buckets) for k in optimizer._blocks if not k.repeated},
        "d2h": report.d2h_bytes,
        "h2d": report.h2d_bytes,
        "comm": report.comm_bytes,
        "host": optimizer.ledger.total(Tier.HOST),
        "device": optimizer.ledger.total(Tier.DEVICE),
        "state": sum(n for (owner, _), n in held.items() if owner in STATE),
    }
    optimizer.close()
    return numbers


STATE = ("master weights", "exp_avg", "exp_avg_sq")


SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.cover(1)
@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_theory(ranks: Run, size: int, stage: int, accum: int) -> None:
    for found in ranks(size, moved, 4, 3, zero_stage=stage, grad_accum_steps=accum):
        shard = 2 * found["elements"] // size
        assert found["d2h"] == accum * shard
        assert found["h2d"] == shard
        assert found["comm"] == (accum + 1) * (size - 1) * shard


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_stage_3(ranks: Run, size: int) -> None:
    """Every block is gathered for forward and again for backward, but those that a slot still
    holds from forward: with one slot the last one. Outside of layers that is the head; the backward
    of an embedding reads no weights."""
    for found in ranks(size, moved, 6, 3, zero_stage=3, working="host", device_slots=1):
        outside = found["embed"] + 2 * found["norm"] + found["head"]
        gathered = outside + found["repeated"] * (2 * 6 - 1) // 6
        shard = 2 // size
        assert found["comm"] == 2 * (size - 1) * (found["elements"] + gathered) // size, shard
        assert found["h2d"] == 2 * gathered // size


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_holds_its_part(ranks: Run, size: int) -> None:
    whole = ranks(size, moved, 16, 1)
    for found in whole:
        assert found["state"] == 12 * found["elements"] // size
    shards = ranks(size, moved, 16, 1, zero_stage=3, device_slots=2)
    for found, other in zip(shards, whole, strict=True):
        saved = 2 * found["repeated"] * (1 - 1 / size - 2 / 16)
        outside = [found[name] for name in ("embed", "norm", "head")]
        saved += 2 * (sum(outside) - sum(outside) // size - max(outside))
        assert found["device"] == other["device"] - saved


def padding_of_a_real_size(size: int) -> float:
    """Share of a 0.6 M parameter block that alignment adds."""
    model = nn.Sequential(nn.Linear(768, 768), nn.Linear(768, 768))
    optimizer = offloaded(model)
    buckets = [b for block in optimizer._blocks for b in block.buckets]
    total = sum(p.numel() for p in model.parameters())
    optimizer.close()
    return size * sum(b.shard_numel for b in buckets) / total - 1


@pytest.mark.parametrize("size", SIZES)
def test_host_state_is_one_nth_within_a_percent(ranks: Run, size: int) -> None:
    assert max(ranks(size, padding_of_a_real_size, size)) < 0.01


class Odd(nn.Module):
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


def odd_sizes(sizes: list[int], **options: Any) -> None:
    from tests.numerics import models

    models.MODELS["odd"] = lambda: Odd(sizes)
    compare("odd", "fp32", steps=2, **options)


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
        ranks(size, odd_sizes, sizes, zero_stage=stage)

    check()
    assert 4 * ALIGN > 500  # so that some shards hold no parameter


def proved(**options: Any) -> tuple[list[Any], set[str]]:
    """Faults of three steps' program on this rank, and the names of what ran on the comm lane."""
    torch.manual_seed(0)
    model, lanes = Chain(4), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = offloaded(model, **options)
    accum = options.get("grad_accum_steps", 1)
    stream = own_batches(3 * accum)
    for step in range(3):
        train(optimizer, model, stream[step * accum : (step + 1) * accum])
    optimizer.synchronize()
    optimizer.close()
    launched = [entry for entry in lanes.program if isinstance(entry, Launched)]
    return prove(lanes.program), {e.name.split()[0] for e in launched if e.lane == "comm"}


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("update", ["exact", "speculative", "delayed"])
@pytest.mark.parametrize(
    "place",
    [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "working": "host"}],
)
@pytest.mark.parametrize("state", ["fp32", "int8"])
@pytest.mark.parametrize("extra", [{}, {"grad_accum_steps": 2}, {"reduction": "fp32"}])
def test_no_race(
    ranks: Run, extra: dict[str, Any], state: str, place: dict[str, Any], update: str
) -> None:
    for faults, kinds in ranks(2, proved, update=update, state=state, **place, **extra):
        assert not faults
        assert {"reduce-scatter", "all-gather"} <= kinds


def alone_in_a_world() -> tuple[int, set[str]]:
    """A group of one among many processes: no collective, no shard."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    lanes = RecordingLanes(SequentialLanes())
    model = Chain()
    with on_lanes(lanes):
        optimizer = offloaded(model, process_group=group)
    train(optimizer, model, own_batches(1))
    comm = {e.name for e in lanes.program if isinstance(e, Launched) and e.lane == "comm"}
    assert optimizer.last_step is not None
    optimizer.close()
    return optimizer.last_step.comm_bytes, comm


def test_no_collective_alone(ranks: Run) -> None:
    assert ranks(2, alone_in_a_world) == [(0, set())] * 2


class Heard(logging.Handler):
    """Messages of the package in this process, which pytest's caplog does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def told_of_a_local_norm(*, alone: bool, clip_norm: float | None, calls: int = 0) -> list[str]:
    """What is said where the norm is that of a part of the world."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else None
    heard, logger = Heard(), logging.getLogger("offloadtrain.engine")
    logger.addHandler(heard)
    model = Chain()
    optimizer = offloaded(model, process_group=group, clip_norm=clip_norm)
    for _ in range(calls):
        optimizer.backward(loss_of(model, own_batches(1)[0]))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    optimizer.close()
    logger.removeHandler(heard)
    return heard.messages


def test_a_norm_of_a_part_of_the_world_is_told(own_ranks: Run) -> None:
    # torch names a group after its ranks and the number of live groups, which other tests change.
    for (message,) in own_ranks(2, told_of_a_local_norm, alone=True, clip_norm=0.5):
        assert "clip_norm = 0.5" in message and "1 of 2 ranks" in message
    for (message,) in own_ranks(2, told_of_a_local_norm, alone=True, clip_norm=None, calls=2):
        assert "1 of 2 ranks" in message
    assert own_ranks(2, told_of_a_local_norm, alone=True, clip_norm=None) == [[], []]
    assert own_ranks(2, told_of_a_local_norm, alone=False, clip_norm=0.5, calls=1) == [[], []]


def halves() -> list[float]:
    """Two optimizers over two halves of a world, each training its own model."""
    rank = dist.get_rank()
    mine = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    torch.manual_seed(rank // 2)
    model = Chain()
    optimizer = offloaded(model, process_group=mine)
    assert optimizer.ranks.size == 2
    norms = []
    for tokens in own_batches(2):
        train(optimizer, model, [tokens])
        norms.append(optimizer.grad_norm)
    optimizer.close()
    return norms


def test_a_part_of_the_world(ranks: Run) -> None:
    for _ in range(2):  # a second group of the same ranks must not meet the first one's addresses
        one, same, other, again = ranks(4, halves)
        assert one == same != other == again


def differing(what: str) -> str:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Chain(3 + (what == "model" and rank))
    model.embed.weight.requires_grad_(what not in ("frozen", "buffer"))
    model.register_buffer("scale", torch.ones(()))
    options: dict[str, Any] = {}
    if what == "options" and rank == 1:
        options["state"] = "split16"
    if what == "stage spelled out" and rank == 1:
        options["zero_stage"] = 2  # what 0, the default, stands for here
    try:
        optimizer = offloaded(model, **options)
    except RankError as error:
        return str(error)
    try:
        for tokens in own_batches(3):
            if what == "hyperparameters" and rank == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            if what == "loaded" and rank == 1:
                model.load_state_dict({n: x + 1 for n, x in model.state_dict().items()})
            if what == "buffer":
                model.load_state_dict(model.state_dict() | {"scale": torch.full((), 1.0 + rank)})
            if what == "frozen" and rank == 1:
                with torch.no_grad():
                    model.embed.weight.add_(1)
                optimizer.adopt_written_weights()
            if what == "written":
                optimizer.synchronize()
                with torch.no_grad():
                    model.layers[0].down.weight.fill_(rank)
                optimizer.adopt_written_weights()
            if what in ("skips", "skips after clipping"):
                optimizer.backward(loss_of(model, tokens))
                if what == "skips after clipping":
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step(skip=rank == 1)
                continue
            train(optimizer, model, [tokens])
    except RankError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("model", "layers.3"),
        ("options", "split16"),
        ("hyperparameters", "step 1: hyperparameters"),
        ("loaded", "step 1: 'embed.weight' (and "),
        ("written", "step 1: 'layers.0.down.weight' was loaded or written"),
        ("frozen", "step 1: 'embed.weight' was loaded or written"),
        pytest.param("buffer", "step 1: 'scale' was loaded", marks=pytest.mark.slow),
        ("skips", "step 1: the skips asked for"),
        ("skips after clipping", "step 1: the skips asked for"),
    ],
)
def test_ranks_that_differ_are_refused(ranks: Run, what: str, says: str) -> None:
    for message in ranks(2, differing, what):
        assert says in message
        assert "rank 1" in message


def test_a_default_that_one_rank_spells_out_is_no_difference(ranks: Run) -> None:
    assert ranks(2, differing, "stage spelled out") == ["", ""]


def host_copies_without_stage_3() -> str:
    try:
        offloaded(Chain(), working="host", zero_stage=2)
    except ValueError as error:
        return str(error)
    return ""


def test_streaming_among_ranks_is_stage_3(ranks: Run) -> None:
    assert all("set zero_stage = 3" in message for message in ranks(2, host_copies_without_stage_3))


def reentrant() -> list[float]:
    """A weight that delivers twice in one backward: in the first one it is summed in two parts,
    later in one."""
    torch.manual_seed(0)
    model = MixedReentrant()
    with on_lanes(ThreadLanes()):
        optimizer = offloaded(model, precision="fp32", zero_stage=2)
    norms = []
    for tokens in own_batches(4):
        train(optimizer, model, [tokens])
        norms.append(optimizer.grad_norm)
    optimizer.close()
    return norms


def reentrant_by_torch() -> list[float]:
    torch.manual_seed(0)
    model = MixedReentrant()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for tokens in own_batches(4):
        loss_of(model, tokens).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        adam.step()
        adam.zero_grad()
    return norms


def test_a_block_that_delivers_twice(ranks: Run) -> None:
    for found, expected in zip(ranks(2, reentrant), ranks(2, reentrant_by_torch), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


class Late(Chain):
    """Delivers twice in one backward, but not in the first one."""

    turn = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.recompute = "reentrant" if self.turn else ""
        self.turn += 1
        x = self.embed(tokens)
        if self.recompute:
            x = torch.utils.checkpoint.checkpoint(self.layers[0], x, use_reentrant=True)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def late_surprise() -> str:
    model = Late()
    optimizer = offloaded(model)
    try:
        for tokens in own_batches(2):
            train(optimizer, model, [tokens])
    except GradientError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_a_second_delivery_that_nobody_knew_of_is_refused(ranks: Run) -> None:
    assert all("second gradient" in message for message in ranks(2, late_surprise))


def whole_weights() -> tuple[str, list[str], bool]:
    """With ZeRO stage 3: what a state dict says, and all weights by the call that has them."""
    torch.manual_seed(0)
    model = Chain()
    expected = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    optimizer = offloaded(model, zero_stage=3)
    try:
        model.state_dict()
        said = ""
    except ModelError as error:
        said = str(error)
    found = dict(optimizer.full_weights())
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    train(optimizer, model, own_batches(1))
    optimizer.close()
    return said, sorted(found), same and sorted(found) == sorted(expected)


def test_weights_in_shards_are_asked_for_together(ranks: Run) -> None:
    (said, names, right), other = ranks(2, whole_weights)
    assert right and other[1:] == (names, True)
    assert "full_weights()" in said


def test_full_weights_of_one_rank() -> None:
    for options in ({}, {"working": "host"}):
        torch.manual_seed(0)
        model = Chain()
        optimizer = offloaded(model, **options)
        train(optimizer, model, batches(1))
        found, kept = dict(optimizer.full_weights()), model.state_dict()
        assert all(torch.equal(found[name], kept[name]) for name in kept)
        train(optimizer, model, batches(1))
        optimizer.close()


def state_dict_again(state: str) -> bool:
    """Into another optimizer of the same ranks: the next steps have the same bits."""
    torch.manual_seed(0)
    first, second = Chain(), Chain()
    one, other = (offloaded(model, state=state) for model in (first, second))
    for tokens in own_batches(3):
        train(one, first, [tokens])
    other.load_state_dict(one.state_dict())
    same = []
    for tokens in own_batches(2):
        same.append(train(one, first, [tokens]) == train(other, second, [tokens]))
        same.append(one.grad_norm == other.grad_norm)
    one.close()
    other.close()
    return all(same)


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_rank_takes_its_state_dict_back(ranks: Run, state: str) -> None:
    for size in (1, 2, 3):
        assert ranks(size, state_dict_again, state) == [True] * size


def sampled() -> tuple[int, int]:
    """Bytes sent in a step by its report, and by the collectives of its timeline."""
    torch.manual_seed(0)
    model = Chain(3)
    optimizer = offloaded(model)
    for step, tokens in enumerate(own_batches(3)):
        if step == 2:
            optimizer.sample_timeline()
        train(optimizer, model, [tokens])
    report = optimizer.last_step
    assert report is not None
    whole = [one.num_bytes for one in report.timeline if one.lane == "comm"]
    optimizer.close()
    size = optimizer.ranks.size
    return report.comm_bytes, sum(nbytes // size * (size - 1) for nbytes in whole)


@pytest.mark.parametrize("size", [2, 4])
def test_each_collective_tells_its_bytes(ranks: Run, size: int) -> None:
    for sent, of_timeline in ranks(size, sampled):
        assert sent == of_timeline > 0


def waiting(told: Path) -> str:
    """Rank 0 asks alone, until it has been told; returns what it was told."""
    long_waits.LONG_S = long_waits.LOOK_EVERY_S = 0.05
    optimizer = offloaded(Chain())
    handler = logging.FileHandler(told) if dist.get_rank() == 0 else logging.NullHandler()
    logging.getLogger(long_waits.__name__).addHandler(handler)
    while dist.get_rank() and not (told.exists() and told.read_text().endswith("\n")):
        time.sleep(0.01)
    for _ in optimizer.master_weights():
        pass
    optimizer.close()
    return told.read_text()


def test_a_call_that_only_one_rank_makes_is_named(own_ranks: Run, tmp_path: Path) -> None:
    said = own_ranks(2, waiting, tmp_path / "told")[0]
    assert "rank 0 has waited" in said
    assert "in master_weights() at" in said
    assert f"{Path(__file__).name}:" in said
    assert "its last collective was 'all-gather " in said


def saves_or_loads(path: str, place: int | None) -> str:
    """Save each rank's state (None), or load that of the rank so many places behind."""
    model = Chain()
    optimizer = offloaded(model)
    try:
        if place is None:
            train(optimizer, model, batches(1))
            torch.save(optimizer.state_dict(), f"{path}/{optimizer.ranks.rank}")
            return ""
        saved = len(list(Path(path).iterdir()))
        optimizer.load_state_dict(torch.load(f"{path}/{(optimizer.ranks.rank + place) % saved}"))
    except EngineError as error:
        return str(error)
    finally:
        optimizer.close()
    return "loaded"


@pytest.mark.slow
def test_the_state_of_another_rank_is_refused(ranks: Run, tmp_path: Path) -> None:
    """Its shards may have the sizes of this one's."""
    two, one = tmp_path / "two", tmp_path / "one"
    for folder, size in ((two, 2), (one, 1)):
        folder.mkdir()
        ranks(size, saves_or_loads, str(folder), None)
    assert ranks(2, saves_or_loads, str(two), 0) == ["loaded"] * 2
    for rank, told in enumerate(ranks(2, saves_or_loads, str(two), 1)):
        assert f"is that of rank {1 - rank} of 2 (counted" in told
    (alone,) = ranks(1, saves_or_loads, str(two), 1)
    assert "is that of rank 1 of 2 (counted" in alone
    assert "this process is rank 0 of 1" in alone and "as many ranks, each its own" in alone
    # Of one process: whole tensors, of which any number of ranks take their shards.
    assert ranks(2, saves_or_loads, str(one), 0) == ["loaded"] * 2


def groups_of_some(uneven: bool) -> int:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]
    if uneven and dist.get_rank() in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    models = [Chain() for _ in range(4)]
    whole = offloaded(models[0])
    optimizers = [offloaded(models[1], process_group=half)]
    whole.close()
    optimizers += [offloaded(model, process_group=half) for model in models[2:]]
    for model, optimizer in zip(models[1:], optimizers, strict=True):
        train(optimizer, model, batches(1))
        optimizer.close()
    return len(optimizers)


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
def test_groups_of_some_ranks_have_names_of_their_own(own_ranks: Run, uneven: bool) -> None:
    """torch's depend on the groups that each process holds, which may be more or fewer."""
    assert own_ranks(4, groups_of_some, uneven) == [3] * 4
