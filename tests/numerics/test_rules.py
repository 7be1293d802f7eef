"""Every other rule offloaded has the bits of the plain loop: of torch's own optimizer (Lion, SGD,
Adagrad, Muon), or of torch's fused AdamW with LAMB's trust ratio."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from tests import levels
from tests.numerics import comparison, muon
from tests.numerics.comparison import DTYPES, assert_equal, assert_same, make
from tests.numerics.lamb import CAPPED, LAMB, LambRun, NarrowLambRun
from tests.numerics.models import batches
from tests.numerics.muon import MuonRun, NarrowMuonRun
from tests.numerics.reference import SEED, NarrowRuleRun, RuleRun
from tests.runtime.kernels.test_adam import needs_fma_in_torch

ELEMENTWISE: dict[str, Any] = {
    "lion": ot.Lion(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": ot.SGD(lr=1e-2, weight_decay=0.1),
    "nesterov": ot.SGD(lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": ot.Adagrad(lr=1e-2, lr_decay=0.01),
}
"""Those that update each element for itself."""
RULES: dict[str, Any] = ELEMENTWISE | {
    "lamb": LAMB,
    "capped lamb": CAPPED,
    "muon": muon.RULE,
    "moonshot": ot.Muon(lr=0.02, adjust_lr_fn="match_rms_adamw", ns_steps=4, rest=muon.REST),
    "momentum": ot.Muon(lr=0.02, nesterov=False, ns_steps=0, momentum=0.8, rest=muon.REST),
}
LOOPS = {ot.LAMB: (LambRun, NarrowLambRun), ot.Muon: (MuonRun, NarrowMuonRun)}
"""Plain loops, of fp32 state and of a narrow one, where they are not `RuleRun`."""
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.05},
    "early": {"skip_nonfinite": False},
    "early, summed": {"skip_nonfinite": False, "grad_accum_steps": 2},
    "speculative": {"update": "speculative", "grad_accum_steps": 2, "clip_norm": 0.5},
    "delayed": {"update": "delayed", "warmup_steps": 1, "clip_norm": 0.5},
    "streamed": {"working": "host", "device_slots": 1, "clip_norm": 0.5},
    "streamed, delayed": {"working": "host", "update": "delayed", "warmup_steps": 1},
    "fp16": {"precision": "fp16", "clip_norm": 0.5},
    "fp32, summed": {"precision": "fp32", "clip_norm": 0.5, "grad_accum_steps": 2},
    "on the device": {"state_on": "device", "clip_norm": 0.5},
    "on the device, summed": {"state_on": "device", "grad_accum_steps": 2},
}


def pair(
    rule: Any, run: type[Any] | None = None, *, precision: str = "bf16", **options: Any
) -> tuple[Any, ot.OffloadOptimizer, nn.Module]:
    """Return the plain loop over a copy of the model, and the model offloaded with these options of
    `offload`. `run`: the loop of a rule that `LOOPS` does not have."""
    model = make("chain")
    plain_model, state = copy.deepcopy(model), options.get("state", "fp32")
    if isinstance(rule, ot.Muon) and options.get("update") == "speculative":
        options = options | {"update": "exact"}  # Muon has no other copy
    run = run or LOOPS.get(type(rule), (RuleRun, NarrowRuleRun))[state != "fp32"]
    optimizer = ot.offload(model, rule, device="cpu", precision=precision, seed=SEED, **options)
    clip, scale = options.get("clip_norm"), optimizer.loss_scale
    how: dict[str, Any] = {"clip_norm": clip, "scale": scale, "rule": rule, "state": state}
    loop = run(plain_model, DTYPES[precision], **how)
    if options.get("update") == "delayed":
        loop.warmup = options["warmup_steps"]
    return loop, optimizer, model


def follow(
    run: Any, optimizer: ot.OffloadOptimizer, model: nn.Module, stream: Sequence[Tensor], accum: int
) -> None:
    comparison.follow(run, optimizer, model, stream, accum)
    run.flush()
    optimizer.synchronize()


def check(rule: Any, run: type[Any] | None = None, **options: Any) -> None:
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
    check(RULES[rule], **OPTIONS[options])


@pytest.mark.parametrize(
    ("rule", "state", "options"),
    [
        ("lion", "split16", "clipped"),
        ("sgd", "split16", "speculative"),
        ("nesterov", "int8", "streamed"),
        ("adagrad", "split16", "delayed"),
        ("lamb", "split16", "clipped"),
        pytest.param("lion", "int8", "speculative", marks=pytest.mark.slow),
        pytest.param("sgd", "int8", "delayed", marks=pytest.mark.slow),
        pytest.param("nesterov", "split16", "streamed", marks=pytest.mark.slow),
        pytest.param("lamb", "int8", "speculative", marks=pytest.mark.slow),
    ],
)
def test_narrow_state_has_the_bits_of_its_definition(rule: str, state: str, options: str) -> None:
    check(RULES[rule], state=state, **OPTIONS[options])


@needs_fma_in_torch
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_checkpoint_goes_on_with_the_same_bits(rule: Any) -> None:
    """In a model with other weights; a step that is skipped changes nothing."""
    loop, optimizer, model = pair(rule, clip_norm=0.5)
    stream = batches(4)
    follow(loop, optimizer, model, stream[:2], 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    other = make("chain", seed=1)
    again = ot.offload(other, rule, device="cpu", seed=SEED, clip_norm=0.5)
    again.load_state_dict(saved)
    before = comparison.contents(again, other)
    again.backward(other(stream[0]).float().sum() * torch.inf)
    again.step()
    assert again.last_step is not None and again.last_step.skipped
    assert_equal(comparison.contents(again, other), before)
    follow(loop, again, other, stream[2:], 1)
    assert_same(loop, again, other)
    again.close()


@pytest.mark.parametrize(("state", "per_param"), [("fp32", 14), ("split16", 10), ("int8", 7)])
def test_host_bytes_per_parameter(state: str, per_param: int) -> None:
    """State and gradients."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = ot.offload(model, device="cpu", state=state)
    rows = [row for row in optimizer.ledger.rows() if row.tier == "host"]
    host = sum(row.bytes for row in rows if row.owner != "padding")
    params = sum(p.numel() for p in model.parameters())
    norms = 2 * 8 * 8  # those of the host, and the device's
    scales = params // 128 * 8 if state == "int8" else 0
    assert host - norms == per_param * params + scales
