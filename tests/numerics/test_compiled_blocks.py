"""`compile_blocks`: the bits of layers compiled without the engine, in every placement."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch._functorch import partitioners

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.engine.autograd import compiled
from offloadtrain.engine.autograd.compiled import CompiledForward
from offloadtrain.engine.autograd.recompute import RecomputeError
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Slot
from offloadtrain.engine.gradients import Gradients
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.heartbeat import HEARTBEAT
from tests import levels
from tests.numerics.comparison import assert_same, train
from tests.numerics.models import WIDTH, Chain, batches, loss_of
from tests.numerics.reference import ResidentRun

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
PLACED: dict[str, dict[str, Any]] = {
    "device": {},
    "streamed": {"working": "host"},
    "recomputed": {"working": "host", "activation": "recompute"},
    "some recomputed": {"activation": "recompute", "recompute_blocks": 2},
    "selective": {"activation": "selective"},
    "selective, streamed": {"activation": "selective", "working": "host", "device_slots": 1},
    "offloaded": {"activation": "offload"},
    "saved": {"activation": "offload_saved", "offload_saved_above": 1},
    "divided and saved": {
        "activation": "offload_saved",
        "offload_saved_above": 1,
        "activation_budget": 0.3,
        "working": "host",
    },
    "in shares": {"working": "host", "resident_blocks": 2, "state_on": {"device": 0.2}},
}
placed = pytest.mark.parametrize("options", PLACED.values(), ids=PLACED.keys())
CHOOSE = partitioners.choose_saved_values_set
RULE = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """torch's compiler up to the code generator, which takes seconds."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    make = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda forward, backend=counter, **how: make(forward, backend=backend, **how),
    )
    monkeypatch.setattr(compiled, "CODE_GENERATOR", counter)
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
    # The resident layers' code, and the offloaded ones'.
    assert compiler.frame_count == 2
    assert_same(resident, optimizer, model)
    assert functorch_config.activation_memory_budget == 1.0
    assert partitioners.choose_saved_values_set is CHOOSE


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

    def backend(graph: Any, _: Any) -> Any:
        held_up.append(HEARTBEAT.held_up)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "CODE_GENERATOR", backend)
    model = Chain(2)
    optimizer = ot.offload(model, device="cpu", compile_blocks=True, activation="selective")
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


SAME_CODE = {
    "selective, streamed": "selective",
    "selective": "",
    "divided and saved": "",
}
"""Placement → another one whose layers have the same code; all others have that of "device"."""

generates = pytest.mark.skipif(
    " " in torch.__file__, reason="torch's commands of the C++ compiler end at a path's space"
)


@generates
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_generated_code_has_the_same_bits_in_every_placement(shape: ModelShape) -> None:
    torch._dynamo.reset()
    result = {name: _trained(shape, options) for name, options in PLACED.items()}
    kept = result["device"]
    for name, (losses, weights) in result.items():
        # What is computed again in backward is fused with other operations there.
        same = SAME_CODE.get(name, "device")
        if same:
            assert losses == result[same][0] and all(map(torch.equal, weights, result[same][1]))
        assert losses == pytest.approx(kept[0], rel=1e-3)
    losses, weights = _trained(shape, {"compile_blocks": False})
    assert not all(map(torch.equal, weights, kept[1]))
    # Generated code rounds elsewhere, and its dropout draws other places.
    assert kept[0][0] == pytest.approx(losses[0], rel=2e-2 if shape.dropout else 1e-3)


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
        if block.spec.repeated and gradients._deliveries[block].arrived == 0:
            open_spans.append(bool(block.graphs.spans))
        return deliver(gradients, block, slot)

    monkeypatch.setattr(Gradients, "deliver", watched)
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    assert open_spans == [True] * 6
    optimizer.close()


class Drawing(nn.Module):
    """Dropout in the middle, at the end and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        hidden = F.dropout(F.gelu(attended.transpose(1, 2).flatten(2)), 0.3)
        return x + F.dropout(self.down(hidden), 0.3)


BUDGETS: dict[str, dict[str, Any]] = {
    "recompute": {"activation": "recompute"},
    "selective": {"activation": "selective"},
    "a little": {"activation": "selective", "activation_budget": 0.1},
    "nothing": {"activation": "selective", "activation_budget": 0.0},
}


@pytest.mark.cover(1, levels.ALL)
@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("options", BUDGETS.values(), ids=BUDGETS.keys())
def test_what_backward_computes_again_draws_the_same(
    options: dict[str, Any], working: str, compiler: CompileCounterWithBackend
) -> None:
    """torch's partitioner alone would draw again."""
    torch.manual_seed(0)
    model = Chain(3)
    model.layers = nn.ModuleList(Drawing() for _ in range(3))
    plain_model = copy.deepcopy(model)
    for layer in plain_model.layers:
        layer.forward = torch.compile(layer.forward)
    resident = ResidentRun(plain_model, torch.bfloat16)
    optimizer = ot.offload(
        model, RULE, device="cpu", compile_blocks=True, working=working, **options
    )
    for number, tokens in enumerate(batches(3)):
        torch.manual_seed(number)
        expected = resident.step([tokens], loss_of)
        torch.manual_seed(number)
        assert train(optimizer, model, [tokens]) == expected
    assert_same(resident, optimizer, model)
    optimizer.close()


@generates
@pytest.mark.slow
def test_generated_code_draws_the_same_again() -> None:
    """Against finite differences, in fp32, on layers with one seed; after torch itself has cached
    code of the same budget, which draws anew."""
    torch._dynamo.reset()
    layer = Drawing()
    x = torch.randn(4, 6, WIDTH, requires_grad=True)
    plain = torch.compile(layer.forward, backend="inductor")
    with functorch_config.patch(activation_memory_budget=0.1):
        plain(x).sum().backward()
    torch._dynamo.reset()
    gradients = []
    for budget in (None, 0.0, 0.1, 0.5):
        forward = CompiledForward(layer, budget)
        torch.manual_seed(3)
        y = forward(x)
        torch.manual_seed(4)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.cover(0, levels.ALL)
@pytest.mark.parametrize("working", ["device", "host"])
def test_a_smaller_budget_saves_less(working: str, compiler: CompileCounterWithBackend) -> None:
    """What autograd saves, weights left out: those of a streamed block are handles."""
    shape = SHAPES["llama"]
    tokens = torch.randint(0, 64, (4, 65), generator=torch.Generator().manual_seed(0))

    def saved_bytes(**options: Any) -> int:
        torch.manual_seed(0)
        model = Transformer(shape)
        optimizer = ot.offload(model, device="cpu", compile_blocks=True, working=working, **options)
        optimizer.backward(model(tokens[:, :-1], tokens[:, 1:]))
        optimizer.step()
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens[:, :-1], tokens[:, 1:])
        optimizer.close()
        memory = {tensor.untyped_storage()._cdata: tensor.nbytes for tensor in saved}
        return sum(memory.values())

    kept, half, tenth, none = (
        saved_bytes(**options)
        for options in (
            {},
            {"activation": "selective"},
            {"activation": "selective", "activation_budget": 0.1},
            {"activation": "selective", "activation_budget": 0.0},
        )
    )
    assert none < tenth < half < kept
    assert none < kept / 2


def test_the_compiler_sees_no_code_of_the_engine(compiler: CompileCounterWithBackend) -> None:
    model = Chain(3)
    optimizer = ot.offload(
        model, RULE, device="cpu", compile_blocks=True, activation="selective", working="host"
    )
    for tokens in batches(2):
        train(optimizer, model, [tokens])
    traces = [node.stack_trace or "" for g in compiler.graphs for node in g.graph.nodes]
    assert any("models.py" in trace for trace in traces)
    assert not any("offloadtrain/engine" in trace for trace in traces)
    assert compiler.frame_count == 1
    assert functorch_config.activation_memory_budget == 1.0
    assert partitioners.choose_saved_values_set is CHOOSE
    optimizer.close()


class Cut(nn.Module):
    """A layer that the compiler does not take as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return x + F.gelu(y)


def test_a_layer_in_pieces_has_no_budget(compiler: CompileCounterWithBackend) -> None:
    """It would save more than it was asked to; as a whole it can run again."""
    model = Chain(3)
    model.layers = nn.ModuleList(Cut() for _ in range(3))
    (tokens,) = batches(1)
    for options in ({"activation": "recompute"}, {"activation": "recompute", "working": "host"}):
        plain_model = copy.deepcopy(model)
        optimizer = ot.offload(plain_model, RULE, device="cpu", compile_blocks=True, **options)
        train(optimizer, plain_model, [tokens])
        optimizer.close()
    optimizer = ot.offload(model, RULE, device="cpu", compile_blocks=True, activation="selective")
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        train(optimizer, model, [tokens])
    assert "Set activation = 'recompute'" in raised.value.__notes__[-1]
    optimizer.close()
