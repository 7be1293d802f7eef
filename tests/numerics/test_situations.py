"""Loops and models of public reports, offloaded and by a plain loop: the same losses, norms and
weights, in every placement, on any lanes. `tests/situations.toml` lists these and all others."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot

WIDTH, VOCAB = 16, 32
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"working": "host"},
    "recomputed": {"working": "host", "activation": "recompute"},
    "inputs offloaded": {"working": "host", "activation": "offload"},
    "saved tensors offloaded": {"activation": "offload_saved", "offload_saved_above": 0},
    "speculative": {"update": "speculative"},
    "state on the device": {"state_on": "device"},
    "all on the disk": {"state_on": "disk", "working": "disk"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Layer, count: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers, self.norm = nn.ModuleList(make() for _ in range(count)), nn.LayerNorm(WIDTH)

    def features(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class Dense(nn.Module):
    """Vectors in, vectors out."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(seed))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Plain:
    """A torch optimizer with the calls of an offloaded one."""

    def __init__(self, model: nn.Module, accum: int, params: Any) -> None:
        self.model, self.accum = model, accum
        trained = [param for param in model.parameters() if param.requires_grad]
        self.torch = torch.optim.AdamW(params or trained, lr=1e-2, betas=(0.9, 0.95))
        self.param_groups = self.torch.param_groups
        self.zero_grad, self.grad_norm = self.torch.zero_grad, 0.0

    def backward(self, loss: Tensor, divide: bool = True) -> None:
        (loss / self.accum if divide else loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.grad_norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        if self.grad_norm == self.grad_norm:
            self.torch.step()


class Run:
    """Makes optimizers, and collects what a situation computes."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self.options, self.optimizers, self.values = options, [], []  # type: ignore[var-annotated]

    def offload(self, model: nn.Module, accum: int = 1, params: Any = None) -> Any:
        if self.options is None:
            self.optimizers.append(Plain(model, accum, params))
        else:
            rule, named = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01), self.options
            common = {"clip_norm": 1.0, "grad_accum_steps": accum, "precision": "fp32"}
            self.optimizers.append(
                ot.offload(model, rule, params=params, device="cpu", **common, **named)
            )
        return self.optimizers[-1]

    def torchs(self, optimizer: Any) -> torch.optim.Optimizer:
        """The optimizer that torch's utilities take."""
        return optimizer.torch if self.options is None else optimizer

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.backward(loss)
        self.finish(optimizer, loss)

    def finish(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()
        self.values += [loss.item(), optimizer.grad_norm]

    def weights(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            if self.options is not None:
                optimizer.synchronize()
            yield from (param.detach() for param in optimizer.model.parameters())


SITUATIONS: dict[str, Callable[[Run], object]] = {}


def situation(function: Callable[[Run], object]) -> Callable[[Run], object]:
    SITUATIONS[function.__name__.replace("_", " ")] = function
    return function


# ---- loops


@situation
def evaluations_between_forward_and_backward_and_microbatches(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model, accum=2)
    for step in range(4):
        for micro in range(2):
            loss = loss_of(model(x := tokens(2 * step + micro)), x)
            with torch.no_grad():
                run.values.append(loss_of(model(tokens(50)), tokens(50)).item())
            optimizer.backward(loss)
            with torch.no_grad():
                run.values.append(loss_of(model(tokens(51)), tokens(51)).item())
        run.finish(optimizer, loss)


@situation
def consistency_with_a_forward_without_gradient(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    for step in range(4):
        loss = loss_of(model(x := tokens(step)), x)
        with torch.no_grad():
            target = model(x.flip(0)).softmax(-1)
        divergence = F.kl_div(model(x).log_softmax(-1), target, reduction="batchmean")
        run.step(optimizer, loss + 0.01 * divergence)


@situation
def cached_gradients_of_representations(run: Run) -> None:
    """The second window is shorter."""
    model = Net()
    model.head.requires_grad_(False)
    optimizer = run.offload(model, accum=3)
    for step in range(3):
        batches = [tokens(3 * step + micro) for micro in range(2 if step == 1 else 3)]
        with torch.no_grad():
            leaves = [model.features(x).mean(1) for x in batches]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        vectors = F.normalize(torch.cat(leaves), dim=-1)
        loss = F.cross_entropy(10 * vectors @ vectors.T, torch.arange(len(vectors)).roll(1))
        loss.backward()
        for x, leaf in zip(batches, leaves, strict=True):
            optimizer.backward((model.features(x).mean(1) * leaf.grad).sum(), divide=False)
        run.finish(optimizer, loss)


@situation
def a_schedule_that_moves_betas(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.torchs(optimizer), 2e-2, total_steps=5)
    for step in range(5):
        run.step(optimizer, loss_of(model(x := tokens(step)), x))
        schedule.step()
        run.values += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]]


@situation
def a_rate_that_is_a_tensor_and_decay_that_changes(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = torch.tensor(2e-3 * (step + 1)), 0.1 * step
        run.step(optimizer, loss_of(model(x := tokens(step)), x))


@situation
def a_search_for_a_rate_that_goes_back(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    inner = run.torchs(optimizer)
    run.step(optimizer, loss_of(model(x := tokens(0)), x))
    saved = copy.deepcopy((model.state_dict(), inner.state_dict()))
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * 10**step
        run.step(optimizer, loss_of(model(x := tokens(step)), x))
    model.load_state_dict(saved[0])
    inner.load_state_dict(saved[1])
    for step in range(3):
        run.step(optimizer, loss_of(model(x := tokens(step)), x))


@situation
def state_dicts_of_distributed_checkpoints(run: Run) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = Net()
    optimizer = run.offload(model)
    inner = run.torchs(optimizer)
    run.step(optimizer, loss_of(model(x := tokens(0)), x))
    weights, state = copy.deepcopy(get_state_dict(model, inner))
    run.step(optimizer, loss_of(model(x := tokens(1)), x))
    set_state_dict(model, inner, model_state_dict=weights, optim_state_dict=state)
    for step in range(2):
        run.step(optimizer, loss_of(model(x := tokens(step)), x))


@situation
def anomaly_detection(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(3):
            run.step(optimizer, loss_of(model(x := tokens(step)), x))


@situation
def an_adaptive_weight_of_two_losses(run: Run) -> None:
    """By gradients of the last layer, through the frozen part of another model."""
    generator, critic = Dense(4, 6), Dense(6, 1)
    optimizer, other = run.offload(generator), run.offload(critic)
    for step in range(3):
        real, made = noise(step, 5, 6), generator(noise(step + 9, 5, 4))
        first, second = (made - real).abs().mean(), -critic(made).mean()
        norms = [
            torch.autograd.grad(loss, generator.last.weight, retain_graph=True)[0].norm()
            for loss in (first, second)
        ]
        run.step(optimizer, first + (norms[0] / (norms[1] + 1e-4)).detach() * second)
        other.zero_grad()
        losses = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
        run.step(other, losses)


@situation
def a_container_that_is_never_called(run: Run) -> None:
    box = nn.ModuleDict({"text": Net(), "image": Dense(WIDTH, 1)})
    box["text"].head.requires_grad_(False)
    optimizer = run.offload(box)
    for step in range(3):
        features = box["text"].features(x := tokens(step))  # type: ignore[operator]
        run.step(optimizer, (box["image"](features).squeeze(-1) - x / VOCAB).square().mean())


@situation
def two_models_with_one_loss(run: Run) -> None:
    first, second = Net(), Dense(WIDTH, 1)
    first.head.requires_grad_(False)
    optimizers = [run.offload(first), run.offload(second)]
    for step in range(3):
        loss = (second(first.features(x := tokens(step))).squeeze(-1) - x / VOCAB).square().mean()
        optimizers[0].backward(loss)
        for optimizer in optimizers:
            run.finish(optimizer, loss)


@situation
def two_models_that_train_against_each_other(run: Run) -> None:
    generator, critic = Dense(4, 6), Dense(6, 1)
    optimizer, other = run.offload(generator), run.offload(critic)
    for step in range(3):
        real, made = noise(step, 5, 6), generator(noise(step + 9, 5, 4))
        other.zero_grad()
        losses = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
        run.step(other, losses)
        critic.requires_grad_(step == 1)
        run.step(optimizer, F.softplus(-critic(made)).mean())
        critic.requires_grad_(True)


@situation
def a_critic_whose_weights_are_clamped(run: Run) -> None:
    generator, critic = Dense(4, 6), Dense(6, 1)
    optimizer, other = run.offload(generator), run.offload(critic)
    for step in range(3):
        real, made = noise(step, 5, 6), generator(noise(step + 9, 5, 4))
        other.zero_grad()
        run.step(other, critic(made.detach()).mean() - critic(real).mean())
        for param in critic.parameters():
            param.data.clamp_(-0.1, 0.1)
        run.step(optimizer, -critic(made).mean())


@situation
def attributes_of_parameters_and_groups_by_them(run: Run) -> None:
    model = Net()
    for param in model.parameters():
        param.is_small = param.ndim < 2  # type: ignore[attr-defined]
    params: list[Any] = list(model.parameters())
    small = {"params": [param for param in params if param.is_small], "weight_decay": 0.0}
    large = {"params": [param for param in params if not param.is_small]}
    optimizer = run.offload(model, params=[small, large])
    for step in range(3):
        run.step(optimizer, loss_of(model(x := tokens(step)), x))
    run.values += [float(param.is_small) for param in params]


@situation
def hooks_of_the_optimizers_step(run: Run) -> None:
    model = Net()
    optimizer, calls = run.offload(model), []
    inner = run.torchs(optimizer)
    inner.register_step_pre_hook(lambda *_: calls.append(0.0))
    inner.register_step_post_hook(lambda *_: calls.append(1.0))
    for step in range(2):
        run.step(optimizer, loss_of(model(x := tokens(step)), x))
    run.values += calls


@situation
def rollouts_in_another_thread(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)

    def roll_out() -> None:
        with torch.no_grad():
            run.values.append(loss_of(model(tokens(50)), tokens(50)).item())

    for step in range(3):
        thread = threading.Thread(target=roll_out)
        thread.start()
        thread.join()
        run.step(optimizer, loss_of(model(x := tokens(step)), x))


@situation
def a_batch_that_is_not_finite(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    for step in range(4):
        loss = loss_of(model(x := tokens(step)), x)
        optimizer.backward(loss * (float("nan") if step == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        run.values.append(loss.item())


@situation
def memory_that_runs_out_in_a_microbatch(run: Run) -> None:
    """The batch is dropped, and the loop goes on."""
    model = Net()
    optimizer = run.offload(model, accum=2)
    fails: list[str] = []

    def fail(where: str) -> None:
        if where in fails:
            fails.remove(where)
            raise RuntimeError("out of memory (pretended)")

    middle: Any = model.layers[1]
    middle.down.register_forward_pre_hook(lambda *_: fail("forward"))
    middle.down.weight.register_hook(lambda _: fail("backward"))
    for step in range(5):
        for micro in range(2):
            fails += {(1, 1): ["forward"], (3, 1): ["backward"]}.get((step, micro), [])
            try:
                loss = loss_of(model(x := tokens(2 * step + micro)), x)
                if step == 3:
                    (loss / 2).backward()
                else:
                    optimizer.backward(loss)
            except RuntimeError:
                optimizer.zero_grad()
                break
        else:
            run.finish(optimizer, loss)


@situation
def two_backwards_over_one_graph(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    for step in range(3):
        logits = model(x := tokens(step))
        loss, other = loss_of(logits, x), loss_of(logits, x.roll(1, 1))
        loss.backward(retain_graph=True)
        other.backward()
        run.finish(optimizer, loss)


@situation
def two_dropped_microbatches(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model, accum=2)
    for step in range(4):
        for micro in range(2):
            loss = loss_of(model(x := tokens(2 * step + micro)), x)
            optimizer.backward(loss)
            if step in (1, 2) and micro == 0:
                (model if step == 1 else optimizer).zero_grad()
        run.finish(optimizer, loss)


# ---- models


class Counting(Layer):
    """State that a forward changes: an attribute, a buffer, and codes that follow the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("codes", noise(1, 8, WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.count += 1
        scale = 1 + 0.1 * self.calls + 0.01 * self.count
        flat = self.norm(x).flatten(0, 1)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        if self.training:
            hits = F.one_hot(nearest, 8).to(flat)
            mean = hits.T @ flat.detach() / hits.sum(0)[:, None].clamp_min(1)
            self.codes.data.lerp_(mean, 0.1)
        codes = flat + (self.codes[nearest] - flat).detach()
        return x + self.down(torch.tanh(self.up(codes.view_as(x)))) * scale


class Rotating(Layer):
    """A complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = 0.1 * torch.arange(8)[:, None] * torch.ones(WIDTH // 2)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Any:
        pairs = torch.view_as_complex(self.norm(x).reshape(*x.shape[:-1], -1, 2))
        rotated = torch.view_as_real(pairs * self.rotation).flatten(-2)
        return x + self.down(torch.tanh(self.up(rotated)))


class _OwnProduct(torch.autograd.Function):
    """Keeps a view of the weight as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transposed = weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        flat, inputs = (t.reshape(-1, t.shape[-1]) for t in (grads[0], x))
        return grads[0] @ ctx.transposed.t(), flat.t() @ inputs


class OwnFunctions(Layer):
    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(_OwnProduct.apply(self.norm(x), self.up.weight))  # type: ignore[no-untyped-call]
        return x + _OwnProduct.apply(hidden, self.down.weight)  # type: ignore[no-untyped-call]


class Normalized(Layer):
    """Weights that are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)
        nn.utils.parametrizations.spectral_norm(self.down)


class Spectral(Layer):
    """Complex weights as pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(0.1 * noise(2, WIDTH, WIDTH, 5, 2))

    def forward(self, x: Tensor) -> Any:
        modes = torch.fft.rfft(self.norm(x), dim=1)
        mixed = torch.einsum("bfi,iof->bfo", modes, torch.view_as_complex(self.pairs))
        return x + torch.tanh(torch.fft.irfft(mixed, n=x.shape[1], dim=1) + self.down(self.up(x)))


class Dropping(Layer):
    """Dropout and batch norm: the two modes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop, self.batch_norm, self.scale = nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), 1.0

    def forward(self, x: Tensor) -> Any:
        hidden = self.down(torch.tanh(self.up(self.norm(x)) * self.scale))
        return x + self.drop(self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2))


def trains(model: nn.Module) -> Callable[[Run], object]:
    def train(run: Run) -> None:
        net = copy.deepcopy(model)
        optimizer = run.offload(net, accum=2)
        for step in range(3):
            for micro in range(2):
                loss = loss_of(net(x := tokens(2 * step + micro)), x)
                optimizer.backward(loss)
            run.finish(optimizer, loss)
        run.values += [float(buffer.abs().sum()) for buffer in net.buffers()]

    return train


def alternating() -> Net:
    net, layers = Net(), [Layer(), Layer()]
    net.layers = nn.ModuleList([layers[0], layers[1], layers[0], layers[1], layers[0]])
    return net


torch.manual_seed(0)
SITUATIONS |= {
    "state that layers change": trains(Net(Counting)),
    "complex buffers": trains(Net(Rotating)),
    "functions that keep a view of a weight": trains(Net(OwnFunctions)),
    "weight norm and spectral norm": trains(Net(Normalized)),
    "complex weights as pairs": trains(Net(Spectral)),
    "layers that are used in turn": trains(alternating()),
}


@situation
def autocast_over_fp32(run: Run) -> None:
    model = Net()
    optimizer = run.offload(model)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x := tokens(step)), x)
        run.step(optimizer, loss)


@situation
def a_weight_that_is_dropped_out(run: Run) -> None:
    """A recurrent weight that each forward makes of a parameter."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.raw = nn.Parameter(0.2 * noise(3, 4 * WIDTH, WIDTH))
            self.recurrent: Any = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            del self.recurrent._parameters["weight_hh_l0"]

        def forward(self, x: Tensor) -> Any:
            self.recurrent.weight_hh_l0 = F.dropout(self.raw, 0.3, self.training)
            return self.head(self.recurrent(self.embed(x))[0])

    model = Recurrent()
    optimizer = run.offload(model)
    for step in range(3):
        torch.manual_seed(step)
        run.step(optimizer, loss_of(model(x := tokens(step)), x))


@situation
def hidden_states_from_step_to_step(run: Run) -> None:
    """Truncated backward through time: in one graph over all places, and over windows."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.layers = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, states: list[Tensor]) -> Any:
            hidden, after = self.embed(x), []
            for cell, state in zip(self.layers, states, strict=True):
                after.append(hidden := cell(hidden, state))
            return self.head(hidden), after

    model = Cells()
    optimizer = run.offload(model)
    states = [torch.zeros(4, WIDTH)] * 3
    for step in range(3):
        x, losses = tokens(step), []
        for place in range(4):
            logits, states = model(x[:, place], states)
            losses.append(F.cross_entropy(logits, x[:, place]))
        run.step(optimizer, torch.stack(losses).mean())
        states = [state.detach() for state in states]


@situation
def a_frozen_half_without_gradient(run: Run) -> None:
    model = Net(count=4)
    for part in (model.embed, *list(model.layers)[:2]):
        part.requires_grad_(False)
    optimizer = run.offload(model)
    for step in range(3):
        with torch.no_grad():
            hidden = model.embed(x := tokens(step))
            for layer in list(model.layers)[:2]:
                hidden = layer(hidden)
        for layer in list(model.layers)[2:]:
            hidden = layer(hidden)
        run.step(optimizer, loss_of(model.head(model.norm(hidden)), x))


@situation
def exits_after_any_layer(run: Run) -> None:
    class Exits(Net):
        def forward(self, x: Tensor, count: int = 3) -> Any:
            hidden = self.embed(x)
            for layer in list(self.layers)[:count]:
                hidden = layer(hidden)
            return self.head(self.norm(hidden))

    model = Exits()
    optimizer = run.offload(model)
    for step in range(3):
        x = tokens(step)
        run.step(optimizer, loss_of(model(x), x) + loss_of(model(x, 2), x))
        with torch.no_grad():
            run.values += [loss_of(model(x, count), x).item() for count in (1, 3, 2)]


@situation
def forces_from_energies(run: Run) -> None:
    """A gradient of the input in the loss."""
    model = Dense(3, 1)
    optimizer = run.offload(model)
    for step in range(3):
        places = noise(step, 6, 3).requires_grad_()
        energy = model(places).sum()
        (forces,) = torch.autograd.grad(-energy, places, create_graph=True)
        run.step(optimizer, (forces - noise(step + 9, 6, 3)).square().mean())


@situation
def another_mode_before_backward(run: Run) -> None:
    """The loop evaluates, changes an attribute, or builds another graph meanwhile."""
    model = Net(Dropping)
    optimizer = run.offload(model)
    for step in range(3):
        model.train()
        torch.manual_seed(step)
        loss = loss_of(model(x := tokens(step)), x)
        model.eval()
        with torch.no_grad():
            labels = model(tokens(50)).argmax(-1)
        loss = loss + 0.1 * loss_of(model(tokens(50)), labels)
        run.step(optimizer, loss)
    run.values += [float(buffer.float().sum()) for buffer in model.buffers()]


def computed(name: str, options: dict[str, Any] | None) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    run = Run(options)
    SITUATIONS[name](run)
    weights = [weight.clone() for weight in run.weights()]
    for optimizer in run.optimizers if options is not None else ():
        optimizer.close()
    return run.values, weights


IN_TURN = [
    (name, [*PLACEMENTS][(number + shift) % len(PLACEMENTS)])
    for number, name in enumerate(SITUATIONS)
    for shift in (0, 3, 5)
]
"""Each situation in three placements, and each placement with situations of every kind."""


@pytest.mark.slow
@pytest.mark.draws(0.6)
@pytest.mark.parametrize(("name", "placement"), IN_TURN)
def test_as_in_a_plain_loop(name: str, placement: str, tmp_path: Any) -> None:
    options = dict(PLACEMENTS[placement])
    if "disk" in options.values():
        options |= {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    values, weights = computed(name, options)
    expected = computed(name, None)
    torch.testing.assert_close(
        torch.tensor(values), torch.tensor(expected[0]), rtol=2e-5, atol=1e-6
    )
    for weight, other in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=5e-5)
