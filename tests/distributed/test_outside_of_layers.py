"""ZeRO stage 3 outside of layers: embedding, norm and head in shards, gathered into one slot.

Bits of further models are in `test_sharded.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.reference import own_batches
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.test_offload import train
from tests.parallel.messages import warnings_of

STAGE_3: dict[str, Any] = {"zero_stage": 3, "device": "cpu"}


def streamed_blocks(*, tied: bool = False, **options: Any) -> tuple[list[str], dict[str, int], int]:
    """Streamed blocks outside of layers, what the device holds, and the bytes of all of them."""
    optimizer = ot.offload(Chain(tied=tied), **STAGE_3, **options)
    outside = [block for block in optimizer._blocks if not block.repeated]
    on_device = {row.owner: row.bytes for row in optimizer.ledger.rows() if row.tier == "device"}
    total = sum(bucket.numel for block in outside for bucket in block.all_buckets) * 2
    names = [block.name for block in outside if block.streamed]
    optimizer.close()
    return names, on_device, total


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (4, {}, ["embed", "norm", "head"]),
        (2, {"working": "host"}, ["embed", "norm", "head"]),
        (4, {"tied": True, "keep_whole": ["norm"]}, []),
        (4, {"keep_whole": ["norm", "h*"]}, []),
        (4, {"keep_whole": ["norm"]}, ["embed", "head"]),
    ],
)
def test_what_saves_no_memory_is_not_sharded(
    ranks: Run, size: int, options: dict[str, Any], expected: list[str]
) -> None:
    for names, on_device, total in ranks(size, streamed_blocks, **options):
        assert names == expected
        if not names:
            assert on_device["working weights"] == total
        elif len(names) == 3:
            assert "working weights" not in on_device


def test_keep_whole_without_stage_3() -> None:
    with pytest.raises(OptionError, match=r"keep_whole .* only with zero_stage = 3"):
        ot.offload(Chain(), keep_whole=["head"], device="cpu")


def proved_and_evaluated(tied: bool, **options: Any) -> tuple[list[Any], list[float]]:
    """Faults of the program of two steps with an evaluation between; its losses and weights."""
    torch.manual_seed(0)
    model, lanes = Chain(tied=tied), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(model, grad_accum_steps=2, **STAGE_3, **options)
    stream, losses = own_batches(4), []
    for step in range(2):
        losses += train(optimizer, model, stream[2 * step : 2 * step + 2])
        with torch.no_grad():
            losses.append(float(loss_of(model, stream[step])))
    optimizer.synchronize()
    weights = {name: weight.clone() for name, weight in optimizer.full_weights()}
    optimizer.close()
    losses += [float(weights[name].float().sum()) for name in ("embed.weight", "norm.weight")]
    return prove(lanes.program), losses


@pytest.mark.parametrize(("tied", "working"), [(False, "host"), (True, "device")])
def test_the_program_has_no_race_and_evaluations_their_bits(
    ranks: Run, tied: bool, working: str
) -> None:
    sharded = ranks(4, proved_and_evaluated, tied, working=working)
    assert [faults for faults, _ in sharded] == [[]] * 4
    unsharded = ranks(4, proved_and_evaluated, tied, working=working, keep_whole=["*"])
    assert [losses for _, losses in sharded] == [losses for _, losses in unsharded]


def loads_of_a_step() -> list[str]:
    torch.manual_seed(0)
    model, lanes = Chain(4), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(model, device_slots=2, keep_whole=["norm"], **STAGE_3)
    for tokens in own_batches(3):
        lanes.program.clear()
        train(optimizer, model, [tokens])
    optimizer.close()
    names = [getattr(entry, "name", "") for entry in lanes.program]
    return [name for name in names if name.startswith(("load", "forward", "backward"))]


def test_the_head_is_loaded_before_the_last_layers_run(ranks: Run) -> None:
    """And not earlier: gathers of layers, which are needed sooner, go before it."""
    for names in ranks(4, loads_of_a_step):
        loads = [name for name in names if name.startswith("load")]
        assert loads.index("load layers.3") < loads.index("load head")
        assert names.index("load head") < names.index("forward layers.3")


def train_from_unsharded() -> bool:
    """A state loaded from a run that shards nothing outside of layers: the same bits."""
    torch.manual_seed(0)
    models = Chain(), Chain()
    models[1].load_state_dict(models[0].state_dict())
    first, second = (
        ot.offload(model, **keys, **STAGE_3)
        for model, keys in zip(models, ({"keep_whole": ["*"]}, {}), strict=True)
    )
    stream = own_batches(2)
    train(first, models[0], stream[:1])
    second.load_state_dict(first.state_dict())
    same = train(first, models[0], stream[1:]) == train(second, models[1], stream[1:])
    pairs = zip(first.master_weights(), second.master_weights(), strict=True)
    bits = all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    first.close()
    second.close()
    return same and bits


def test_the_state_is_that_of_a_run_without_these_shards(ranks: Run) -> None:
    assert ranks(4, train_from_unsharded) == [True] * 4


def leave_scope(close: bool) -> tuple[list[str], set[tuple[int, ...]]]:
    """The warnings, and the shapes of the layers' parameters afterwards."""
    with warnings_of("offloadtrain") as messages:
        model = Chain()
        optimizer = ot.offload(model, **STAGE_3)
        train(optimizer, model, batches(1))
        if close:
            optimizer.close()
        del optimizer
        return messages, {tuple(param.shape) for param in model.layers.parameters()}


def test_an_optimizer_out_of_scope_is_warned_of(ranks: Run) -> None:
    """Weights in shards cannot be gathered there: their parameters are empty, and not NaN."""
    for messages, shapes in ranks(2, leave_scope, False):
        assert "dict(optimizer.full_weights()) on all ranks" in messages[0] and shapes == {(0,)}
    assert ranks(2, leave_scope, True) == [([], {(0,)})] * 2
