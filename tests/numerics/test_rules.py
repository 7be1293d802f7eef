"""Every other rule offloaded has the bits of the plain loop: of torch's own optimizer (Lion, SGD,
Adagrad, Muon), or of torch's fused AdamW with LAMB's trust ratio."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.step.layout.formats import FORMATS
from tests import levels
from tests.numerics import comparison
from tests.numerics.comparison import DTYPES, assert_same, make
from tests.numerics.models import batches
from tests.numerics.reference import SEED, NarrowRuleRun, NarrowRun, RuleRun
from tests.runtime.kernels.test_adam import needs_fma_in_torch
from tests.runtime.kernels.test_rules import KINDS

RULES: dict[str, Any] = {
    "lion": ot.Lion(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": ot.SGD(lr=1e-2, weight_decay=0.1),
    "nesterov": ot.SGD(lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": ot.Adagrad(lr=1e-2, lr_decay=0.01),
}
"""Those that update each element for itself."""
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.05},
    "early": {"skip_nonfinite": False},
    "speculative": {"update": "speculative", "grad_accum_steps": 2, "clip_norm": 0.5},
    "delayed": {"update": "delayed", "warmup_steps": 1, "clip_norm": 0.5},
    "streamed": {"working": "host", "device_slots": 1, "clip_norm": 0.5},
    "fp16": {"precision": "fp16", "clip_norm": 0.5},
    "fp32, summed": {"precision": "fp32", "clip_norm": 0.5, "grad_accum_steps": 2},
    "on the device": {"state_on": "device", "clip_norm": 0.5},
}


def pair(
    rule: Any, run: type[Any] = RuleRun, *, precision: str = "bf16", **options: Any
) -> tuple[Any, ot.OffloadOptimizer, nn.Module]:
    """Return the plain loop over a copy of the model, and the model offloaded with these options of
    `offload`."""
    model = make("chain")
    plain_model = copy.deepcopy(model)
    narrow = {"state": options["state"]} if issubclass(run, NarrowRun) else {}
    optimizer = ot.offload(model, rule, device="cpu", precision=precision, seed=SEED, **options)
    clip, scale = options.get("clip_norm"), optimizer.loss_scale
    loop = run(plain_model, DTYPES[precision], clip_norm=clip, scale=scale, rule=rule, **narrow)
    if options.get("update") == "delayed":
        loop.warmup = options["warmup_steps"]
    return loop, optimizer, model


def follow(
    run: Any, optimizer: ot.OffloadOptimizer, model: nn.Module, stream: Sequence[Tensor], accum: int
) -> None:
    comparison.follow(run, optimizer, model, stream, accum)
    run.flush()
    optimizer.synchronize()


def check(rule: Any, run: type[Any], **options: Any) -> None:
    """Train for four steps, or for eight where some of them overflow."""
    loop, optimizer, model = pair(rule, run, **options)
    accum = options.get("grad_accum_steps", 1)
    steps = 8 if options.get("precision") == "fp16" else 4
    follow(loop, optimizer, model, batches(steps * accum), accum)
    assert loop.skipped < steps
    assert_same(loop, optimizer, model)
    optimizer.close()


@needs_fma_in_torch
@pytest.mark.parametrize(("rule", "options"), levels.array([*RULES], [*OPTIONS]))
def test_offloaded_has_the_bits_of_resident(rule: str, options: str) -> None:
    check(RULES[rule], RuleRun, **OPTIONS[options])


@pytest.mark.parametrize(
    ("rule", "state", "options"),
    [
        ("lion", "split16", "clipped"),
        ("sgd", "split16", "speculative"),
        ("nesterov", "int8", "streamed"),
        ("adagrad", "split16", "delayed"),
        pytest.param("lion", "int8", "speculative", marks=pytest.mark.slow),
        pytest.param("sgd", "int8", "delayed", marks=pytest.mark.slow),
        pytest.param("nesterov", "split16", "streamed", marks=pytest.mark.slow),
    ],
)
def test_narrow_state_has_the_bits_of_its_definition(rule: str, state: str, options: str) -> None:
    check(RULES[rule], NarrowRuleRun, state=state, **OPTIONS[options])


def check_resumed(rule: Any, run: type[Any]) -> None:
    """Go on from a state dict in a model with other weights."""
    loop, optimizer, model = pair(rule, run, clip_norm=0.5)
    stream = batches(4)
    follow(loop, optimizer, model, stream[:2], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    other = make("chain", seed=1)
    again = ot.offload(other, rule, device="cpu", seed=SEED, clip_norm=0.5)
    again.load_state_dict(saved)
    follow(loop, again, other, stream[2:], 1)
    assert_same(loop, again, other)
    again.close()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_checkpoint_goes_on_with_the_same_bits(rule: Any) -> None:
    check_resumed(rule, RuleRun)


def test_fewer_moments_take_fewer_bytes() -> None:
    rows = {}
    for name, rule in {**RULES, "adamw": ot.AdamW(), "lamb": ot.LAMB()}.items():
        for state in KINDS:
            if FORMATS[state].keeps_moments(rule.moments):
                optimizer = ot.offload(make("chain"), rule, device="cpu", state=state)
                rows[name, state] = {row.owner: row.bytes for row in optimizer.ledger.rows()}
                optimizer.close()
    assert "sum" in rows["adagrad", "fp32"] and "exp_avg_sq" not in rows["lion", "fp32"]
    for state in KINDS:
        sgd, lion, adamw = (sum(rows[name, state].values()) for name in ("sgd", "lion", "adamw"))
        assert sgd < lion < adamw, state
        assert rows["lamb", state] == rows["adamw", state]
    assert rows["nesterov", "fp32"]["momentum_buffer"] == rows["lion", "fp32"]["exp_avg"]


def copied_state(optimizer: ot.OffloadOptimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value.clone()
        for name, state in optimizer.named_state()
        for key, value in state.items()
    }
