"""N ranks with shards on their hosts have the bits of N ranks that keep everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offloadtrain as ot
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.step.layout import step_spec as spec
from tests.distributed.conftest import Run
from tests.distributed.reference import compare, own_batches
from tests.harsh_lanes import PausingLanes
from tests.numerics.comparison import train
from tests.numerics.models import Chain, loss_of
from tests.numerics.skipping import PATTERNS

Options = dict[str, Any]
ZERO_1: Options = {"zero_stage": 1}
ZERO_2: Options = {"zero_stage": 2}
ZERO_3: Options = {"zero_stage": 3}
HOST: Options = {"working": "host"}
SUMMED: Options = {"grad_accum_steps": 2}
FP32_SUMS: Options = {"reduction": "fp32"}
FP16: Options = {"precision": "fp16", "loop": {"steps": 10}}
DEVICE: Options = {"state_on": "device"}
HALF: Options = {"state_on": {"device": 0.5}}
SOME_SUMS: Options = {"sums_on": {"device": 0.4}}
RECOMPUTE: Options = {"activation": "recompute"}
SELECTIVE: Options = {"activation": "selective"}
OFFLOAD: Options = {"activation": "offload"}
SAVED: Options = {"activation": "offload_saved", "offload_saved_above": 0}
SPECULATIVE: Options = {"update": "speculative", "clip_norm": 1e9}
EARLY: Options = {"skip_nonfinite": False, "clip_norm": None}
SKIPPING: Options = {"skip_unused": PATTERNS, "loop": {"steps": 5}}


def case(size: int, model: str, *options: Options, quick: bool = False, **loop: Any) -> Any:
    """Make a case of a table; level quick runs only those that are marked."""
    chosen: Options = {key: value for some in options for key, value in some.items()}
    loop = chosen.pop("loop", {}) | loop
    values = "-".join(map(str, [*chosen.values(), *loop.values()]))
    marks = () if quick else (pytest.mark.slow,)
    name = f"{size}-{model}-{values}"
    return pytest.param(size, model, chosen | {"loop": loop}, id=name, marks=marks)


CASES = [
    case(2, "chain"),
    case(4, "tied"),
    case(2, "frozen", SUMMED, FP32_SUMS, quick=True),
    case(4, "unusual", explicit=False),
    case(2, "chain", SUMMED, explicit=False),
    case(3, "shared"),
    case(2, "recompute"),
    case(2, "reentrant"),
    case(4, "skipping"),
    case(4, "partly used"),
    case(2, "detached"),
    case(4, "experts"),
    case(3, "tied", SUMMED, FP32_SUMS),
    case(4, "tied", SUMMED, {"precision": "fp32", "clip_norm": None}),
    # Stages and precisions, on lanes with delays.
    case(2, "chain", ZERO_1, {"precision": "fp32"}, lanes="threads"),
    case(2, "chain", ZERO_2, FP16, lanes="seeded"),
    case(2, "chain", ZERO_3, FP16, lanes="late"),
    case(2, "chain", ZERO_3, lanes="threads"),
    case(2, "chain", ZERO_1, lanes="late"),
    case(2, "chain", ZERO_3, {"precision": "fp32"}, lanes="seeded"),
    # Update modes and clipping.
    case(2, "chain", ZERO_3, SUMMED, SPECULATIVE, steps=6, lanes="threads", quick=True),
    case(2, "two heads", ZERO_1, SPECULATIVE, steps=6, lanes="seeded"),
    case(2, "two heads", ZERO_2, EARLY, steps=6, lanes="threads"),
    case(2, "chain", ZERO_3, SUMMED, EARLY, steps=6, lanes="seeded"),
    case(2, "chain", ZERO_3, {"update": "speculative", "clip_norm": 0.1}, steps=6),
    case(2, "chain", ZERO_1, SUMMED, {"clip_norm": None}, clips=(0.3,)),
    case(2, "tied", ZERO_3, {"update": "speculative"}, clips=(0.3, 0.2), lanes="threads"),
    case(2, "chain", ZERO_3, FP16, {"clip_norm": None}, clips=(0.3, 0.2)),
    # Where state, gradients, weights and activations are.
    case(2, "tied", DEVICE, ZERO_2, lanes="threads"),
    case(4, "frozen", DEVICE, ZERO_3, SUMMED, FP32_SUMS),
    case(2, "tied", HALF, ZERO_1, SUMMED, {"sums_on": "device"}, FP32_SUMS, lanes="threads"),
    case(2, "tied", ZERO_2, SUMMED, SOME_SUMS, FP32_SUMS, lanes="threads", quick=True),
    case(2, "tied", HALF, ZERO_1, SUMMED, SOME_SUMS, lanes="seeded"),
    case(4, "frozen", HOST, ZERO_3, SUMMED, SOME_SUMS, lanes="threads"),
    case(2, "tied", HALF, ZERO_3, SPECULATIVE, lanes="threads"),
    case(2, "chain", HOST, ZERO_3, RECOMPUTE, lanes="threads", quick=True),
    case(4, "frozen", HOST, ZERO_3, SUMMED, OFFLOAD),
    case(2, "shared", HOST, ZERO_3, lanes="threads"),
    case(4, "tied", HOST, ZERO_3, SUMMED, RECOMPUTE),
    case(2, "chain", ZERO_2, SELECTIVE, lanes="threads"),
    case(2, "experts", ZERO_3, HOST, SELECTIVE),
    # Each rank routes its own tokens, and none waits for the choice of another.
    case(2, "experts", ZERO_2, SUMMED, RECOMPUTE),
    case(2, "experts", ZERO_3, HOST, RECOMPUTE),
    case(2, "experts", ZERO_3, RECOMPUTE, {"recompute_blocks": 1}, lanes="threads"),
    case(2, "routed", SUMMED, steps=6, lanes="threads", quick=True),
    case(4, "routed", SPECULATIVE, steps=6),
    # Outside of layers: embedding, norm and head in shards, gathered into one slot.
    case(4, "adapted", ZERO_3, SUMMED, lanes="threads", quick=True),
    case(4, "adapted", ZERO_3, SAVED, lanes="seeded"),
    case(4, "two towers", HOST, SPECULATIVE, steps=6, lanes="seeded"),
    case(4, "two towers", ZERO_3, RECOMPUTE, lanes="late"),
    # Each rank uses other parts of a layer: a block that is not complete leaves before the next
    # gather, whatever takes a slot.
    case(2, "routed parts", ZERO_3, steps=6, quick=True),
    case(2, "routed parts", ZERO_1, steps=6, lanes="threads"),
    case(2, "routed parts", HOST, SUMMED, OFFLOAD, steps=6, lanes="threads"),
    case(2, "routed parts", ZERO_3, RECOMPUTE, {"device_slots": 3}, steps=6, lanes="seeded"),
    case(2, "routed parts", ZERO_3, SAVED, steps=6),
    case(2, "routed parts", HOST, SPECULATIVE, steps=6, lanes="seeded"),
    case(2, "routed parts", ZERO_3, DEVICE, FP32_SUMS, steps=6, lanes="threads"),
    case(2, "routed parts", ZERO_3, steps=6, reentrant=False, lanes="threads"),
    case(2, "routed parts", HOST, steps=6, reentrant=True),
    case(2, "wide", ZERO_2, {"fp8": "rowwise"}, lanes="threads"),
    case(2, "wide", ZERO_3, RECOMPUTE, {"fp8": "tensorwise"}, lanes="seeded"),
]


@pytest.mark.parametrize(("size", "model", "options"), CASES)
def test_same_bits_as_resident_data_parallelism(
    ranks: Run, size: int, model: str, options: Options
) -> None:
    ranks(size, compare, model, **options)


@pytest.mark.parametrize(
    ("size", "model", "options"),
    [
        case(2, "unused experts", SKIPPING, ZERO_2, quick=True),
        case(3, "unused experts", SKIPPING, ZERO_1, SUMMED),
        case(2, "unused experts", SKIPPING, ZERO_3, SUMMED),
        case(3, "unused experts", SKIPPING, ZERO_3, HOST),
        case(2, "unused experts", SKIPPING, DEVICE, SUMMED),
        case(2, "unused experts", SKIPPING, {"update": "speculative"}),
        case(3, "unused experts", SKIPPING, EARLY),
        case(2, "unused experts", SKIPPING, FP32_SUMS),
        case(2, "unused experts", SKIPPING, FP16),
        case(2, "unused experts", SKIPPING, {"precision": "fp32"}),
    ],
)
def test_an_expert_is_used_if_it_got_tokens_on_any_rank(
    ranks: Run, size: int, model: str, options: Options
) -> None:
    for counts in ranks(size, compare, model, **options):
        assert len({count for steps in counts.values() for count in steps}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("lanes", ["threads", "late"])
@pytest.mark.parametrize(
    "options",
    [ZERO_2, HOST, ZERO_1 | {"grad_on": "disk"}, {"working": "disk", "grad_on": "disk"}],
)
def test_shards_of_state_on_the_disk(
    ranks: Run, tmp_path: Path, options: Options, lanes: str
) -> None:
    """Each rank has a file of its own."""
    disk = {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}
    ranks(2, compare, "tied", loop={"lanes": lanes}, **SUMMED, **options, **disk)


@pytest.mark.parametrize(
    ("size", "model", "options"),
    [
        case(4, "chain", ZERO_2, lanes="threads", quick=True),
        case(4, "tied", ZERO_3, SUMMED, quick=True),
        case(4, "chain", ZERO_1, lanes="late"),
        case(4, "chain", HOST, FP32_SUMS, lanes="seeded"),
        case(4, "chain", SPECULATIVE, steps=6),
        case(4, "frozen", FP16),
        case(4, "chain", EARLY, steps=4),
    ],
)
def test_groups_of_ranks_have_the_bits_of_resident_ranks(
    ranks: Run, size: int, model: str, options: Options
) -> None:
    """Hybrid sharding of 2 x 2 ranks. Gradients are added within a group, then among groups, in the
    dtype of the reduction."""
    ranks(size, compare, model, mesh=(2, 2), **options)


def run_of(*, pieces: int = 64 << 20, **options: Any) -> dict[str, Any]:
    """Train on this rank; every bit that can be asked for."""
    spec.STAGING_BYTES = pieces
    torch.manual_seed(0)
    model = Chain(4)
    accum = options.get("grad_accum_steps", 1)
    with on_lanes(PausingLanes(0.5, seed=dist.get_rank())):
        optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", clip_norm=0.5, **options)
    losses = []
    stream = own_batches(4 * accum)
    for step in range(4):
        losses.append(train(optimizer, model, stream[step * accum : (step + 1) * accum]))
    state = {
        (name, key): value.clone()
        for name, fields in optimizer.named_state()
        for key, value in fields.items()
    }
    optimizer.close()
    spec.STAGING_BYTES = 64 << 20
    return {"losses": losses, "norm": optimizer.grad_norm, "state": state}


def same_runs(plain: Options, *placements: Options) -> None:
    first = run_of(**plain)
    for options in placements:
        second = run_of(**plain | options)
        assert first["losses"] == second["losses"], options
        assert first["norm"] == second["norm"], options
        for key, value in first["state"].items():
            assert torch.equal(value, second["state"][key]), (options, key)


@pytest.mark.parametrize(
    ("plain", "placements"),
    [
        (
            {"state": "int8"} | SUMMED,
            [ZERO_1, ZERO_3 | HOST, ZERO_3 | {"resident_blocks": 2}, {"update": "speculative"}],
        ),
        pytest.param(
            {"state": "split16"},
            [ZERO_1, ZERO_3 | HOST, ZERO_3 | HOST | {"update": "speculative"}],
            marks=pytest.mark.slow,
        ),
        ({"update": "delayed", "warmup_steps": 1} | ZERO_1, [ZERO_2, ZERO_3]),
        # With two addends the order of the sum is no question, so that cuts cannot matter.
        (SUMMED | {"state": "int8"}, [{"pieces": 1024}]),
        *(pytest.param(x, [{"pieces": 1024}], marks=pytest.mark.slow) for x in ({}, FP32_SUMS)),
    ],
    ids=str,
)
def test_no_placement_changes_a_bit(ranks: Run, plain: Options, placements: list[Options]) -> None:
    ranks(2, same_runs, plain, *placements)


def train_with_torch() -> None:
    """DDP and FSDP2 under torch's AdamW, the same model and batches."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model, ddp, fsdp = Chain(), Chain(), Chain()
    for copied in (ddp, fsdp):
        copied.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(ddp)
    for layer in fsdp.layers:
        fully_shard(layer)
    fully_shard(fsdp)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", precision="fp32")
    plain = [(wrapped, torch.optim.AdamW(ddp.parameters(), lr=1e-3))]
    plain.append((fsdp, torch.optim.AdamW(fsdp.parameters(), lr=1e-3)))
    for tokens in own_batches(20):
        (expected,) = train(optimizer, model, [tokens])
        for module, adam in plain:
            loss = loss_of(module, tokens)
            loss.backward()
            adam.step()
            adam.zero_grad()
            assert abs(loss.item() - expected) < 1e-5 * expected
    optimizer.close()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_and_fsdp2_agree(ranks: Run, size: int) -> None:
    ranks(size, train_with_torch)
