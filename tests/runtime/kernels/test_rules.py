"""Lion, SGD and Adagrad: the same bits from every backend and format, and from torch's optimizers.

Adam's tests beside this hold what all rules share: threads, unaligned views, misuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import offloadtrain as ot
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Backend, Layout, Scalars, State
from offloadtrain.step.layout.formats import FORMATS
from tests import torch_kernels
from tests.runtime.kernels.format_cases import clone, differing, gradient, special_gradient
from tests.runtime.kernels.kernel_cases import BACKENDS, DTYPES, SPECIALS
from tests.runtime.kernels.test_adam import needs_fma_in_torch

NUMELS = [1, 129, 2049, 3000]
IDS = [0, 3, 2**40 + 1, 5]
MOMENTUM: dict[str, Any] = {"lr": 3e-3, "momentum": 0.9, "weight_decay": 0.1}
RULES: dict[str, Any] = {
    "adam": ot.Adam(lr=3e-3, betas=(0.9, 0.95)),
    "adam with decay": ot.Adam(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw": ot.AdamW(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "lion": ot.Lion(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": ot.SGD(lr=3e-3),
    "sgd with decay": ot.SGD(lr=3e-3, weight_decay=0.1),
    "momentum": ot.SGD(lr=3e-3, momentum=0.9),
    "dampened": ot.SGD(**MOMENTUM, dampening=0.3),
    "nesterov": ot.SGD(**MOMENTUM, nesterov=True),
    "adagrad": ot.Adagrad(lr=1e-2),
    "adagrad with decays": ot.Adagrad(lr=1e-2, lr_decay=0.01, weight_decay=0.1),
}
KINDS = {"fp32": kernels.Fp32State, "split16": kernels.Split16State, "int8": kernels.Int8State}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
KEPT = [
    (state, name)
    for state in KINDS
    for name, rule in RULES.items()
    if FORMATS[state].keeps_moments(rule.moments)
]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scalars_of(rule: Any, step: int, **changed: Any) -> Scalars:
    group = {**rule.defaults(), **changed}
    return rule.scalars(group, step=step, grad_scale=0.37, seed=11)


def made(
    name: str,
    moments: tuple[str, ...],
    values: list[Tensor],
    weight: torch.dtype = torch.bfloat16,
) -> State:
    """State of (n,) fp32 values, rounded to nearest. `weight`: of working weights in it."""
    format, numel = FORMATS[name], values[0].numel()
    state = KINDS[name](
        torch.zeros(
            field.numel(numel), dtype=getattr(torch, field.dtype) if field.dtype else weight
        )
        for field in format.fields(moments)
    )
    kernels.convert_by_codec(FORMATS["fp32"], tuple(values), format, tuple(state))
    return state


def bucket() -> tuple[Layout, int]:
    """Several parameters, with a block between them that is nobody's."""
    offsets, end = [], 0
    for numel in NUMELS:
        offsets.append(end)
        end += (kernels.blocks(numel) + 1) * kernels.BLOCK
    return Layout(offsets, NUMELS, IDS), end


def random_values(numel: int, moments: tuple[str, ...]) -> list[Tensor]:
    source = torch.Generator().manual_seed(4)
    spread = 10 ** torch.empty(numel).uniform_(-4, 0, generator=source)
    values = [spread * torch.randn(numel, generator=source) for _ in range(1 + len(moments))]
    return of_moments(values, moments)


def of_moments(values: Sequence[Tensor], moments: tuple[str, ...]) -> list[Tensor]:
    """The master weights, and moments that may have these values: sums of squares are positive."""
    named = zip(moments, values[1:], strict=False)
    return [values[0], *(x.abs() if name in ("sum", "exp_avg_sq") else x for name, x in named)]


def run(
    kernel: Any, state: State, grad: Tensor, layout: Layout, scalars: Scalars, working: bool
) -> tuple[State, Tensor | None]:
    """A copy of the state after a step, and the emitted weights."""
    result = clone(state)
    weights = torch.zeros(grad.numel(), dtype=torch.bfloat16) if working else None
    kernel(result, result, grad, weights, layout, scalars)
    return result, weights


def in_force(
    state: State, out: State, grad: Tensor, working: Tensor | None, layout: Layout, s: Scalars
) -> None:
    kernels.update(
        state, grad, s, working=working, layout=layout, out=None if out is state else out
    )


# ---- one definition ----------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "name"), KEPT)
def test_backends_agree(state: str, name: str) -> None:
    rule, (layout, numel) = RULES[name], bucket()
    before = made(state, rule.moments, random_values(numel, rule.moments))
    for backend, dtype, step in itertools.product(BACKENDS, DTYPES, (1, 7)):
        grads = gradient(numel, dtype)
        scalars = scalars_of(rule, step)
        emits = state == "fp32"
        expected, weights = run(torch_kernels.update, before, grads, layout, scalars, emits)
        with kernels.use(backend):
            actual, emitted = run(in_force, before, grads, layout, scalars, emits)
            other = clone(before)
            kernels.update(before, grads, scalars, layout=layout, out=other)
        assert differing(actual, expected, rule.moments) == {}, (backend, dtype, step)
        assert differing(other, expected, rule.moments) == {}, (backend, dtype, step)
        assert differing(actual, before, rule.moments) != {}
        if weights is not None and emitted is not None:
            assert torch.equal(emitted.view(torch.int16), weights.view(torch.int16))


@each_rule
@pytest.mark.parametrize("state", ["fp32", "split16"])
def test_special_values(state: str, rule: Any) -> None:
    combined = torch.cartesian_prod(*[SPECIALS] * max(2, 1 + len(rule.moments))).unbind(1)
    numel = combined[0].numel()
    before = made(state, rule.moments, of_moments(combined, rule.moments))
    grads, layout = special_gradient(numel, torch.float16).flip(0), Layout.of_one(numel)
    for backend, step in itertools.product(BACKENDS, (1, 7)):
        scalars = scalars_of(rule, step)
        expected, _ = run(torch_kernels.update, before, grads, layout, scalars, False)
        with kernels.use(backend):
            actual, _ = run(in_force, before, grads, layout, scalars, False)
        assert differing(actual, expected, rule.moments) == {}, step


@pytest.mark.parametrize("backend", BACKENDS[:1], ids=lambda b: b.name)
@pytest.mark.parametrize("name", ["lion", "momentum"])
def test_a_moment_of_8_bits_is_near_that_of_32(name: str, backend: Backend) -> None:
    """A step from one state, kept in int8 and in fp32: at most a code apart, and without bias."""
    rule, numel = RULES[name], 128 * 256
    before = made("int8", rule.moments, random_values(numel, rule.moments))
    exact = clone(torch_kernels.to_fp32(before))
    grads, layout = gradient(numel, torch.float32), Layout.of_one(numel)
    with kernels.use(backend):
        kernels.update(before, grads, scalars_of(rule, 7), layout=layout)
        kernels.update(exact, grads, scalars_of(rule, 7))
    result = torch_kernels.to_fp32(before)
    largest = exact[1].view(-1, 128).abs().amax(1, keepdim=True)
    error = (result[1] - exact[1]).view(-1, 128)
    # Above the evenly spaced codes a step is an eighth of the value, at most.
    assert bool((error.abs() <= exact[1].view(-1, 128).abs() / 8 + largest / 2**15).all())
    assert abs(float((error / largest).mean())) < 1e-4
    assert float((result[0] - exact[0]).abs().max()) <= float(exact[0].abs().max()) * 2.0**-15


# ---- torch -------------------------------------------------------------------------------------


class PlainLion(torch.optim.Optimizer):
    """As its authors publish it, in torch's operations."""

    def __init__(self, params: Any, lr: float, betas: Any, weight_decay: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                towards = m.mul(beta1).add_(p.grad, alpha=1 - beta1)
                p.add_(towards.sign_(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


TORCHS: dict[type, type[torch.optim.Optimizer]] = {
    ot.Adam: torch.optim.Adam,
    ot.AdamW: torch.optim.AdamW,
    ot.Lion: PlainLion,
    ot.SGD: torch.optim.SGD,
    ot.Adagrad: torch.optim.Adagrad,
}


def compare_with_torch(rule: Any, steps: int, numel: int = 1 << 14, **changed: Any) -> list[str]:
    """What differs in a bit after some steps over varied gradients and rates."""
    source = torch.Generator().manual_seed(5)
    param = torch.randn(numel, generator=source, requires_grad=True)
    optimizer = TORCHS[type(rule)]([param], **rule.defaults(), fused=True)
    moments = [torch.zeros(numel) for _ in rule.moments]
    state = kernels.Fp32State((param.detach().clone(), *moments))
    for step in range(1, steps + 1):
        lr = 1e-3 * (1 + step % 7)
        optimizer.param_groups[0]["lr"] = lr
        sizes = 10 ** torch.empty(numel).uniform_(-7, 1, generator=source)
        param.grad = sizes * torch.randn(numel, generator=source)
        optimizer.step()
        group = {**rule.defaults(), "lr": lr, **changed}
        scalars = rule.scalars(group, step=step, grad_scale=1.0, seed=0)
        kernels.update(state, param.grad, scalars)
        expected = [param.detach(), *(optimizer.state[param][name] for name in rule.moments)]
        names = ("master", *rule.moments)
        result = [
            n for n, x, y in zip(names, state, expected, strict=True) if not torch.equal(x, y)
        ]
        if result:
            return result
    return []


@needs_fma_in_torch
@each_rule
def test_the_bits_are_torchs(rule: Any) -> None:
    for backend in BACKENDS:
        with kernels.use(backend):
            assert compare_with_torch(rule, 9) == [], backend


@needs_fma_in_torch
@pytest.mark.parametrize("name", ["adam with decay", "adamw"])
def test_the_bits_are_torchs_over_22_million_element_steps(name: str) -> None:
    assert compare_with_torch(RULES[name], 22, 1 << 20) == []


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "adam's beta2": ("adamw", {"betas": (0.9, 0.96)}),
    "adam's decay": ("adamw", {"weight_decay": 0.0}),
    "lion": ("lion", {"betas": (0.9, 0.96)}),
    "lion's decay": ("lion", {"weight_decay": 0.0}),
    "sgd's decay": ("sgd with decay", {"weight_decay": 0.0}),
    "momentum": ("momentum", {"momentum": 0.89}),
    "dampening": ("dampened", {"dampening": 0.0}),
    "nesterov": ("nesterov", {"nesterov": False}),
    "adagrad's rate": ("adagrad with decays", {"lr_decay": 0.0}),
    "adagrad's eps": ("adagrad", {"eps": 1e-4}),
}


@needs_fma_in_torch
def test_other_hyperparameters_have_other_bits() -> None:
    for wrong, (name, changed) in WRONG.items():
        assert compare_with_torch(RULES[name], 3, 1 << 10, **changed) != [], wrong


# ---- refusals ----------------------------------------------------------------------------------


def test_states_of_another_rule_are_refused() -> None:
    numel = 128
    lion, adagrad = scalars_of(RULES["lion"], 1), scalars_of(RULES["adagrad"], 1)
    grads = gradient(numel, torch.float32)
    three = kernels.Fp32State(torch.ones(numel) for _ in range(3))
    with pytest.raises(TypeError, match="fp32 state of exp_avg has 2 fields, not 3"):
        kernels.update(three, grads, lion)
    eight = made("int8", ("exp_avg",), random_values(numel, ("exp_avg",)))
    with pytest.raises(TypeError, match="int8 state cannot keep sum"):
        kernels.update(eight, grads, adagrad, layout=Layout.of_one(numel))
    short = kernels.Fp32State((torch.ones(numel), torch.ones(5)))
    momentum = scalars_of(RULES["momentum"], 1)
    with pytest.raises(ValueError, match="momentum_buffer has 5 elements"):
        kernels.update(short, grads, replace(momentum, step=2))  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ot.SGD(momentum=-0.1), "momentum = -0.1 is not"),
        (lambda: ot.SGD(nesterov=True), "nesterov needs a momentum"),
        (lambda: ot.SGD(momentum=0.9, nesterov=True, dampening=0.1), "nesterov needs"),
        (lambda: ot.SGD(dampening=1.5), "dampening = 1.5 is not"),
        (lambda: ot.SGD().check({**ot.SGD().defaults(), "momentum": 0.5}), "keeps no buffer"),
        (lambda: ot.Lion(betas=(0.9, 1.0)), "betas"),
        (lambda: ot.Lion(lr=float("nan")), "lr = nan is not"),
        (lambda: ot.Adagrad(lr_decay=-1.0), "lr_decay = -1.0 is not"),
        (lambda: ot.Adagrad(eps=float("inf")), "eps = inf is not"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
