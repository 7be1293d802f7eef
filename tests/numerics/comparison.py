"""An offloaded run next to the plain loop over the same weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import SequentialLanes
from tests.numerics.models import MODELS, batches, loss_of
from tests.numerics.reference import SEED, DelayedRun, NarrowRuleRun, NarrowRun, ResidentRun

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ADAMW = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def pair(
    model: nn.Module,
    precision: str = "bf16",
    *,
    accum: int = 1,
    clip: float | None = None,
    **options: Any,
) -> tuple[Any, ot.OffloadOptimizer, nn.Module]:
    """Return the plain loop over a copy of the model, and the model offloaded with these options of
    `offload`."""
    plain_model = copy.deepcopy(model)
    if options.get("activation") == "offload_saved":  # the models are small
        options.setdefault("offload_saved_above", 0)
    options |= {"clip_norm": clip, "grad_accum_steps": accum, "seed": SEED}
    optimizer = ot.offload(model, ADAMW, device="cpu", precision=precision, **options)
    arguments: dict[str, Any] = {"clip_norm": clip, "scale": optimizer.loss_scale}
    arguments["rounds_sums"] = options.get("sums_down") == "working"
    kind: type[ResidentRun] = DelayedRun if options.get("update") == "delayed" else ResidentRun
    if options.get("state", "fp32") != "fp32":
        kind = NarrowRuleRun
        arguments |= {"state": options["state"], "rule": ADAMW}
    run = kind(plain_model, DTYPES[precision], **arguments)
    if options.get("update") == "delayed":
        run.warmup = options.get("warmup_steps", 0)
    return run, optimizer, model


def train(
    optimizer: ot.OffloadOptimizer,
    model: nn.Module,
    micro: Sequence[Tensor],
    *,
    explicit: bool = True,
    clips: Sequence[float] = (),
) -> list[float]:
    """Take a step; return the losses of its microbatches."""
    losses = []
    for tokens in micro:
        loss = loss_of(model, tokens)
        losses.append(loss.item())
        if explicit:
            optimizer.backward(loss)
        else:
            (loss / len(micro) if len(micro) > 1 else loss).backward()
    for max_norm in clips:
        optimizer.clip_grad_norm_(max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def follow(
    run: Any,
    optimizer: ot.OffloadOptimizer,
    model: nn.Module,
    stream: Sequence[Tensor],
    accum: int = 1,
    *,
    explicit: bool = True,
) -> None:
    """Train both; every loss and every norm is the same."""
    for start in range(0, len(stream), accum):
        micro = list(stream[start : start + accum])
        expected = run.step(micro, loss_of)
        losses = train(optimizer, model, micro, explicit=explicit, clips=run.clips)
        assert losses == expected, start
        assert optimizer.grad_norm == run.norms[-1]


def assert_same(run: Any, optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    """Weights and state are the same, to the bit."""
    if isinstance(run, DelayedRun):
        run.flush()
    optimizer.synchronize()
    for name, param in model.named_parameters():
        assert torch.equal(param, run.params[name]), name
    moments = run.rule.moments if hasattr(run, "rule") else ("exp_avg", "exp_avg_sq")
    for name, state in optimizer.named_state():
        if isinstance(run, NarrowRun):
            assert list(state) == run.states[name].names(moments)
            expected = list(run.states[name])
        else:
            assert list(state) == ["master", *moments]
            # torch's own scalar tail cannot be avoided for exp_avg_sq; padding to 16 removes it.
            expected = [run.master(name), *(run.moment(name, key) for key in moments)]
        for (field, tensor), value in zip(state.items(), expected, strict=True):
            assert torch.equal(tensor.reshape(-1), value.reshape(-1)), (name, field)


def compare(
    name: str,
    precision: str,
    *,
    accum: int = 1,
    steps: int = 4,
    explicit: bool = True,
    clips: Sequence[float] = (),
    **options: Any,
) -> None:
    run, optimizer, model = pair(make(name), precision, accum=accum, **options)
    run.clips = clips
    follow(run, optimizer, model, batches(steps * accum), accum, explicit=explicit)
    assert run.skipped < steps
    assert_same(run, optimizer, model)
    optimizer.close()


def poisoned() -> SequentialLanes:
    """Return lanes on which memory that is given out again holds NaN."""
    lanes = SequentialLanes()
    lanes.poison = True
    return lanes


def contents(optimizer: ot.OffloadOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of weights and state."""
    optimizer.synchronize()
    tensors = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param, state in optimizer.named_state():
        tensors |= {f"{param}/{key}": value.clone() for key, value in state.items()}
    return tensors


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
