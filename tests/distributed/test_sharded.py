"""N ranks with shards on their hosts have the bits of N ranks that keep everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import offloadtrain as ot
from offloadtrain.runtime.lanes import Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.runtime.process_group import RankError
from offloadtrain.step.layout import step_spec as spec
from tests import levels
from tests.distributed.conftest import Run
from tests.distributed.reference import DataParallelRun, whole_state
from tests.numerics.models import MODELS, VOCAB, WIDTH, Chain, Layer, batches, loss_of
from tests.numerics.test_offload import DTYPES, train

LANES = {
    "in order": SequentialLanes,
    "threads": lambda: ThreadLanes(seed=dist.get_rank(), longest_delay_ms=1.0),
    "seeded": lambda: SeededLanes(dist.get_rank()),
    "late": lambda: SeededLanes(dist.get_rank(), late=True),
}


class Routed(nn.Module):
    """Every rank takes another way through the experts: they are ready in another order."""

    turn = 0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.experts = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, first = self.embed(tokens), self.turn + dist.get_rank()
        self.turn += 1
        for step in range(3):
            x = self.experts[(first + step * (1 + dist.get_rank())) % 4](x)
        return self.head(x)


OWN: dict[str, Callable[[], nn.Module]] = {"routed": Routed}
"""Models that know of ranks."""


def own_batches(count: int) -> list[torch.Tensor]:
    """As many of this rank's own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return batches(count * size)[rank::size]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(dist.get_rank())  # rank 0's weights have to become everybody's
    return OWN[name]() if name in OWN else MODELS[name]()


def same_start(model: nn.Module) -> nn.Module:
    """A copy with the weights of rank 0."""
    twin = copy.deepcopy(model)
    weights = parameters_to_vector(twin.parameters()).detach()
    dist.broadcast(weights, 0)
    vector_to_parameters(weights, twin.parameters())
    return twin


def compare(
    name: str,
    precision: str = "bf16",
    *,
    lanes: str = "in order",
    accum: int = 1,
    clip: float | None = 0.5,
    steps: int = 3,
    explicit: bool = True,
    reduction: str = "working",
    clips: Sequence[float] = (),
    **options: Any,
) -> None:
    """On one rank: losses, norms, weights, masters and moments."""
    model = model_of(name)
    twin = same_start(model)
    chosen: Lanes = LANES[lanes]()
    chosen.poison = True
    with on_lanes(chosen):
        optimizer = ot.offload(
            model,
            ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
            device="cpu",
            precision=precision,
            clip_norm=clip,
            grad_accum_steps=accum,
            reduction=reduction,
            **options,
        )
    run = DataParallelRun(twin, DTYPES[precision], clip_norm=clip, scale=optimizer.loss_scale)
    run.clips = clips
    run.follow(optimizer, torch.float32 if reduction == "fp32" else None)
    stream = own_batches(steps * accum)
    micros = [stream[step * accum : (step + 1) * accum] for step in range(steps)]
    # All of the reference first: its collectives must not meet those that a lane puts off.
    expected = [run.step(micro, loss_of) for micro in micros]
    for step, micro in enumerate(micros):
        losses = train(optimizer, model, micro, explicit=explicit, clips=clips)
        assert losses == expected[step], step
        assert optimizer.grad_norm == run.norms[step], step
    assert run.skipped < steps
    optimizer.synchronize()
    for name, param in model.named_parameters():
        if not param.isnan().any():  # of a streamed block without a slot
            assert torch.equal(param, run.params[name]), name
    for key, values in whole_state(optimizer, "master", "exp_avg", "exp_avg_sq").items():
        for name, value in values.items():
            expected_value = run.master(name) if key == "master" else run.moment(name, key)
            assert torch.equal(value, expected_value), (name, key)
    optimizer.close()


@pytest.mark.cover(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("chain", "frozen", "tied") else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_same_bits_as_resident_data_parallelism(ranks: Run, size: int, name: str) -> None:
    ranks(size, compare, name)


@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lanes", ["in order", "threads"])
@pytest.mark.parametrize("options", [{"accum": 2}, {"update": "speculative", "clip": 1e9}])
def test_ranks_on_different_paths(
    ranks: Run, size: int, lanes: str, options: dict[str, Any]
) -> None:
    ranks(size, compare, "routed", lanes=lanes, steps=6, **options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("lanes", LANES)
def test_stages(ranks: Run, lanes: str, stage: int, precision: str) -> None:
    steps = 10 if precision == "fp16" else 3
    ranks(2, compare, "chain", precision, lanes=lanes, zero_stage=stage, steps=steps)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param(
            {"zero_stage": 2, "accum": 2, "activation": "recompute"}, marks=pytest.mark.slow
        ),
        pytest.param({"zero_stage": 3, "lanes": "threads"}, marks=pytest.mark.slow),
        {"zero_stage": 3, "working": "host", "activation": "recompute"},
        {"zero_stage": 3, "activation": "recompute", "recompute_blocks": 1},
    ],
)
def test_stages_with_experts(ranks: Run, options: dict[str, Any]) -> None:
    """Each rank routes its own tokens, and none waits for the choice of another."""
    ranks(2, compare, "experts", **options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("lanes", ["in order", "threads"])
@pytest.mark.parametrize(
    ("size", "name", "options"),
    [
        (2, "tied", {}),
        pytest.param(4, "frozen", {"accum": 2, "reduction": "fp32"}, marks=pytest.mark.slow),
    ],
)
def test_stages_without_offload(
    ranks: Run, size: int, name: str, options: dict[str, Any], lanes: str, stage: int
) -> None:
    ranks(size, compare, name, lanes=lanes, zero_stage=stage, state_on="device", **options)


@pytest.mark.slow
@pytest.mark.cover(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accum": 2},
        {"update": "speculative", "clip": 1e9},
        {"accum": 2, "sums_on": "device", "reduction": "fp32"},
    ],
)
def test_stages_with_half_of_the_state_on_the_device(
    ranks: Run, options: dict[str, Any], stage: int
) -> None:
    state_on = {"device": 0.5}
    ranks(2, compare, "tied", lanes="threads", zero_stage=stage, state_on=state_on, **options)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["threads", "late"])
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"working": "host"},
        {"zero_stage": 1, "grad_on": "disk"},
        {"working": "disk", "grad_on": "disk"},
    ],
)
def test_stages_with_the_state_on_the_disk(
    ranks: Run, tmp_path: Path, options: dict[str, Any], lanes: str
) -> None:
    """Each rank has a file of its own."""
    disk = {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}
    ranks(2, compare, "tied", lanes=lanes, accum=2, **options, **disk)


@pytest.mark.parametrize(
    ("size", "reduction", "precision"),
    [
        (2, "working", "bf16"),
        pytest.param(3, "fp32", "bf16", marks=pytest.mark.slow),
        pytest.param(4, "working", "fp32", marks=pytest.mark.slow),
        pytest.param(4, "working", "bf16", marks=pytest.mark.slow),
    ],
)
def test_microbatches_and_wide_sums(ranks: Run, size: int, reduction: str, precision: str) -> None:
    ranks(size, compare, "tied", precision, accum=2, reduction=reduction)
    ranks(size, compare, "frozen", precision, accum=2, reduction=reduction, clip=None)


@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("update", ["speculative", "early"])
@pytest.mark.parametrize("lanes", ["threads", "seeded"])
@pytest.mark.parametrize(("name", "accum"), [("chain", 2), ("two heads", 1)])
def test_update_modes(
    ranks: Run, name: str, accum: int, lanes: str, update: str, stage: int
) -> None:
    chosen: dict[str, Any] = {"update": update, "clip": 1e9}
    if update == "early":
        chosen = {"clip": None, "skip_nonfinite": False}
    ranks(2, compare, name, lanes=lanes, zero_stage=stage, steps=6, accum=accum, **chosen)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["chain", "frozen", "shared", "tied"])
@pytest.mark.parametrize("activation", ["keep", "recompute", "offload"])
@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {"lanes": "threads"}), pytest.param(4, {"accum": 2}, marks=pytest.mark.slow)],
)
def test_weights_in_shards_on_the_host(
    ranks: Run, size: int, options: dict[str, Any], activation: str, name: str
) -> None:
    shards: dict[str, Any] = {"working": "host", "zero_stage": 3, "activation": activation}
    ranks(size, compare, name, **shards, **options)


def test_wrong_guesses(ranks: Run) -> None:
    ranks(2, compare, "chain", update="speculative", clip=0.1, zero_stage=3, steps=6)


@pytest.mark.slow
def test_plain_backward(ranks: Run) -> None:
    ranks(2, compare, "chain", accum=2, explicit=False)
    ranks(2, compare, "unusual", explicit=False)


@pytest.mark.cover(1)
@pytest.mark.parametrize("clips", [(0.3,), (0.3, 0.2)])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chain", {"clip": None, "accum": 2}),
        ("tied", {"clip": 0.25, "update": "speculative", "lanes": "threads"}),
        ("chain", {"clip": None, "precision": "fp16", "steps": 10}),
    ],
)
def test_clipping_before_the_step(
    ranks: Run, name: str, options: dict[str, Any], stage: int, clips: tuple[float, ...]
) -> None:
    ranks(2, compare, name, zero_stage=stage, clips=clips, **options)


def clips_apart(calls: int) -> str:
    """Rank 1 clips otherwise than rank 0, in the first call or in a later one."""
    model = Chain()
    optimizer = ot.offload(model, device="cpu")
    optimizer.backward(loss_of(model, own_batches(1)[0]))
    try:
        for number in range(calls):
            different = dist.get_rank() == 1 and number == calls - 1
            if not (different and calls == 1):
                optimizer.clip_grad_norm_(0.1 if different else 0.5)
        optimizer.step()
    except RankError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.parametrize("calls", [1, 2])
def test_ranks_that_clip_differently_are_told(ranks: Run, calls: int) -> None:
    for told in ranks(2, clips_apart, calls):
        assert "clip_grad_norm_ of rank 1" in told


def loaded(**options: Any) -> None:
    """Weights loaded on every rank: what one has that was offloaded with them."""
    torch.manual_seed(1)
    before = Chain()
    weights, after = copy.deepcopy(before.state_dict()), Chain()
    chosen = {"device": "cpu", **options}
    expected, optimizer = ot.offload(before, **chosen), ot.offload(after, **chosen)
    after.load_state_dict(weights)
    pairs = zip(optimizer.named_state(), expected.named_state(), strict=True)
    for (name, found), (_, wanted) in pairs:
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
    micro = own_batches(2)
    assert train(optimizer, after, micro[:1]) == train(expected, before, micro[:1])
    assert train(optimizer, after, micro[1:]) == train(expected, before, micro[1:])
    for one in (optimizer, expected):
        one.close()


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("state", ["fp32", "split16", "int8"])
def test_loaded_weights_are_masters_as_given(ranks: Run, state: str) -> None:
    for stage in (1, 2):
        ranks(2, loaded, state=state, zero_stage=stage)


def run_of(*, pieces: int = 64 << 20, **options: Any) -> dict[str, Any]:
    """Train on this rank; every bit that can be asked for, as bytes."""
    spec.STAGING_BYTES = pieces
    torch.manual_seed(0)
    model = Chain(4)
    accum = options.get("grad_accum_steps", 1)
    with on_lanes(ThreadLanes(seed=dist.get_rank(), longest_delay_ms=0.5)):
        optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", clip_norm=0.5, **options)
    losses = []
    stream = own_batches(4 * accum)
    for step in range(4):
        losses.append(train(optimizer, model, stream[step * accum : (step + 1) * accum]))
    kept = {
        name: {k: v.clone() for k, v in state.items()} for name, state in optimizer.named_state()
    }
    assert optimizer.last_step is not None
    optimizer.close()
    spec.STAGING_BYTES = 64 << 20
    return {"losses": losses, "norm": optimizer.last_step.grad_norm, "state": kept}


def same_runs(one: dict[str, Any], *others: dict[str, Any]) -> None:
    first = run_of(**one)
    for other in others:
        second = run_of(**other)
        assert first["losses"] == second["losses"], other
        assert first["norm"] == second["norm"], other
        for name, state in first["state"].items():
            for key, value in state.items():
                assert torch.equal(value, second["state"][name][key]), (other, name, key)


@pytest.mark.parametrize(
    ("state", "accum"),
    [
        pytest.param("fp32", 1, marks=pytest.mark.slow),
        pytest.param("fp32", 2, marks=pytest.mark.slow),
        pytest.param("split16", 1, marks=pytest.mark.slow),
        ("int8", 2),
    ],
)
def test_placements_change_no_bit(ranks: Run, state: str, accum: int) -> None:
    plain = {"state": state, "grad_accum_steps": accum}
    others: list[dict[str, Any]] = [
        {"zero_stage": 1},
        {"zero_stage": 3},
        {"zero_stage": 3, "working": "host"},
        {"zero_stage": 3, "resident_blocks": 2},
        {"update": "speculative"},
        {"zero_stage": 3, "update": "speculative", "working": "host"},
    ]
    ranks(2, same_runs, plain, *(plain | other for other in others))


@pytest.mark.parametrize("stage", [2, 3])
def test_delayed_is_the_same_in_all_placements(ranks: Run, stage: int) -> None:
    plain = {"update": "delayed", "warmup_steps": 1, "zero_stage": 1}
    ranks(2, same_runs, plain, plain | {"zero_stage": stage})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"grad_accum_steps": 2},
        pytest.param({"reduction": "fp32"}, marks=pytest.mark.slow),
        {"state": "int8"},
    ],
)
def test_pieces_change_no_bit_between_two_ranks(ranks: Run, options: dict[str, Any]) -> None:
    """With two addends the order of the sum is no question, so that cuts cannot matter."""
    ranks(2, same_runs, options, options | {"pieces": 1024})


def against_one_process(size: int, steps: int) -> None:
    """Mean of ranks' losses and the weights: those of one process with all the batches."""
    torch.manual_seed(0)
    model, resident = Chain(), Chain()
    resident.load_state_dict(model.state_dict())
    chosen = {"device": "cpu", "precision": "fp32", "clip_norm": 0.5}
    sharded = ot.offload(model, ot.AdamW(lr=1e-3), **chosen)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    single = ot.offload(resident, ot.AdamW(lr=1e-3), process_group=alone, **chosen)
    stream = batches(steps * size)
    for step in range(steps):
        of_all = stream[step * size : (step + 1) * size]
        losses = torch.tensor(train(sharded, model, [of_all[dist.get_rank()]]))
        dist.all_reduce(losses)
        # One microbatch: windows of equal length, so that the mean of means is the mean.
        expected = train(single, resident, [torch.cat(of_all)])
        assert abs(losses.item() / size - expected[0]) < 1e-5 * expected[0]
        if step == 0:
            assert sharded.grad_norm == pytest.approx(single.grad_norm, rel=1e-6)
    sharded.close()
    single.close()


@pytest.mark.parametrize(
    ("size", "steps"), [(2, 20), *(pytest.param(n, 50, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_many_ranks_are_one(ranks: Run, size: int, steps: int) -> None:
    ranks(size, against_one_process, size, steps)


def against_torch(size: int) -> None:
    """DDP and FSDP2 under torch's AdamW, the same model and batches."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ours, ddp, fsdp = Chain(), Chain(), Chain()
    for other in (ddp, fsdp):
        other.load_state_dict(ours.state_dict())
    wrapped = DistributedDataParallel(ddp)
    for layer in fsdp.layers:
        fully_shard(layer)
    fully_shard(fsdp)
    optimizer = ot.offload(ours, ot.AdamW(lr=1e-3), device="cpu", precision="fp32")
    others = [(wrapped, torch.optim.AdamW(ddp.parameters(), lr=1e-3))]
    others.append((fsdp, torch.optim.AdamW(fsdp.parameters(), lr=1e-3)))
    for tokens in own_batches(20):
        (mine,) = train(optimizer, ours, [tokens])
        for model, adam in others:
            loss = loss_of(model, tokens)
            loss.backward()
            adam.step()
            adam.zero_grad()
            assert abs(loss.item() - mine) < 1e-5 * mine
    optimizer.close()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_and_fsdp2_agree(ranks: Run, size: int) -> None:
    ranks(size, against_torch, size)
