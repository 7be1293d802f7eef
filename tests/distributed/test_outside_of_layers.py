"""ZeRO stage 3 outside of layers: embedding, norm and head in shards, gathered into one slot.

Bits of further models are in `test_sharded.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.gradients import GradientAccessError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.runtime.process_group import RankError
from offloadtrain.step.program.streaming import StreamError
from offloadtrain.step.proof.prove import prove
from tests.distributed.conftest import Run
from tests.distributed.reference import own_batches
from tests.numerics.comparison import train
from tests.numerics.models import VOCAB, WIDTH, Chain, batches, loss_of
from tests.parallel.messages import warnings_of
from tests.recording_lanes import RecordingLanes

STAGE_3: dict[str, Any] = {"zero_stage": 3, "device": "cpu"}


def streamed_blocks(*, tied: bool = False, **options: Any) -> tuple[list[str], dict[str, int], int]:
    """Streamed blocks outside of layers, what the device holds, and the bytes of all of them."""
    optimizer = ot.offload(Chain(tied=tied), **STAGE_3, **options)
    outside = [block for block in optimizer._blocks if not block.spec.repeated]
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


# Ranks that use other parts of a model: in stage 3 a block that is not complete must not leave
# after another gather, and an evaluation takes one path on all ranks. The bits of layers that
# each rank uses in parts are in `test_sharded.py`.


class Tasks(nn.Module):
    """A head for training, and one for each of two evaluations, all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.trained, self.left, self.right = (nn.Linear(WIDTH, VOCAB) for _ in range(3))

    def forward(self, tokens: torch.Tensor, head: str = "trained") -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.get_submodule(head)(x)


def evaluated(heads: list[str], zero_stage: int) -> str:
    """The error of evaluations after two steps, each rank's with its own head."""
    torch.manual_seed(0)
    model, tokens = Tasks(), torch.arange(12).reshape(3, 4)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", zero_stage=zero_stage)
    for _ in range(2):
        optimizer.backward(model(tokens).float().logsumexp(-1).mean())
        optimizer.step()
    try:
        with torch.no_grad():
            model(tokens)
            model(tokens, heads[dist.get_rank()])
    except RankError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "stage"), [(["left", "right"], 3), (["left", "left"], 3), (["left", "right"], 2)]
)
def test_an_evaluation_that_takes_another_path_is_refused(
    own_ranks: Run, heads: list[str], stage: int
) -> None:
    """The gathers of two heads would meet, and each rank would compute with a piece of both."""
    differ = stage == 3 and heads[0] != heads[1]
    for message in own_ranks(2, evaluated, heads, stage):
        assert message[:40] == ("ranks disagree in an evaluation: rank 1 " if differ else "")


# Weights in shards: reads outside of a forward, and their gradients.


def read_outside_of_a_forward() -> None:
    """Every rank raises the error by itself: a rank that reads alone must not wait for others."""
    model = Chain(6)
    optimizer = ot.offload(model, device="cpu", zero_stage=3)
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        if optimizer.ranks.rank == 0:
            with pytest.raises(StreamError, match=r"optimizer.full_weights.*zero_stage = 2"):
                model.layers[1].up.weight.norm()
    optimizer.close()


class FunctionalHead(Chain):
    """The head's product is made by the model itself, in every forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.head.weight, self.head.bias)


def functional_losses(stage: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = FunctionalHead(4), []
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32", clip_norm=0.5, zero_stage=stage
    )
    for tokens in batches(4):
        loss = loss_of(model, tokens)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    optimizer.close()
    return losses


def test_in_stage_3_a_read_outside_of_a_forward_raises(ranks: Run) -> None:
    ranks(2, read_outside_of_a_forward)


def test_in_stage_3_a_forward_reads_weights_without_a_call(ranks: Run) -> None:
    assert ranks(2, functional_losses, 3) == ranks(2, functional_losses, 2)


def gradients_of_ranks(options: dict[str, Any]) -> tuple[float, float, float]:
    """The largest difference to the mean gradient, to its norms, and to torch's total norm."""
    torch.manual_seed(0)
    model, plain = Chain(), Chain()
    plain.load_state_dict(model.state_dict())
    optimizer = ot.offload(model, device="cpu", precision="fp32", **options)
    ranks = optimizer.ranks
    for number, tokens in enumerate(batches(ranks.size)):
        (loss_of(plain, tokens) / ranks.size).backward()
        if number == ranks.rank:
            loss_of(model, tokens).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with pytest.raises(GradientAccessError, match=r"divided among ranks.*optimizer.gradients\(\)"):
        print(model.head.weight.grad)
    assert not hasattr(model.head.weight, "grad")
    norms, gradients = optimizer.grad_norms(), dict(optimizer.gradients())
    assert norms.keys() == gradients.keys() == expected.keys()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.clip_coef < 0.5
    return (
        max(float((gradients[name] - grad).abs().max()) for name, grad in expected.items()),
        max(abs(norms[name] - float(grad.norm())) for name, grad in expected.items()),
        abs(float(total) - float(torch.nn.utils.get_total_norm(list(expected.values())))),
    )


@pytest.mark.parametrize("options", [{"zero_stage": 2}, {"zero_stage": 3, "working": "host"}])
def test_gradients_in_shards(ranks: Run, options: dict[str, Any]) -> None:
    for differences in ranks(2, gradients_of_ranks, options):
        assert max(differences) < 1e-6
