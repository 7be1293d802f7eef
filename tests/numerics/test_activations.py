"""Activations kept, recomputed or offloaded: the same bits."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import offloadtrain as ot
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.engine.autograd import recompute
from offloadtrain.engine.autograd.offload import ActivationError, ActivationOffloader
from offloadtrain.engine.buffers import BlockInputs, MemoryMap, Ranges
from offloadtrain.engine.interpreter import Functions, Interpreter
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import MetaDiskArena
from offloadtrain.runtime.lanes import Lane, Lanes, SequentialLanes
from offloadtrain.runtime.process_group import ALONE
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Launched, Waited
from tests import levels
from tests.numerics.comparison import assert_same, compare, follow, make, pair, train
from tests.numerics.models import WIDTH, Chain, Layer, batches, loss_of
from tests.numerics.reference import ResidentRun
from tests.plan.tracing.measured import most_allocated
from tests.recording_lanes import RecordingLanes
from tests.step.specs import chain

POLICIES = ["recompute", "selective", "offload", "offload_saved"]
each_policy = pytest.mark.parametrize("activation", POLICIES)


class Dropped(Chain):
    """Dropout inside each layer."""

    def __init__(self) -> None:
        super().__init__(4)
        for index, layer in enumerate(self.layers):
            self.layers[index] = nn.Sequential(layer, nn.Dropout(0.3))


@each_policy
def test_dropout_draws_the_same(activation: str) -> None:
    compare(Dropped, activation=activation, working="host")


def test_inputs_move_once_each_way_and_their_host_memory_is_used_again() -> None:
    depth = 12
    _, optimizer, model = pair(Chain(depth), activation="offload")
    padded = sum(2 * b.numel for block in optimizer._blocks for b in block.buckets)
    inputs = 2 * depth * 3 * 10 * WIDTH  # batch 3, 10 tokens
    for tokens in batches(3):
        before = optimizer._engine.lanes.totals.copy()
        train(optimizer, model, [tokens])
        moved = optimizer._engine.lanes.totals.minus(before)
        assert moved.d2h_bytes == moved.h2d_bytes == padded + inputs
        rows = [row for row in optimizer.ledger.rows() if row.owner == "block inputs"]
        assert [row.bytes for row in rows] == [inputs]


def peak_bytes(depth: int, **options: Any) -> int:
    """Largest sum of what torch's allocator has given out, in the third step."""
    torch.manual_seed(0)
    _, optimizer, model = pair(Chain(depth), **options)
    first, second, third = (tokens.repeat(40, 1) for tokens in batches(3))
    train(optimizer, model, [first])
    stream = iter((second, third))
    return most_allocated(lambda: train(optimizer, model, [next(stream)]))


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("working", ["device", "host"])
def test_the_peak_does_not_grow_with_depth(working: str) -> None:
    """But for what torch's checkpoint keeps per block: the state of the random generator, which a
    GPU run keeps on the host."""
    shallow, deep = (peak_bytes(n, activation="offload", working=working) for n in (4, 24))
    assert deep - shallow == 20 * torch.get_rng_state().nbytes
    input_bytes = 3 * 40 * 10 * WIDTH * 2
    recomputed = peak_bytes(24, activation="recompute") - peak_bytes(4, activation="recompute")
    assert recomputed >= 20 * input_bytes
    assert peak_bytes(24) - peak_bytes(4) > 4 * recomputed


@pytest.mark.parametrize(
    "activation", ["recompute", pytest.param("offload", marks=pytest.mark.slow)]
)
def test_the_first_layers_run_again_and_the_last_ones_keep_what_they_made(activation: str) -> None:
    forwards: list[int] = []

    class Noted(Layer):
        """`number` is its place in the model."""

        number = 0

        def forward(self, x: Tensor) -> Tensor:
            forwards.append(self.number)
            return super().forward(x)

    chain = Chain(6)
    for number, layer in enumerate(chain.layers):
        layer.__class__, layer.number = Noted, number
    _, optimizer, model = pair(chain, activation=activation, recompute_blocks=4)
    forwards.clear()
    optimizer.backward(loss_of(model, next(iter(batches(1)))))
    assert forwards == [0, 1, 2, 3, 4, 5, 3, 2, 1, 0]


def offloader(lanes: Lanes) -> ActivationOffloader:
    """Over a step whose blocks are never used: block inputs and nothing else."""
    program, ledger, device = Program(chain(1)), Ledger(), torch.device("cpu")
    disk, arena = MetaDiskArena(ledger), Arena(ledger, pin=False)
    memory = MemoryMap(program.table, device, arena=arena, disk=disk, ledger=ledger)
    ranges = Ranges(memory, BlockInputs(device))
    functions = Functions([], lanes, ALONE, ot.AdamW(), [], disk, seed=0)
    interpreter = Interpreter(lanes, ranges, functions, {})
    return ActivationOffloader(program, interpreter, ranges.inputs)


def test_a_fetch_ahead_that_nobody_used_is_waited_for() -> None:
    """A backward that ends early: its host memory is given to the next input."""
    lanes = RecordingLanes(SequentialLanes())
    inputs = offloader(lanes)
    offloaded = [inputs.offload(torch.randn(64).requires_grad_()) for _ in range(2)]
    offloaded[1].unpack()
    fetched = [e for e in lanes.program if isinstance(e, Launched) and e.lane is Lane.LOAD]
    assert len(fetched) == 2
    offloaded.clear()
    again = [inputs.offload(torch.randn(64).requires_grad_()) for _ in range(2)]
    assert prove(lanes.program) == []
    waits = [e for e in lanes.program if isinstance(e, Waited) and e.lane is Lane.D2H]
    without = [e for e in lanes.program if e not in waits]
    assert waits and any(fault.kind == "race" for fault in prove(without))
    assert len(again) == 2


def test_an_input_of_a_step_that_was_given_up_is_told() -> None:
    inputs = offloader(SequentialLanes())
    offloaded = inputs.offload(torch.randn(8).requires_grad_())
    inputs._program.reset()
    inputs.reset()
    with pytest.raises(ActivationError, match="run the forward again"):
        offloaded.unpack()
    tensor = torch.randn(8).requires_grad_()
    del offloaded  # its host buffer is free once, not twice
    first, second = inputs.offload(tensor), inputs.offload(tensor + 1)
    assert torch.equal(first.unpack(), tensor) and torch.equal(second.unpack(), tensor + 1)


class InPlace(Chain):
    """Changes a block's input after the block has saved it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x * 1.0
            y = layer(x)
            x += y
        return self.head(self.norm(x))


def test_an_input_changed_in_place_is_told() -> None:
    torch.manual_seed(0)
    _, optimizer, model = pair(InPlace(), activation="offload")
    with pytest.raises(ActivationError, match="changed in place"):
        train(optimizer, model, batches(1))


@each_policy
def test_copies_and_close_give_the_forward_back(activation: str) -> None:
    torch.manual_seed(0)
    model = make("chain")
    optimizer = ot.offload(model, device="cpu", activation=activation, precision="fp32")
    tokens = batches(1)[0]
    copied = copy.deepcopy(model)
    assert loss_of(copied, tokens).item() == loss_of(model, tokens).item()
    with torch.no_grad():
        copied.layers[0].up.weight.zero_()  # its own weights are used
    assert loss_of(copied, tokens).item() != loss_of(model, tokens).item()
    expected = loss_of(model, tokens).item()
    optimizer.close()
    assert "forward" not in model.layers[0].__dict__
    assert loss_of(model, tokens).item() == expected


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.9 compiles each layer anew")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
@pytest.mark.parametrize(
    ("how", "working"),
    [("wrapped", "host"), pytest.param("layer.compile()", "device", marks=pytest.mark.slow)],
)
def test_all_compiled_layers_share_one_code(
    how: str, working: str, caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than the compiler makes versions of one function."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    torch.manual_seed(0)
    model = Chain(torch._dynamo.config.recompile_limit + 2)
    resident = ResidentRun(copy.deepcopy(model), torch.bfloat16)
    for number, layer in enumerate(model.layers):
        if how == "wrapped":
            model.layers[number] = torch.compile(layer, backend=counter)
        else:
            layer.compile(backend=counter)
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1), device="cpu", working=working
    )
    for tokens in batches(3):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert counter.frame_count == 1
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]


FIRST_STEP = """
import gc, torch
import offloadtrain as ot
gc.disable()
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)))
optimizer = ot.offload(model, device="cpu", activation="recompute")
optimizer.backward(model(torch.ones(2, 8)).float().mean())
optimizer.step()
print(sum(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in gc.get_objects()))
"""


@pytest.mark.slow
def test_the_first_step_of_a_process_leaves_no_graph() -> None:
    """Neither to Python's garbage collector: logits are large."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_STEP], capture_output=True, check=True
    )
    assert result.stdout.split() == [b"0"]


class Exploding(Chain):
    """Raises in the middle of what runs again in backward, when told to."""

    def __init__(self) -> None:
        super().__init__(4)
        self.fuse = self.layers[1] = Fused()


class Fused(Layer):
    """Counts its runs where no second run is undone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]
        self.explode_at = -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] == self.explode_at:
            raise RuntimeError("planted")
        return super().forward(x)


@pytest.mark.parametrize("activation", ["recompute", "offload"])
@pytest.mark.parametrize("working", ["device", "host"])
def test_an_exception_while_running_again_is_survived(activation: str, working: str) -> None:
    resident, optimizer, model = pair(make(Exploding), activation=activation, working=working)
    stream = batches(4)
    follow(resident, optimizer, model, stream[:1])
    model.fuse.explode_at = model.fuse.calls[0] + 2
    with pytest.raises(RuntimeError, match="planted"):
        optimizer.backward(loss_of(model, stream[1]))
    follow(resident, optimizer, model, stream[2:])
    assert_same(resident, optimizer, model)


def test_an_exception_in_the_forward_is_not_seen_by_torchs_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of torch 2.9 leaves its hooks on whatever follows, as long as the exception lives."""
    original, errors = recompute.checkpoint, list[BaseException]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            errors.append(error)
            raise

    monkeypatch.setattr(recompute, "checkpoint", watched)
    resident, optimizer, model = pair(make(Exploding), activation="recompute", working="host")
    model.fuse.explode_at = 1
    with pytest.raises(RuntimeError, match="planted") as raised:
        loss_of(model, batches(1)[0])
    assert not errors
    follow(resident, optimizer, model, batches(2))
    assert_same(resident, optimizer, model)
    assert raised.value.__traceback__ is not None  # it lives


@pytest.mark.parametrize("activation", ["keep", *POLICIES])
def test_inference_mode_between_steps(activation: str) -> None:
    resident, optimizer, model = pair(Chain(5), working="host", activation=activation)
    for tokens in batches(3):
        with torch.inference_mode():
            assert loss_of(model, tokens).item() == loss_of(resident.model, tokens).item()
            model.state_dict()
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert_same(resident, optimizer, model)


def test_offloaded_inputs_count_in_the_host_memory_limit() -> None:
    """Their size is known in the first forward: it ends there, and the engine lives."""
    tokens = batches(1)[0]

    def run(limit: int | None) -> tuple[ot.OffloadOptimizer, Chain]:
        torch.manual_seed(0)
        model = Chain(4)
        options = {"activation": "offload", "host_memory_limit": limit}
        return ot.offload(model, device="cpu", **options), model

    optimizer, model = run(None)
    before = optimizer.ledger.total(Tier.HOST)
    optimizer.backward(loss_of(model, tokens))
    optimizer.step()
    needed = optimizer.ledger.total(Tier.HOST)
    assert needed > before
    enough, model = run(needed)
    enough.backward(loss_of(model, tokens))
    enough.step()
    short, model = run(needed - 1)
    with pytest.raises(HostMemoryError, match=r"block inputs need .* host_memory_limit is"):
        loss_of(model, tokens)
    assert short.ledger.total(Tier.HOST) < needed
    short.zero_grad()
    with torch.no_grad():
        assert torch.isfinite(loss_of(model, tokens))
