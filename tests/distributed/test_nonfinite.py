"""A gradient that is not finite, in any parameter, of any microbatch, on any rank: no byte changes,
and the report says where it was."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offloadtrain as ot
from offloadtrain.engine.parameters import past_the_class
from tests.distributed.conftest import Run
from tests.numerics.models import Chain, batches, loss_of

ACCUM = 2
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "clipped": {"clip_norm": 0.5},
    "speculative": {"update": "speculative"},
    "delayed": {"update": "delayed"},
    "streamed": {"working": "host"},
}
STATES = ("fp32", "split16", "int8")
STAGES = (1, 2, 3)
VALUES = (math.nan, math.inf, -math.inf)


@contextmanager
def spoilt(model: Chain, name: str, microbatch: int, value: float) -> Iterator[None]:
    """Make one element of the gradient of one parameter not finite, in one microbatch."""
    calls = itertools.count()

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        if next(calls) != microbatch:
            return grad
        bad = grad.clone()
        bad.view(-1)[bad.numel() // 2] = value
        return bad

    hook = dict(model.named_parameters())[name].register_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


def step(optimizer: ot.OffloadOptimizer, model: Chain) -> ot.StepReport:
    for tokens in batches(ACCUM):
        optimizer.backward(loss_of(model, tokens))
    optimizer.step()
    assert optimizer.last_step is not None
    return optimizer.last_step


def image(optimizer: ot.OffloadOptimizer, model: Chain) -> dict[str, bytes]:
    """Every byte of state, and of the weights that are there."""
    values = {
        f"{name}/{key}": bytes(value.contiguous().view(torch.uint8).flatten().tolist())
        for name, tensors in optimizer.named_state()
        for key, value in tensors.items()
        if value.numel()
    }
    for name, param in model.named_parameters():
        with past_the_class():  # a read of weights in shards would raise
            flat = param.detach().float().contiguous()
        values[name] = bytes(flat.view(torch.uint8).flatten().tolist()) if flat.numel() else b""
    return values


def inject(
    options: dict[str, Any], share: float, seed: int, rank: int = 0, size: int = 1
) -> tuple[int, int]:
    """Inject at a share of all (parameter, microbatch, rank), two steps after the beginning; return
    how many, and how many were named with the ranks that own them."""
    torch.manual_seed(0)
    model = Chain(2)
    optimizer = ot.offload(model, device="cpu", grad_accum_steps=ACCUM, **options)
    optimizer.warns_of_skips = False
    for _ in range(2):
        step(optimizer, model)
    names = [name for name, _ in model.named_parameters()]
    points = list(itertools.product(names, range(ACCUM), range(size)))
    chosen = random.Random(seed).sample(points, max(1, round(share * len(points))))
    owned = 0
    before, count = image(optimizer, model), int(optimizer.state_dict()["state"][0]["step"])
    for number, (name, microbatch, where) in enumerate(chosen):
        value = VALUES[number % len(VALUES)]
        with spoilt(model, name, microbatch if rank == where else -1, value):
            report = step(optimizer, model)
        assert report.skipped and report.nonfinite == (name,)
        assert not math.isfinite(report.grad_norm) and report.step == count
        assert image(optimizer, model) == before
        owned += bool(report.nonfinite_ranks) and set(report.nonfinite_ranks[0]) <= {*range(size)}
        assert f"'{name}'" in report.named_nonfinite
        assert ("in the shard" in report.named_nonfinite) is (size > 1)
    assert not step(optimizer, model).skipped
    assert image(optimizer, model) != before
    optimizer.close()
    return len(chosen), owned


def on_rank(options: dict[str, Any], share: float, seed: int) -> tuple[int, int]:
    return inject(options, share, seed, dist.get_rank(), dist.get_world_size())


def injections(run: Run, share: float, seed: int, sizes: Sequence[int]) -> int:
    """All modes and formats on one rank; all stages on more."""
    alone = (MODES[mode] | {"state": state} for mode, state in itertools.product(MODES, STATES))
    total = sum(inject(options, share, seed)[0] for options in alone)
    for size, stage in itertools.product(sizes, STAGES):
        counts = run(size, on_rank, {"zero_stage": stage}, share, seed)
        assert all(count == owned for count, owned in counts), "each named its rank"
        total += counts[0][0]
    print(f"{total} injections")
    return total


@pytest.mark.slow
def test_no_byte_changes(ranks: Run, request: pytest.FixtureRequest) -> None:
    assert injections(ranks, 0.1, request.config.option.seed, [2]) >= 40


@pytest.mark.long
def test_no_byte_changes_anywhere(ranks: Run) -> None:
    assert injections(ranks, 1.0, 0, [2, 4]) >= 500
