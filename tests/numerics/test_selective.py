"""`activation="selective"`: the bits of keeping everything, and which operations run again."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import offloadtrain as ot
from offloadtrain.engine import ModelError
from offloadtrain.engine.autograd.selective import PolicyError, Selection
from tests import levels
from tests.numerics.comparison import ADAMW, assert_same, pair, train
from tests.numerics.models import WIDTH, Chain, Layer, batches, loss_of
from tests.plan.tracing.measured import most_allocated

STREAMED: dict[str, Any] = {"working": "host", "device_slots": 1}
placed = pytest.mark.parametrize("options", [{}, STREAMED], ids=["resident", "streamed"])


class Attention(Layer):
    """Two heads of 12 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + attended.transpose(1, 2).flatten(2))


class InPlace(Layer):
    """Changes the result of a product in place."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.norm(x))
        up += 1.0
        up.mul_(0.5)
        return x + self.down(F.gelu(up))


class Transposed(Layer):
    """Reads its weights through views of several kinds."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.norm(x) @ self.up.weight.t() + torch.ops.aten._unsafe_view(self.up.bias, [-1])
        return x + F.gelu(up) @ self.down.weight.unsqueeze(0).transpose(1, 2)


class TwoDropouts(Layer):
    """Between products whose results stay."""

    def forward(self, x: Tensor) -> Tensor:
        up = F.dropout(self.up(self.norm(x)), 0.3)
        return x + F.dropout(self.down(F.gelu(up)), 0.3)


class RandomMasks(Layer):
    """Dropout by an operation that makes a new tensor, on the CPU too."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.norm(x))
        down = self.down(F.gelu(up * (torch.rand_like(up) > 0.3)))
        return x + down * (torch.rand_like(down) > 0.3)


class Mixed(Layer):
    """In fp32 before each product: the engine casts there."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x.float())).float())


class Recurrent(Layer):
    """Writes to the results of products through tensors with versions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.gru(self.norm(x))[0])


class Energy(Layer):
    """Differentiates a part of itself: its second run begins within its first one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = self.norm(x)
            (force,) = torch.autograd.grad(self.up(z).square().sum(), z, create_graph=True)
        return x + self.down(F.gelu(self.up(force)))


class OfLayers(Chain):
    def __init__(self, kind: type[Layer], depth: int = 4) -> None:
        super().__init__(depth)
        self.layers = nn.ModuleList(kind() for _ in range(depth))


def save_all(*_: Any, **__: Any) -> bool:
    return True


def save_every_second(context: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    save_every_second.calls += 1  # type: ignore[attr-defined]
    if save_every_second.calls % 2:  # type: ignore[attr-defined]
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


save_every_second.calls = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "policy", "options"),
    levels.array(
        [InPlace, Attention, Transposed, TwoDropouts, Mixed, Recurrent, Energy],
        [save_all, None, save_every_second],
        [{}, STREAMED],
    ),
)
def test_a_run_has_the_bits_of_keeping_everything(
    kind: type[Layer], policy: Callable[..., Any] | None, options: dict[str, Any]
) -> None:
    if kind is Energy and options:
        options = options | {"device_slots": 2}  # a backward within a forward needs both blocks
    torch.manual_seed(0)
    resident, optimizer, model = pair(
        OfLayers(kind), "fp32" if kind is Mixed else "bf16", activation="selective",
        activation_policy=policy, **options,
    )  # fmt: skip
    for number, tokens in enumerate(batches(3)):
        torch.manual_seed(number)
        expected = resident.step([tokens], loss_of)
        torch.manual_seed(number)
        assert train(optimizer, model, [tokens]) == expected
    assert_same(resident, optimizer, model)
    optimizer.close()


class Watched(Layer):
    """Lets others see the result of a product."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.up(self.norm(x))
        return x + self.down(F.gelu(self.hidden))


def test_a_checkpoint_around_layers_that_differentiate_a_part_of_themselves() -> None:
    """The inner gradient runs the user's forward again, with other layers, within a first run."""

    def gradients(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = OfLayers(Energy, 3)
        optimizer = ot.offload(model, ADAMW, device="cpu", precision="fp32", **options)
        tokens = batches(1)[0]
        optimizer.backward(checkpoint(loss_of, model, tokens, use_reentrant=False))
        return [grad.clone() for _, grad in optimizer.gradients()]

    expected = gradients()
    for values, grad in zip(gradients(activation="selective"), expected, strict=True):
        assert torch.equal(values, grad)


def test_what_is_changed_after_the_forward_is_computed_again() -> None:
    """As where nothing is kept."""
    gradients = []
    for options in ({"activation": "recompute"}, {"activation_policy": save_all}):
        torch.manual_seed(0)
        model = OfLayers(Watched)
        optimizer = ot.offload(model, device="cpu", **{"activation": "selective", **options})
        loss = loss_of(model, batches(1)[0])
        with torch.no_grad():
            for layer in model.layers:
                layer.hidden.mul_(2.0)
        optimizer.backward(loss)
        optimizer.step()
        gradients.append(optimizer.grad_norm)
        optimizer.close()
    assert gradients[0] == gradients[1] > 0


def test_a_view_of_weights_is_never_kept() -> None:
    """In the second run the block may have another slot, and the first one other weights."""
    selection = Selection(save_all)

    def run(weights: Tensor) -> tuple[Tensor, ...]:
        with selection:
            return weights * 1, weights.t(), torch.ops.aten._unsafe_view(weights, [-1])

    run(torch.zeros(2, 3))
    product, turned, flat = run(torch.ones(2, 3))
    assert not product.any() and turned.all() and flat.all()


def test_kept_draws_and_others_are_the_same() -> None:
    """The first dropout of each layer stays, the second one runs again."""
    drawn = 0

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
        nonlocal drawn
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        drawn += draws
        return bool(draws and drawn % 2)

    torch.manual_seed(0)
    kept, model = OfLayers(RandomMasks), OfLayers(RandomMasks)
    model.load_state_dict(kept.state_dict())
    results = []
    options = {"activation": "selective", "activation_policy": policy}
    for each, chosen in ((kept, {}), (model, options)):
        optimizer = ot.offload(each, ADAMW, device="cpu", **chosen)
        for number, tokens in enumerate(batches(2)):
            torch.manual_seed(number)
            train(optimizer, each, [tokens])
        results.append([weight.clone() for _, weight in optimizer.master_weights()])
        optimizer.close()
    assert drawn == 2 * 4 * 2
    assert all(map(torch.equal, *results))


class Calls(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


EXPENSIVE = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
CHEAP = ("native_layer_norm", "gelu")


def backward_calls(**options: Any) -> Counter[str]:
    """Operations of a backward on the default lanes, of the model's forwards among them."""
    torch.manual_seed(0)
    _, optimizer, model = pair(OfLayers(Attention), **options)
    loss = loss_of(model, batches(1)[0])
    with Calls() as calls:
        optimizer.backward(loss)
    optimizer.close()
    return calls.counts


@pytest.mark.default_lanes
@placed
def test_no_product_and_no_attention_runs_again(options: dict[str, Any]) -> None:
    keep, again = backward_calls(**options), backward_calls(activation="recompute", **options)
    selective = backward_calls(activation="selective", **options)
    assert all(selective[name] == keep[name] for name in EXPENSIVE)
    assert all(selective[name] == again[name] > keep[name] for name in CHEAP)
    assert again["addmm"] > keep["addmm"]
    first = backward_calls(activation="selective", recompute_blocks=1, **options)
    assert first["gelu"] == keep["gelu"] + 1


@pytest.mark.default_lanes
def test_the_peak_is_between_those_of_recompute_and_keep() -> None:
    def peak(**options: Any) -> int:
        torch.manual_seed(0)
        _, optimizer, model = pair(OfLayers(Attention, 8), **options)
        tokens = batches(1)[0].repeat(40, 1)
        train(optimizer, model, [tokens])
        return most_allocated(lambda: train(optimizer, model, [tokens]))

    keep, selective, again = (peak(activation=mode) for mode in ("keep", "selective", "recompute"))
    assert again * 1.2 < selective < keep / 1.2


@pytest.mark.default_lanes
def test_a_policy_sees_the_operations_of_the_model_alone() -> None:
    """No load, no cast, no view of the engine's: the same in every placement."""

    def operations(model: nn.Module, **options: Any) -> Counter[str]:
        counts: Counter[str] = Counter()

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
            assert all(not isinstance(value, nn.Parameter) or value.ndim for value in args)
            counts[str(operation)] += 1
            return "mm" in str(operation)

        optimizer = ot.offload(
            model, device="cpu", activation="selective", activation_policy=policy, **options
        )
        for tokens in batches(2):
            optimizer.backward(loss_of(model, tokens))
            optimizer.step()
        optimizer.close()
        return counts

    torch.manual_seed(0)
    model = OfLayers(Mixed)
    expected = operations(copy.deepcopy(model))
    layers, steps = 4, 2
    # x.float(); the products of 16 bits return 16 bits, and the sum with x too.
    assert expected["aten._to_copy.default"] == 2 * layers * steps
    assert expected["aten.gelu.default"] == layers * steps
    assert operations(copy.deepcopy(model), **STREAMED) == expected


def compiled_layers() -> Chain:
    model = Chain(3)
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def test_layers_that_are_compiled_already_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'layers\.0' is compiled.*compile_blocks=True"):
        ot.offload(compiled_layers(), device="cpu", activation="selective")


def test_what_is_kept_does_not_go_to_the_host() -> None:
    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_CPU_OFFLOAD

    model = Chain(3)
    options: dict[str, Any] = {"activation": "selective", "activation_policy": policy}
    optimizer = ot.offload(model, device="cpu", **options)
    with pytest.raises(PolicyError, match=r"MUST_CPU_OFFLOAD for aten\..*'offload_saved'"):
        loss_of(model, batches(1)[0])
    optimizer.close()
