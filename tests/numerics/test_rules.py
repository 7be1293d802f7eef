"""Lion, SGD and Adagrad offloaded: the bits of a resident run under torch's own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import torch_backend
from offloadtrain.step.layout.formats import FORMATS
from tests.numerics.models import batches, loss_of
from tests.numerics.test_offload import DTYPES, make, train
from tests.numerics.test_update_modes import DelayedRun
from tests.runtime.kernels.test_adam import needs_fma_in_torch
from tests.runtime.kernels.test_rules import KINDS, TORCHS, made

SEED, NEVER = 7, 1 << 30
RULES: dict[str, Any] = {
    "lion": ot.Lion(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": ot.SGD(lr=1e-2, weight_decay=0.1),
    "nesterov": ot.SGD(lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": ot.Adagrad(lr=1e-2, lr_decay=0.01),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@dataclass
class RuleRun(DelayedRun):
    """`ResidentRun` under torch's optimizer for a rule; without delay unless `warmup` is set."""

    rule: Any = None
    warmup: int = NEVER

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        defaults = {"fused": True, **self.rule.defaults()}
        own = [{"params": group["params"]} for group in groups]
        return TORCHS[type(self.rule)](own, **defaults)


@dataclass
class NarrowRuleRun(RuleRun):
    """In a narrow format, each parameter for itself, by the readable kernels."""

    state: str = ""
    steps: int = 0
    kept: dict[str, kernels.State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids = {name: index for index, name in enumerate(self.params)}
        for name, param in self.trained.items():
            zeros = [torch.zeros(param.numel()) for _ in self.rule.moments]
            values = [self.master(name).reshape(-1), *zeros]
            self.kept[name] = made(self.state, self.rule.moments, values)
            param.data.copy_(self.kept[name][0].view_as(param))

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        scalars = self.rule.scalars(
            self.rule.defaults(), step=self.steps, grad_scale=factor, seed=SEED
        )
        for name, param in self.trained.items():
            state, grad = self.kept[name], sums[name].reshape(-1)
            layout = kernels.Layout.of_one(grad.numel(), self.ids[name])
            torch_backend.update(state, state, grad, None, layout, scalars)
            param.data.copy_(state[0].view_as(param))


def pair(
    rule: Any, run: type[RuleRun] = RuleRun, *, precision: str = "bf16", **options: Any
) -> tuple[Any, ot.OffloadOptimizer, nn.Module]:
    """The same weights twice: resident, and offloaded."""
    model = make("chain")
    twin = copy.deepcopy(model)
    narrow = {"state": options["state"]} if issubclass(run, NarrowRuleRun) else {}
    optimizer = ot.offload(model, rule, device="cpu", precision=precision, seed=SEED, **options)
    resident = run(
        twin,
        DTYPES[precision],
        clip_norm=options.get("clip_norm"),
        scale=optimizer.loss_scale,
        rule=rule,
        **narrow,
    )
    if options.get("update") == "delayed":
        resident.warmup = options["warmup_steps"]
    return resident, optimizer, model


def follow(
    run: Any, optimizer: ot.OffloadOptimizer, model: nn.Module, stream: Sequence[Tensor], accum: int
) -> None:
    for start in range(0, len(stream), accum):
        micro = list(stream[start : start + accum])
        assert train(optimizer, model, micro) == run.step(micro, loss_of), start
        assert optimizer.grad_norm == run.norms[-1]
    run.flush()
    optimizer.synchronize()


def assert_same(run: Any, optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert torch.equal(param, run.params[name]), name
    for name, kept in optimizer.named_state():
        assert list(kept) == ["master", *run.rule.moments]
        assert torch.equal(kept["master"], run.master(name)), name
        for key in run.rule.moments:
            assert torch.equal(kept[key], run.moment(name, key)), (name, key)


OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.05},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative", "grad_accum_steps": 2, "clip_norm": 0.5},
    "delayed": {"update": "delayed", "warmup_steps": 1, "clip_norm": 0.5},
    "streamed": {"working": "host", "device_slots": 1, "clip_norm": 0.5},
    "fp16": {"precision": "fp16", "clip_norm": 0.5},
    "fp32": {"precision": "fp32", "clip_norm": 0.5},
    "on the device": {"state_on": "device", "clip_norm": 0.5},
}


@needs_fma_in_torch
@pytest.mark.cover(1)
@each_rule
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_offloaded_has_the_bits_of_resident(options: dict[str, Any], rule: Any) -> None:
    run, optimizer, model = pair(rule, **options)
    accum = options.get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(5 * accum), accum)
    assert_same(run, optimizer, model)
    optimizer.close()


NARROW: dict[str, dict[str, Any]] = {
    key: OPTIONS[key] for key in ("clipped", "speculative", "streamed")
}


@pytest.mark.cover(0, 1)
@pytest.mark.parametrize(
    ("rule", "state"),
    [(name, "split16") for name in RULES] + [(n, "int8") for n in RULES if n != "adagrad"],
)
@pytest.mark.parametrize("options", NARROW.values(), ids=NARROW.keys())
def test_narrow_state_has_the_bits_of_its_definition(
    options: dict[str, Any], rule: str, state: str
) -> None:
    run, optimizer, model = pair(RULES[rule], NarrowRuleRun, state=state, **options)
    accum = options.get("grad_accum_steps", 1)
    follow(run, optimizer, model, batches(4 * accum), accum)
    for name, kept in optimizer.named_state():
        assert list(kept) == run.kept[name].names(RULES[rule].moments)
        for (key, found), expected in zip(kept.items(), run.kept[name], strict=True):
            assert torch.equal(found.reshape(-1), expected), (name, key)
    optimizer.close()


@each_rule
def test_a_checkpoint_goes_on_with_the_same_bits(rule: Any) -> None:
    run, optimizer, model = pair(rule, clip_norm=0.5)
    stream = batches(4)
    follow(run, optimizer, model, stream[:2], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    other = make("chain", seed=1)
    again = ot.offload(other, rule, device="cpu", seed=SEED, clip_norm=0.5)
    again.load_state_dict(saved)
    follow(run, again, other, stream[2:], 1)
    assert_same(run, again, other)
    again.close()


def test_fewer_moments_take_fewer_bytes() -> None:
    found = {}
    for name, rule in {**RULES, "adamw": ot.AdamW()}.items():
        for state in KINDS:
            if FORMATS[state].keeps_moments(rule.moments):
                optimizer = ot.offload(make("chain"), rule, device="cpu", state=state)
                found[name, state] = {row.owner: row.bytes for row in optimizer.ledger.rows()}
                optimizer.close()
    assert "sum" in found["adagrad", "fp32"] and "exp_avg_sq" not in found["lion", "fp32"]
    for state in KINDS:
        sgd, lion, adamw = (sum(found[n, state].values()) for n in ("sgd", "lion", "adamw"))
        assert sgd < lion < adamw, state
    assert found["nesterov", "fp32"]["momentum_buffer"] == found["lion", "fp32"]["exp_avg"]
