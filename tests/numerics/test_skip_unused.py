"""`skip_unused`: the bits of a plain torch loop over a parameter per expert, whose `.grad` is None
where it got no token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.norm import EngineError
from tests.numerics import comparison
from tests.numerics.comparison import ADAMW, DTYPES, follow, make, train
from tests.numerics.reference import DelayedRun
from tests.numerics.skipping import PATTERNS, Routed, SkippingRun, batches


def pair(
    precision: str = "bf16", *, accum: int = 1, clip: float | None = None, **options: Any
) -> tuple[SkippingRun, ot.OffloadOptimizer, Routed]:
    model = make(Routed)
    plain_model = copy.deepcopy(model)
    optimizer = offloaded(model, precision, accum=accum, clip=clip, **options)
    kind = DelayedSkippingRun if options.get("update") == "delayed" else SkippingRun
    scale = optimizer.loss_scale
    resident = kind(plain_model, DTYPES[precision], clip_norm=clip, scale=scale)
    resident.warmup = options.get("warmup_steps", 0)
    return resident, optimizer, model


def offloaded(model: Routed, precision: str, *, accum: int, clip: float | None, **options: Any):
    return ot.offload(
        model,
        ADAMW,
        device="cpu",
        precision=precision,
        clip_norm=clip,
        grad_accum_steps=accum,
        skip_unused=options.pop("skip_unused", PATTERNS),
        **options,
    )


class DelayedSkippingRun(DelayedRun, SkippingRun):
    """Both definitions at once."""


def assert_same(resident: SkippingRun, optimizer: ot.OffloadOptimizer, model: Routed) -> None:
    """Weights, state and the steps of each expert."""
    comparison.assert_same(resident, optimizer, model)
    for name, param in model.named_parameters():
        steps = optimizer.state[param]["step"].reshape(-1).tolist()
        assert steps == resident.steps(name), name


def compare(precision: str, *, accum: int = 1, steps: int, **options: Any) -> None:
    resident, optimizer, model = pair(precision, accum=accum, **options)
    follow(resident, optimizer, model, batches(steps * accum), accum)
    assert resident.skipped < steps
    assert_same(resident, optimizer, model)
    every = {step for name in model.state_dict() for step in resident.steps(name)}
    assert len(every) > 1  # some experts were unused in some steps
    optimizer.close()


PLACES: dict[str, dict[str, Any]] = {
    "host": {"clip": 0.3, "accum": 2},
    "streamed": {"working": "host"},
    "device": {"state_on": "device"},
    "half on the device": {"state_on": {"device": 0.5}, "clip": 0.3},
    "speculative": {"update": "speculative"},
    "speculative, streamed": {"update": "speculative", "working": "host", "accum": 2},
    "early": {"skip_nonfinite": False},
    "early, device": {"skip_nonfinite": False, "state_on": "device", "accum": 2},
    "early, streamed": {"skip_nonfinite": False, "working": "host"},
    "recompute": {"activation": "recompute", "working": "host", "clip": 0.3},
    "sums on the device": {"sums_on": "device", "accum": 2},
    "delayed": {"update": "delayed", "clip": 0.3},
    "delayed, streamed": {"update": "delayed", "warmup_steps": 2, "working": "host", "clip": 0.3},
    "fp16": {"precision": "fp16", "clip": 0.3, "accum": 2},
    "fp32": {"precision": "fp32"},
    "state on the disk": {"state_on": "disk", "clip": 0.3},
    "all on the disk": {"state_on": "disk", "working": "disk", "grad_on": "disk", "accum": 2},
}
QUICK = ("host", "streamed", "device", "speculative", "early")


@pytest.mark.parametrize(
    "place",
    [place if place in QUICK else pytest.param(place, marks=pytest.mark.slow) for place in PLACES],
)
def test_the_bits_of_a_loop_that_skips(place: str, tmp_path: Path) -> None:
    options = {"precision": "bf16"} | PLACES[place]
    if options.get("state_on") == "disk":
        options |= {"scratch_dir": str(tmp_path), "scratch_in_memory": True}
    compare(steps=10 if options["precision"] == "fp16" else 6, **options)


def everything(optimizer: ot.OffloadOptimizer, model: Routed) -> dict[str, Tensor]:
    optimizer.synchronize()
    result = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        result |= {f"{name} {k}": x.clone() for k, x in optimizer.state[param].items()}
    return result


@pytest.mark.parametrize("state", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_resumed_run_knows_the_steps_of_each_expert(state: str) -> None:
    stream = batches(7)
    _, straight, model = pair(state=state)
    for tokens in stream[:4]:
        train(straight, model, [tokens])
    saved = copy.deepcopy(straight.state_dict())
    weights = copy.deepcopy(model.state_dict())
    for tokens in stream[4:]:
        train(straight, model, [tokens])
    _, second, other = pair(state=state)
    other.load_state_dict(weights)
    second.load_state_dict(saved)
    for tokens in stream[4:]:
        train(second, other, [tokens])
    expected, actual = everything(straight, model), everything(second, other)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.slow
def test_the_state_of_torch_over_separate_experts_is_taken() -> None:
    """Each has a step of its own there."""
    resident, optimizer, model = pair(skip_unused=("*.separate.*",))
    names = [name for name, _ in model.named_parameters()]
    entries = {
        number: {
            "step": torch.tensor(float(3 if "separate.1" in name else 5)),
            "exp_avg": torch.full_like(resident.trained[name].float(), 0.1),
            "exp_avg_sq": torch.full_like(resident.trained[name].float(), 0.2),
        }
        for number, name in enumerate(names)
    }
    group = {"params": list(range(len(names))), "lr": 1e-2, "weight_decay": 0.1}
    optimizer.load_state_dict({"state": entries, "param_groups": [group]})
    for name, param in model.named_parameters():
        assert optimizer.state[param]["step"].item() == (3 if "separate.1" in name else 5)


@pytest.mark.slow
def test_without_it_the_state_of_skipped_experts_is_refused() -> None:
    _, optimizer, model = pair()
    train(optimizer, model, batches(1))
    saved = copy.deepcopy(optimizer.state_dict())
    _, plain, _ = pair(skip_unused=())
    with pytest.raises(EngineError, match=r"4 experts of 'layers.0.stacked.up'.* skip_unused"):
        plain.load_state_dict(saved)


def test_unused_experts_cross_no_bus_upwards_and_no_memory_of_their_state_changes() -> None:
    resident, optimizer, model = pair()
    weight_bytes = sum(
        bucket.spec.nbytes for block in optimizer._blocks for bucket in block.buckets
    )
    experts = [b for block in optimizer._blocks for b in block.buckets if b.usage is not None]
    for number, tokens in enumerate(batches(4)):
        before = {bucket.name: bucket.state[0].flat.clone() for bucket in experts}
        up = optimizer.lanes.totals.h2d_bytes
        follow(resident, optimizer, model, [tokens])
        optimizer.synchronize()
        used = resident.used
        unused = sum(
            resident.trained[name].numel() // len(keys) * 2
            for name, keys in resident.keys.items()
            for key in keys
            if ("stacked" in name or "separate" in name) and key not in used
        )
        padding = weight_bytes - 2 * sum(param.numel() for param in model.parameters())
        moved = optimizer.lanes.totals.h2d_bytes - up
        assert unused > 0 and weight_bytes - unused - padding <= moved <= weight_bytes - unused, (
            number
        )
        for bucket in experts:
            for slot in bucket.slots:
                old, new = slot.view(before[bucket.name]), slot.view(bucket.state[0].flat)
                parts = enumerate(zip(old, new, strict=True)) if "stacked" in slot.name else []
                for expert, (part, other) in parts:
                    moved = f"{slot.name}[{expert}]" in used
                    assert torch.equal(part, other) is not moved
    assert_same(resident, optimizer, model)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"skip_unused": ["*.expert.*"]}, r"no trained parameter is called '\*.expert.\*'"),
    ({"skip_unused": ["*.odd"]}, r"'odd.odd' of \(3, 5, 5\): each of its 3 experts has 25"),
    ({"skip_unused": PATTERNS, "rule": ot.LAMB()}, "LAMB: it updates whole tensors"),
    ({"skip_unused": PATTERNS, "rule": ot.Muon()}, "Muon: it updates whole tensors"),
]


def test_what_cannot_be_skipped_is_refused() -> None:
    model = Routed()
    model.odd = nn.Module()
    model.odd.odd = nn.Parameter(torch.zeros(3, 5, 5))
    for options, error in REFUSED:
        arguments = dict(options)
        with pytest.raises(ValueError, match=error):
            ot.offload(model, arguments.pop("rule", None), device="cpu", **arguments)


# ---- the program -------------------------------------------------------------------------------
