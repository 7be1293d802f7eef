"""`compile_blocks`: the bits of layers compiled without the engine, in every placement."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.engine.autograd.recompute import RecomputeError
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Slot
from offloadtrain.engine.gradients import Gradients
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.heartbeat import HEARTBEAT
from tests import levels
from tests.numerics.comparison import assert_same, train
from tests.numerics.models import Chain, batches, loss_of
from tests.numerics.reference import ResidentRun

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
PLACED: dict[str, dict[str, Any]] = {
    "device": {},
    "streamed": {"working": "host"},
    "recomputed": {"working": "host", "activation": "recompute"},
    "some recomputed": {"activation": "recompute", "recompute_blocks": 2},
    "offloaded": {"activation": "offload"},
    "saved": {"activation": "offload_saved", "offload_saved_above": 1},
    "in shares": {"working": "host", "resident_blocks": 2, "state_on": {"device": 0.2}},
}
placed = pytest.mark.parametrize("options", PLACED.values(), ids=PLACED.keys())
RULE = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """torch's compiler up to the code generator, which takes seconds."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    make = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: make(forward, backend=counter))
    return counter


@pytest.mark.cover(0, levels.ALL)
@placed
def test_the_bits_of_compiled_layers(
    options: dict[str, Any], compiler: CompileCounterWithBackend
) -> None:
    """More layers than the compiler makes versions of one function share one code."""
    torch.manual_seed(0)
    model = Chain(torch._dynamo.config.recompile_limit + 2)
    plain_model = copy.deepcopy(model)
    for layer in plain_model.layers:
        layer.forward = torch.compile(layer.forward)
    resident = ResidentRun(plain_model, torch.bfloat16)
    optimizer = ot.offload(model, RULE, device="cpu", compile_blocks=True, **options)
    for tokens in batches(4):
        assert train(optimizer, model, [tokens]) == resident.step([tokens], loss_of)
    assert compiler.frame_count == 2  # the resident layers' code, and the offloaded ones'
    assert_same(resident, optimizer, model)


@pytest.mark.slow
def test_forwards_are_given_back_and_copies_have_their_own(
    compiler: CompileCounterWithBackend,
) -> None:
    model = Chain(3)
    optimizer = ot.offload(model, device="cpu", compile_blocks=True)
    (tokens,) = batches(1)
    train(optimizer, model, [tokens])
    plain_model = copy.deepcopy(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (plain_model, loaded):
        assert all(layer.forward.__self__ is layer for layer in other.layers)
        with torch.no_grad():
            assert torch.equal(other(tokens), model(tokens))
    optimizer.close()
    assert not any("forward" in layer.__dict__ for layer in model.layers)


@pytest.mark.slow
def test_a_compilation_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = []
    make = torch.compile

    def backend(graph: Any, _: Any) -> Any:
        held_up.append(HEARTBEAT.held_up)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda forward: make(forward, backend=backend))
    model = Chain(2)
    optimizer = ot.offload(model, device="cpu", compile_blocks=True)
    (tokens,) = batches(1)
    train(optimizer, model, [tokens])
    assert held_up == [True] and not HEARTBEAT.held_up
    optimizer.close()


@pytest.mark.parametrize(
    "activation", ["recompute", pytest.param("offload", marks=pytest.mark.slow)]
)
def test_what_recompute_would_leave_uncompiled_is_refused(activation: str) -> None:
    """torch's checkpoint hides what is in it from the compiler, which has the module's call."""
    model = Chain(3)
    for layer in model.layers:
        layer.compile(backend="eager")
    optimizer = ot.offload(model, device="cpu", activation=activation)
    (tokens,) = batches(1)
    message = r"a Layer .* module\.compile\(\).*compile_blocks=True"
    with pytest.raises(RecomputeError, match=message):
        train(optimizer, model, [tokens])
    optimizer.close()


SHAPES = {
    "gpt": ModelShape(vocab_size=64, num_layers=4, d_model=64, num_heads=4, dropout=0.1),
    "llama": ModelShape(
        vocab_size=64,
        num_layers=4,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        mlp="swiglu",
        positions="rotary",
    ),
    "experts": ModelShape(
        vocab_size=64, num_layers=2, d_model=32, num_heads=2, num_experts=4, experts_per_token=2
    ),
}


generates = pytest.mark.skipif(
    " " in torch.__file__, reason="torch's commands of the C++ compiler end at a path's space"
)


@generates
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_generated_code_has_the_same_bits_in_every_placement(shape: ModelShape) -> None:
    torch._dynamo.reset()
    result = [_trained(shape, options) for options in PLACED.values()]
    for losses, weights in result[1:]:
        assert losses == result[0][0] and all(map(torch.equal, weights, result[0][1]))
    losses, weights = _trained(shape, {"compile_blocks": False})
    assert not all(map(torch.equal, weights, result[0][1]))
    # Generated code rounds elsewhere, and its dropout draws other places.
    assert result[0][0][0] == pytest.approx(losses[0], rel=2e-2 if shape.dropout else 1e-3)


def _trained(shape: ModelShape, options: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the masters."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(shape)
    optimizer = ot.offload(
        model, RULE, device="cpu", clip_norm=1.0, **{"compile_blocks": True, **options}
    )
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 64, (2, 17), generator=draw)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    result = [weight.clone() for _, weight in optimizer.master_weights()]
    optimizer.close()
    return losses, result


@pytest.mark.cover(0, levels.ALL)
@placed
def test_compute_is_busy_until_a_compiled_backward_has_run(
    options: dict[str, Any], compiler: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It frees the saved tensors before it runs, with which other backwards end."""
    model, open_spans = Chain(3), []
    optimizer = ot.offload(model, RULE, device="cpu", compile_blocks=True, **options)
    deliver = Gradients.deliver

    def watched(gradients: Gradients, block: Block, slot: Slot) -> Any:
        if block.repeated and gradients._deliveries[block].arrived == 0:
            open_spans.append(bool(block.graphs._spans))
        return deliver(gradients, block, slot)

    monkeypatch.setattr(Gradients, "deliver", watched)
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    assert open_spans == [True] * 6
    optimizer.close()
