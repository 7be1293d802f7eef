"""Offloaded training with narrow state has the bits of a resident run that keeps each parameter's
state for itself and updates it with the plain torch kernel."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import torch_backend
from tests import levels
from tests.numerics.models import MODELS, VOCAB, WIDTH, Chain, batches, loss_of
from tests.numerics.reference import ResidentRun

SEED = 1234
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = [("split16", "bf16"), ("int8", "bf16"), ("int8", "fp16")]


def empty_state(name: str, numel: int, dtype: torch.dtype) -> kernels.State:
    """A parameter's state of zeros."""

    def zeros(kind: torch.dtype, count: int = numel) -> Tensor:
        return torch.zeros(count, dtype=kind)

    if name == "split16":
        halves = [zeros(torch.bfloat16) for _ in range(3)]
        return kernels.Split16State(halves[0], zeros(torch.int16), *halves[1:])
    codes = (zeros(torch.int8), zeros(torch.uint8), zeros(torch.uint8))
    scales = [zeros(torch.float32, kernels.blocks(numel)) for _ in range(2)]
    return kernels.Int8State(zeros(dtype), *codes, *scales)


@dataclass
class NarrowRun(ResidentRun):
    """A model trained in place on narrow state."""

    state: str = "split16"
    steps: int = 0

    def __post_init__(self) -> None:
        self.params = dict(self.model.named_parameters())
        self.trained = {n: p for n, p in self.params.items() if p.requires_grad and p.numel()}
        self.ids = {name: index for index, name in enumerate(self.params)}
        self.states = {}
        for name, param in self.trained.items():
            state = empty_state(self.state, param.numel(), self.dtype)
            kernels.set_master(state, param.detach().reshape(-1).clone())
            self.states[name] = state
        for name, param in self.params.items():
            given = self.states[name].weight.view_as(param) if name in self.states else param.data
            param.data = given.to(self.dtype).clone()

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        beta1, beta2 = self.betas
        scalars = kernels.AdamScalars(
            self.lr, beta1, beta2, 1e-8, self.weight_decay, self.steps,
            grad_scale=factor, seed=SEED,
        )  # fmt: skip
        for name, param in self.trained.items():
            state, grad = self.states[name], sums[name].reshape(-1)
            layout = kernels.Layout.of_one(grad.numel(), self.ids[name])
            torch_backend.update(state, state, grad, None, layout, scalars)
            param.data.copy_(state.weight.view_as(param))


def pair(
    model: nn.Module, state: str, precision: str, *, accum: int = 1, clip: float | None = None
) -> tuple[NarrowRun, ot.OffloadOptimizer]:
    twin = copy.deepcopy(model)
    optimizer = ot.offload(
        model,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        device="cpu",
        precision=precision,
        state=state,
        seed=SEED,
        clip_norm=clip,
        grad_accum_steps=accum,
    )
    scale = optimizer.loss_scale
    return NarrowRun(twin, DTYPES[precision], clip_norm=clip, scale=scale, state=state), optimizer


def train(optimizer: ot.OffloadOptimizer, model: nn.Module, micro: list[Tensor]) -> list[float]:
    losses = []
    for tokens in micro:
        loss = loss_of(model, tokens)
        losses.append(loss.item())
        optimizer.backward(loss)
    optimizer.step()
    return losses


def assert_same(run: NarrowRun, optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    optimizer.synchronize()
    for name, param in model.named_parameters():
        assert torch.equal(param, run.params[name]), name
    for name, kept in optimizer.named_state():
        expected = run.states[name]
        assert list(kept) == list(expected.names())
        for field, value in zip(expected.names(), expected, strict=True):
            assert torch.equal(kept[field].reshape(-1), value), (name, field)


def compare(
    name: str, state: str, precision: str, accum: int, clip: float | None, steps: int
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    run, optimizer = pair(model, state, precision, accum=accum, clip=clip)
    stream = batches(steps * accum)
    for step in range(steps):
        micro = stream[step * accum : (step + 1) * accum]
        assert train(optimizer, model, micro) == run.step(micro, loss_of)
        assert optimizer.grad_norm == run.norms[-1]
    assert run.skipped < steps
    assert_same(run, optimizer, model)
    optimizer.close()


@pytest.mark.cover(0, 1)
@pytest.mark.parametrize(("state", "precision"), NARROW)
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_as_resident(name: str, state: str, precision: str) -> None:
    compare(name, state, precision, 1, 0.5, 10 if precision == "fp16" else 4)


@levels.examples(20)
@given(
    name=st.sampled_from(sorted(MODELS)),
    kind=st.sampled_from(NARROW),
    accum=st.integers(1, 3),
    clip=st.sampled_from([None, 0.05, 1.0]),
)
def test_same_bits_drawn(name: str, kind: tuple[str, str], accum: int, clip: float | None) -> None:
    compare(name, *kind, accum, clip, 10 if kind[1] == "fp16" else 2)


@pytest.mark.parametrize(("state", "precision"), NARROW)
def test_resume_draws_the_same_random_bits(state: str, precision: str) -> None:
    stream, model = batches(6), Chain()
    twin = copy.deepcopy(model)
    _, straight = pair(model, state, precision)
    _, first = pair(twin, state, precision)
    for tokens in stream:
        train(straight, model, [tokens])
    for tokens in stream[:3]:
        train(first, twin, [tokens])
    saved = copy.deepcopy(first.state_dict())
    other = Chain()
    second = ot.offload(
        other, ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        device="cpu", precision=precision, state=state, seed=5,
    )  # fmt: skip
    second.load_state_dict(saved)
    for tokens in stream[3:]:
        train(second, other, [tokens])
    for (name, a), (_, b) in zip(straight.named_state(), second.named_state(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a), name


def test_another_seed_has_other_bits() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(0)
        model = Chain()
        optimizer = ot.offload(model, device="cpu", state="split16", seed=seed)
        for tokens in batches(3):
            train(optimizer, model, [tokens])
        found.append(torch.cat([s["exp_avg_sq"].flatten() for _, s in optimizer.named_state()]))
    assert not torch.equal(*found)


@pytest.mark.parametrize("state", ["split16", "int8"])
def test_state_of_another_format_is_taken_over(state: str) -> None:
    model, stream = Chain(), batches(4)
    source = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu")
    for tokens in stream:
        train(source, model, [tokens])
    saved = copy.deepcopy(source.state_dict())
    other = Chain()
    target = ot.offload(other, ot.AdamW(lr=1e-2), device="cpu", state=state)
    target.load_state_dict(saved)
    for (name, kept), (_, narrow) in zip(source.named_state(), target.named_state(), strict=True):
        fields = tuple(value.reshape(-1) for value in narrow.values())
        kind = kernels.Split16State if state == "split16" else kernels.Int8State
        values = kernels.to_fp32(kind(*fields))
        bound = 0.0 if state == "split16" else 2.0**-16
        master = kept["master"].reshape(-1)
        assert bool(((values.master - master).abs() <= bound * master.abs()).all()), name
        largest = kept["exp_avg"].abs().max()
        error = (values.exp_avg - kept["exp_avg"].reshape(-1)).abs().max()
        assert error <= largest / 16, name
    assert target.state_dict()["state"][0]["step"] == 4


def test_wide_state_is_taken_back_from_narrow() -> None:
    model = Chain()
    source = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", state="split16")
    train(source, model, batches(1))
    other = Chain()
    target = ot.offload(other, ot.AdamW(lr=1e-2), device="cpu")
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for (_, kept), (_, wide) in zip(source.named_state(), target.named_state(), strict=True):
        fields = (value.reshape(-1) for value in kept.values())
        master = kernels.master_of(kernels.Split16State(*fields))
        assert torch.equal(wide["master"].reshape(-1), master)


class Normed(nn.Module):
    """A module whose parameters stay fp32 in a 16-bit model, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2).to(x.dtype))


def test_weights_that_stay_fp32_keep_fp32_state() -> None:
    model = Normed()
    optimizer = ot.offload(model, device="cpu", state="int8")
    train(optimizer, model, batches(1))
    kinds = {name: set(state) for name, state in optimizer.named_state()}
    assert kinds["norm.weight"] == {"master", "exp_avg", "exp_avg_sq"}
    assert "correction" in kinds["head.weight"]


def test_split16_refuses_fp16_and_fp32_and_says_why() -> None:
    with pytest.raises(ValueError, match="does not fit in 16 bits"):
        ot.offload(Chain(), device="cpu", precision="fp16", state="split16")
    with pytest.raises(ValueError, match="16-bit working weight"):
        ot.offload(Chain(), device="cpu", precision="fp32", state="int8")


@pytest.mark.parametrize(("state", "per_param"), [("fp32", 14), ("split16", 10), ("int8", 7)])
def test_host_bytes_per_parameter(state: str, per_param: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = ot.offload(model, device="cpu", state=state)
    rows = [row for row in optimizer.ledger.rows() if row.tier == "host"]
    host = sum(row.bytes for row in rows if row.owner != "padding")
    params = sum(p.numel() for p in model.parameters())
    norms = 2 * 8 * 8  # those of the host, and the device's
    scales = params // 128 * 8 if state == "int8" else 0
    assert host - norms == per_param * params + scales
