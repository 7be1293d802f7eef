"""An offloaded run next to the plain loop over the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.step.layout.formats import FORMATS
from tests.numerics.models import MODELS, batches, loss_of
from tests.numerics.reference import SEED, DelayedRun, NarrowRuleRun, ResidentRun

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ADAMW = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def make(model: str | Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return one of `MODELS`, or a model of another class, with the same weights in each call."""
    torch.manual_seed(seed)
    return MODELS[model]() if isinstance(model, str) else model()


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
    norm_tolerance: float = 0.0,
) -> None:
    """Train both, with the same random numbers; every loss and every norm is the same.

    Args:
        norm_tolerance: relative; 0: the same bits. A GPU adds squares in its own order.
    """
    for start in range(0, len(stream), accum):
        micro = list(stream[start : start + accum])
        torch.manual_seed(start)
        expected = run.step(micro, loss_of)
        torch.manual_seed(start)
        losses = train(optimizer, model, micro, explicit=explicit, clips=run.clips)
        assert losses == expected, start
        norm = pytest.approx(run.norms[-1], rel=norm_tolerance, abs=0.0)
        assert optimizer.grad_norm == norm


def assert_same(run: Any, optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    """All that this rank has of weights and state is the run's, to the bit."""
    if isinstance(run, DelayedRun):
        run.flush()
    optimizer.synchronize()
    for name, param in model.named_parameters() if optimizer.ranks.is_single else ():
        assert torch.equal(param, run.params[name]), name
    extents = optimizer.extents()
    for name, state in optimizer.named_state():
        moments, extent = run.moments(name), extents[name]
        fields = FORMATS[run.state].fields(moments)
        assert list(state) == [field.name for field in fields]
        if hasattr(run, "states"):
            expected = list(run.states[name])
        else:
            # torch's own scalar tail cannot be avoided for exp_avg_sq; padding to 16 removes it.
            expected = [run.master(name), *(run.moment(name, key) for key in moments)]
        for field, value in zip(fields, expected, strict=True):
            lo, hi = extent.lo // field.per, -(-extent.hi // field.per)
            part = value.reshape(-1)[lo : hi if extent.lo < extent.hi else lo]
            assert torch.equal(state[field.name].reshape(-1), part), (name, field.name)


def compare(
    model: str | Callable[[], nn.Module],
    precision: str = "bf16",
    *,
    accum: int = 1,
    steps: int = 4,
    explicit: bool = True,
    clips: Sequence[float] = (),
    **options: Any,
) -> None:
    """Train offloaded and in the plain loop; losses, norms, weights and state are the same."""
    run, optimizer, offloaded = pair(make(model), precision, accum=accum, **options)
    run.clips = clips
    follow(run, optimizer, offloaded, batches(steps * accum), accum, explicit=explicit)
    assert run.skipped < steps
    assert_same(run, optimizer, offloaded)
    optimizer.close()


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
