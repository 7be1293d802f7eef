"""Forwards that run again in backward: behind the hooks, or over inputs that they change."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.engine.autograd.recompute import RecomputeError, Rewind, RewindError
from offloadtrain.engine.autograd.saved_tensors import ChangedInPlaceError
from offloadtrain.engine.block import StaleGraphError
from offloadtrain.runtime.lanes import SequentialLanes, on_lanes
from offloadtrain.step.program.streaming import StreamError
from tests import levels
from tests.harsh_lanes import poisoned
from tests.numerics.comparison import assert_same, compare, follow, make, pair, train
from tests.numerics.models import VOCAB, WIDTH, Chain, Layer, batches, loss_of
from tests.numerics.test_streaming import MODES

DEPTH = 5


class Scaled(Layer):
    """Reads a parameter of its own before it calls any module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Behind(Scaled):
    """Its forward recomputes itself, as the layers of transformers do."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(partial(Scaled.forward, self), x, use_reentrant=self.reentrant)


class BehindWithoutInputs(Layer):
    """Its recompute starts from no saved input: the hidden state is in the closure."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda: super(BehindWithoutInputs, self).forward(x), use_reentrant=False)


class CalledPast(Chain):
    """The model recomputes `layer.forward`, which it never calls as a module."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer.forward, x, use_reentrant=False)
        return self.head(self.norm(x))


def of_layers(make: Callable[[], nn.Module]) -> Chain:
    chain = Chain(0)
    chain.layers = nn.ModuleList(make() for _ in range(DEPTH))
    return chain


RECOMPUTES: dict[str, Callable[[], Chain]] = {
    "behind, reentrant": lambda: of_layers(lambda: Behind(True)),
    "behind": lambda: of_layers(lambda: Behind(False)),
    "behind, without inputs": lambda: of_layers(BehindWithoutInputs),
    "wrapped": lambda: of_layers(lambda: checkpoint_wrapper(Scaled(), CheckpointImpl.NO_REENTRANT)),
    "called past": lambda: CalledPast(DEPTH),
}


PLACED: dict[str, dict[str, Any]] = {
    "2 slots": {"working": "host", "device_slots": 2},
    "3 slots": {"working": "host", "device_slots": 3},
    "resident": {},
    "recomputed": {"activation": "recompute"},
}


@pytest.mark.parametrize(
    ("name", "placement", "mode"), levels.array([*RECOMPUTES], [*PLACED], [*MODES])
)
def test_a_recompute_behind_the_hooks_has_the_same_bits(
    name: str, placement: str, mode: str
) -> None:
    with on_lanes(poisoned(SequentialLanes())):
        resident, optimizer, model = pair(
            make(RECOMPUTES[name]), accum=2, **{"clip": 0.5, **PLACED[placement], **MODES[mode]}
        )
        follow(resident, optimizer, model, batches(8), 2)
        if name != "wrapped":  # which has other names for its parameters than its model
            assert_same(resident, optimizer, model)


class EveryOther(Chain):
    """Every other layer recomputed by a parent, the reentrant way: nothing of it is in a layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x) if index % 2 else checkpoint(layer, x, use_reentrant=True)
        return self.head(self.norm(x))


class InPairs(Chain):
    """One recompute around two layers, each of which ends with what unpacks its input first."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        for layer in self.layers:
            layer.down = nn.Linear(VOCAB, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda x, a=first, b=second: b(a(x)), x, use_reentrant=False)
        return self.head(self.norm(x))


class Several(Chain):
    """A user's recompute over several blocks at once."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(6)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for start in (0, 3):

            def run(x: Tensor, start: int = start) -> Tensor:
                for layer in self.layers[start : start + 3]:
                    x = layer(x)
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("model", "slots"),
    [
        (partial(EveryOther, 6), 1),
        (partial(InPairs, 6), 1),
        (partial(Several, True), 1),
        (partial(Several, True), 2),
        (partial(Several, False), 2),
        (partial(Several, False), 3),
    ],
)
def test_a_users_recompute_over_layers(model: Callable[[], nn.Module], slots: int) -> None:
    """Few slots are enough where layers take turns."""
    compare(model, working="host", device_slots=slots, clip=0.5)


def test_a_node_that_recomputes_other_blocks_keeps_its_own() -> None:
    """It has unpacked a weight when another saved tensor of it makes three blocks run again."""
    _, optimizer, model = pair(Several(False), working="host", device_slots=1)
    with pytest.raises(StreamError, match="set device_slots = 2"):
        train(optimizer, model, batches(1))


@pytest.mark.parametrize(("name", "slots"), list(zip(RECOMPUTES, cycle([2, 3]), strict=False)))
def test_adapters_behind_the_hooks_do_not_lose_the_frozen_weights_under_them(
    name: str, slots: int
) -> None:
    """Updates inside backward want the slot of a block whose trained parameters are all done, while
    nodes of it still read frozen ones."""
    torch.manual_seed(0)
    model = RECOMPUTES[name]()
    for key, param in model.named_parameters():
        param.requires_grad_("layers" not in key or "down" in key)
    results = []
    for working in ("device", "host"):
        plain_model = copy.deepcopy(model)
        with on_lanes(poisoned(SequentialLanes())):
            optimizer = ot.offload(
                plain_model,
                ot.AdamW(lr=1e-2),
                device="cpu",
                update="delayed",
                working=working,
                device_slots=slots,
            )
            losses = [train(optimizer, plain_model, [tokens]) for tokens in batches(6)]
        results.append((losses, optimizer.grad_norm))
        optimizer.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["behind", "behind, reentrant"])
def test_a_recompute_in_a_graph_older_than_its_weights_raises(name: str) -> None:
    torch.manual_seed(0)
    _, optimizer, model = pair(RECOMPUTES[name](), working="host")
    first, second = batches(2)
    train(optimizer, model, [first])
    old = loss_of(model, second)
    optimizer.backward(loss_of(model, second))
    optimizer.step()
    model.head.weight.grad = None
    with pytest.raises(StaleGraphError, match="through a graph that was built before"):
        old.backward()


@pytest.mark.parametrize("activation", ["keep", "recompute", "selective"])
def test_a_saved_tensor_changed_in_place_raises_as_without_offload(activation: str) -> None:
    class Changing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x).exp()  # saves its result
            z = y * 2
            y += 1
            return x + self.down(self.up(z)) + y

    model = nn.Sequential(Changing(), Changing())
    x = torch.randn(3, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        copy.deepcopy(model)(x).sum().backward()
    for working in ("device", "host"):
        options: dict[str, Any] = {"working": working, "activation": activation}
        optimizer = ot.offload(copy.deepcopy(model), device="cpu", **options)
        with pytest.raises(ChangedInPlaceError, match="changed in place after it was saved"):
            optimizer.model(x).sum().backward()


def test_a_forward_without_backward_keeps_nothing_alive() -> None:
    """An operation that saves its own result must not be kept by what is kept for it."""
    optimizer = ot.offload(model := nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), device="cpu")
    alive: list[Any] = []

    def saw(_: nn.Module, __: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output))

    model[1].register_forward_hook(saw)
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(2, 4))
        assert alive[0]() is None
    finally:
        gc.enable()
    optimizer.close()


# What the second run saves


class Branching(Layer):
    """Its second run saves a tensor of another shape, or fewer tensors."""

    branch = ""

    def forward(self, x: Tensor) -> Tensor:
        BRANCHES.append(None)
        if self.branch == "a tensor of another shape" and len(BRANCHES) > 2:
            x = x[:2]
        x = super().forward(x)
        return x if self.branch == "fewer tensors" and len(BRANCHES) > 2 else x.sigmoid()


BRANCHES: list[None] = []
"""One for each run: an attribute of the layer would be put back in between."""


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        ("a tensor of another shape", r"'1'.* saved \(\(3, 24\), .* first run, and \(\(2, 24\), "),
        ("fewer tensors", r"'1'.* saved \d+ tensors in its first run, and \d+ in its second"),
    ],
)
def test_a_second_run_that_computes_something_else_raises(branch: str, message: str) -> None:
    model = nn.Sequential(Branching(), Branching())
    model[1].branch = branch
    optimizer = ot.offload(model, device="cpu", activation="recompute")
    BRANCHES.clear()
    loss = model(torch.randn(3, WIDTH)).sum()
    with pytest.raises(RecomputeError, match=message):
        optimizer.backward(loss)
    optimizer.close()


MADE: list[StorageWeakRef] = []
"""The memory of results that nodes save."""


class Observed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x).exp()
        MADE.append(StorageWeakRef(result.untyped_storage()))
        return result * x


@pytest.mark.parametrize("working", ["device", "host"])
def test_a_retained_graph_runs_again_for_each_backward_and_keeps_none_of_it(working: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Observed(), Observed())
    plain = copy.deepcopy(model)
    optimizer = ot.offload(
        model, device="cpu", activation="recompute", working=working, precision="fp32"
    )
    x = torch.randn(3, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    gc.collect()
    gc.disable()
    try:
        MADE.clear()
        loss = model(x).sum()
        for backward in range(3):
            (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert torch.equal(grad, expected)
            assert len(MADE) == 2 * (backward + 2)
            assert all(memory.expired() for memory in MADE)
    finally:
        gc.enable()
    optimizer.close()


class Inner(Layer):
    """Runs a backward through a part of itself, in both of its runs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        (grad,) = torch.autograd.grad(y.square().sum(), y, retain_graph=True)
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return x + y * grad.detach() + slope.detach()


@pytest.mark.parametrize("working", ["device", "host"])
def test_a_backward_inside_a_forward_that_runs_again(working: str) -> None:
    resident, optimizer, model = pair(
        make(lambda: of_layers(Inner)), accum=2, activation="recompute", working=working
    )
    follow(resident, optimizer, model, batches(8), 2)
    assert_same(resident, optimizer, model)


class PastHooks(Chain):
    """Calls the forwards of its layers: no hook of a layer fires."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("working", ["device", "host"])
def test_a_recomputed_layer_that_is_called_past_its_hooks(working: str) -> None:
    with on_lanes(poisoned(SequentialLanes())):
        resident, optimizer, model = pair(
            make(lambda: PastHooks(DEPTH)), accum=2, activation="recompute", working=working
        )
        follow(resident, optimizer, model, batches(8), 2)
        assert_same(resident, optimizer, model)


# Inputs that a forward changes


@dataclass
class Cache:
    """Keys of every layer, as a key-value cache: grows with each forward."""

    keys: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(DEPTH)])
    calls: int = 0


class Remembering(Layer):
    """Attends over what the cache holds and its own, and writes into the cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor, *, cache: Cache, layer_calls: dict[str, Any]) -> Tensor:
        cache.calls += 1
        layer_calls[f"layer {self.index}"] = layer_calls.get(f"layer {self.index}", 0) + 1
        cache.keys[self.index].append(self.norm(x))
        keys = torch.cat(cache.keys[self.index], dim=1)
        return super().forward(x + (x @ keys.mT).softmax(-1) @ keys)


class Caching(Chain):
    """Makes a cache in every forward."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Remembering(index) for index in range(DEPTH))
        self.cache = Cache()
        self.layer_calls: dict[str, Any] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        self.cache, self.layer_calls = Cache(), {}
        x = self.embed(tokens)
        self.cache.keys[2].append(x.detach())  # a prefix
        for layer in self.layers:
            x = layer(x, cache=self.cache, layer_calls=self.layer_calls)
        return self.head(self.norm(x))


@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("activation", ["recompute", "offload"])
def test_a_forward_that_changes_its_inputs_runs_again_over_what_it_got(
    activation: str, working: str
) -> None:
    how: dict[str, Any] = {"activation": activation, "working": working, "clip": 0.5}
    resident, optimizer, model = pair(make(Caching), **how)
    for tokens in batches(3):
        follow(resident, optimizer, model, [tokens])
        assert model.cache.calls == DEPTH and model.layer_calls == resident.model.layer_calls
        assert [len(keys) for keys in model.cache.keys] == [1, 1, 2, 1, 1]
    assert_same(resident, optimizer, model)


def test_what_layers_write_into_their_inputs_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is held until backward, which recompute is there to avoid."""
    model = Caching()
    optimizer = ot.offload(model, device="cpu", activation="recompute")
    for tokens in batches(2):
        train(optimizer, model, [tokens])
    (record,) = [r for r in caplog.records if "written" in r.message]
    assert "1.4 KiB into its inputs" in record.message and "use_cache=False" in record.message
    caplog.clear()
    optimizer = ot.offload(model := Chain(), device="cpu", activation="recompute")
    train(optimizer, model, batches(1))
    assert not caplog.records


def test_an_input_tensor_changed_in_place_is_told() -> None:
    class Counting(Layer):
        def forward(self, x: Tensor, counts: dict[str, Tensor]) -> Tensor:
            counts["tokens"] += x.shape[0]
            return super().forward(x)

    class Counted(Chain):
        def __init__(self) -> None:
            super().__init__(0)
            self.layers = nn.ModuleList(Counting() for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x, counts = self.embed(tokens), {"tokens": torch.zeros(())}
            for layer in self.layers:
                x = layer(x, counts)
            return self.head(self.norm(x))

    model = Counted()
    optimizer = ot.offload(model, device="cpu", activation="recompute")
    with pytest.raises(RewindError, match="changed in place since its first run"):
        optimizer.backward(loss_of(model, batches(1)[0]))


class Slotted:
    __slots__ = ("__private", "late", "value")

    def __init__(self) -> None:
        self.value = self.__private = 1

    def set(self, to: int) -> None:
        self.value = self.late = self.__private = to

    def __repr__(self) -> str:
        return f"{self.value} {self.__private} {getattr(self, 'late', None)}"


def test_every_kind_of_object_is_rewound_and_put_back() -> None:
    slotted, plain = Slotted(), Cache()
    objects: dict[str, Any] = {
        "list": [1, [2]],
        "deque": deque([1], maxlen=3),
        "set": {1},
        "ordered": OrderedDict(a=1, b=2),
        "slotted": slotted,
        "inside a tuple": (plain,),
    }

    def change(to: int) -> None:
        objects["list"][1].append(to)
        objects["deque"].append(to)
        objects["set"].add(to)
        objects["ordered"].move_to_end("a")
        objects["ordered"][f"new {to}"] = to
        slotted.set(to)
        plain.calls = to
        objects["added"] = to

    def state() -> str:
        ordered = list(objects["ordered"].items())
        parts = objects["list"], objects["deque"], objects["set"], ordered
        return f"{parts} {slotted} {plain.calls} {sorted(objects)}"

    before, rewind = state(), Rewind((objects,), {})
    change(7)
    after = state()
    for _ in range(2):
        with rewind.again():
            assert state() == before
            change(8)
        assert state() == after
    with pytest.raises(KeyError), rewind.again():
        change(9)
        raise KeyError
    assert state() == after
