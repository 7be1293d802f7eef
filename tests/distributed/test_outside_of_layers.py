"""ZeRO stage 3 outside of layers: embedding, norm and head in shards, gathered into one slot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.offload import OptionError
from offloadtrain.engine import ModelError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.step.program.streaming import StreamError
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.test_sharded import compare, own_batches
from tests.numerics.models import MODELS, VOCAB, WIDTH, Chain, Layer, loss_of
from tests.numerics.test_offload import train

STAGE_3: dict[str, Any] = {"zero_stage": 3, "device": "cpu"}


def streamed(*, tied: bool = False, **options: Any) -> tuple[list[str], dict[str, int], int]:
    """The streamed blocks outside of layers, what the device holds, and the whole of them."""
    model = Chain(tied=tied)
    optimizer = ot.offload(model, **STAGE_3, **options)
    outside = [block for block in optimizer._blocks if not block.repeated]
    held = {row.owner: row.bytes for row in optimizer.ledger.rows() if row.tier == "device"}
    whole = sum(bucket.numel for block in outside for bucket in block.all_buckets) * 2
    names = [block.name for block in outside if block.streamed]
    optimizer.close()
    return names, held, whole


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
def test_what_saves_no_memory_stays_whole(
    ranks: Run, size: int, options: dict[str, Any], expected: list[str]
) -> None:
    for names, held, whole in ranks(size, streamed, **options):
        assert names == expected
        if not names:
            assert held["working weights"] == whole
        elif len(names) == 3:
            assert "working weights" not in held


def read_outside(keep: list[str]) -> str:
    """A head that nobody calls."""

    class Bare(Chain):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return F.linear(self.norm(x), self.head.weight)

    torch.manual_seed(0)
    model = Bare()
    optimizer = ot.offload(model, keep_whole=keep, **STAGE_3)
    try:
        train(optimizer, model, own_batches(1))
    except StreamError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_weights_read_without_a_call_are_told_with_the_key(ranks: Run) -> None:
    for told in ranks(4, read_outside, []):
        assert "'head'" in told and 'keep_whole = ["head"]' in told
    assert ranks(4, read_outside, ["head"]) == [""] * 4


def unknown() -> str:
    try:
        ot.offload(Chain(), keep_whole=["haed"], **STAGE_3)
    except OptionError as error:
        return str(error)
    return ""


def test_a_name_that_no_module_has(ranks: Run) -> None:
    for told in ranks(2, unknown):
        assert "'haed' matches no module" in told and "'embed', 'norm', 'head'" in told


def test_keep_whole_without_stage_3() -> None:
    with pytest.raises(OptionError, match=r"keep_whole .* only with zero_stage = 3"):
        ot.offload(Chain(), keep_whole=["head"], device="cpu")


class Adapted(Chain):
    """Frozen embedding and head, as with LoRA: they are in shards, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)


class Several(nn.Module):
    """Two towers with tables of their own, a head used twice, and no layers beside it."""

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


def compared(kind: str, **options: Any) -> None:
    MODELS.update(adapted=Adapted, several=Several)
    compare(kind, **options)


@pytest.mark.parametrize("kind", ["adapted", "several"])
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 3, "lanes": "threads", "accum": 2},
        {"working": "host", "update": "speculative", "clip": 1e9, "steps": 6, "lanes": "seeded"},
        pytest.param(
            {"zero_stage": 3, "activation": "recompute", "lanes": "late"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "zero_stage": 3,
                "activation": "offload_saved",
                "offload_saved_above": 0,
                "lanes": "seeded",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_same_bits(ranks: Run, kind: str, options: dict[str, Any]) -> None:
    ranks(4, compared, kind, **options)


def proved_and_evaluated(tied: bool, **options: Any) -> tuple[list[Any], list[float]]:
    """Faults of the program of two steps with an evaluation between; its losses."""
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("working", ["device", "host"])
def test_the_program_has_no_race_and_evaluations_their_bits(
    ranks: Run, tied: bool, working: str
) -> None:
    found = ranks(4, proved_and_evaluated, tied, working=working)
    assert [faults for faults, _ in found] == [[]] * 4
    whole = ranks(4, proved_and_evaluated, tied, working=working, keep_whole=["*"])
    assert [losses for _, losses in found] == [losses for _, losses in whole]


def loads_of_a_step() -> list[str]:
    torch.manual_seed(0)
    model, lanes = Chain(4), RecordingLanes(SequentialLanes())
    with on_lanes(lanes):
        optimizer = ot.offload(model, device_slots=2, keep_whole=["norm"], **STAGE_3)
    stream = own_batches(3)
    for step in range(3):
        lanes.program.clear()
        train(optimizer, model, stream[step : step + 1])
    optimizer.close()
    names = [getattr(entry, "name", "") for entry in lanes.program]
    return [name for name in names if name.startswith(("load", "forward", "backward"))]


def test_the_head_is_on_its_way_before_the_last_layers_run(ranks: Run) -> None:
    """And not earlier: gathers of layers, which are needed sooner, go before it."""
    for names in ranks(4, loads_of_a_step):
        loads = [name for name in names if name.startswith("load")]
        assert loads.index("load layers.3") < loads.index("load head")
        assert names.index("load head") < names.index("forward layers.3")


def twin_in_shards() -> tuple[bool, bool]:
    """A state loaded from a run that keeps all whole; a rank has no state_dict of the model."""
    torch.manual_seed(0)
    one = Chain()
    two = copy.deepcopy(one)
    first, second = ot.offload(one, keep_whole=["*"], **STAGE_3), ot.offload(two, **STAGE_3)
    train(first, one, own_batches(1))
    second.load_state_dict(first.state_dict())
    stream = own_batches(2)[1:]
    same = train(first, one, stream) == train(second, two, stream)
    pairs = zip(first.master_weights(), second.master_weights(), strict=True)
    bits = all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    try:
        two.state_dict()
        told = False
    except (ModelError, RuntimeError):
        told = True
    first.close()
    second.close()
    dist.barrier()
    return same and bits, told


def test_state_of_the_one_is_that_of_the_other(ranks: Run) -> None:
    assert ranks(4, twin_in_shards) == [(True, True)] * 4
