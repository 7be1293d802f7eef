"""Activations by the plan against what torch allocates in a step on the CPU."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from offloadtrain.cli.exit_codes import ends_as_interrupted
from offloadtrain.config import loss_parts
from offloadtrain.config.hf_model import HfModel
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.plan.costs.microbatch import TracedStep
from offloadtrain.plan.placement import place
from offloadtrain.plan.tracing import tracer
from offloadtrain.plan.tracing.step import trace_step
from offloadtrain.plan.tracing.tracer import (
    Microbatch,
    ShapeTrace,
    activations,
    traced_microbatch,
)
from offloadtrain.train.build import offload_job
from offloadtrain.train.signals import REPEAT_S, StoppedEarlyError, StopRequests
from tests.plan.test_memory import GPT, job
from tests.plan.tracing.measured import most_allocated as most_allocated_in

SHAPES: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"tie_embeddings": True},
    "gpt with dropout": GPT | {"dropout": 0.1},
    "llama": {"num_kv_heads": 2},
    "switch": {"num_experts": 4, "experts_per_token": 1},
    "gpt with experts": GPT | {"num_experts": 8},
}
SIZES = {
    # d_model, layers, vocabulary, sequence, batch: what is largest there
    "tokens": (64, 6, 256, 64, 4),
    "logits": (96, 4, 2048, 64, 4),
    "weights": (128, 8, 128, 32, 2),
}


def sized(shape: str, size: str, **keys: Any) -> Config:
    width, layers, vocab, seq_len, batch = SIZES[size]
    sizes = {"d_model": width, "num_layers": layers, "vocab_size": vocab, "num_heads": 4}
    made = sizes | {"max_seq_len": seq_len} | SHAPES[shape]
    return job(made, data__seq_len=seq_len, train__micro_batch=batch, **keys)


def most_allocated(config: Config) -> int:
    """Bytes that torch holds at most in a step, beyond what it holds between steps."""
    torch.manual_seed(0)
    model = Transformer(config.model)
    model.chunked_loss = LossTerms() if config.train.chunked_loss else None
    optimizer = offload_job(model, config, torch.device("cpu"))
    tokens = torch.randint(config.model.vocab_size, (config.train.micro_batch, config.data.seq_len))
    isolated = config.data.packing == "isolated"
    places = torch.arange(config.data.seq_len).expand_as(tokens) % 13 if isolated else None

    def step() -> None:
        optimizer.backward(model(tokens, tokens, positions_BT=places))
        optimizer.step()

    most = most_allocated_in(step)
    optimizer.close()
    return most


def ratio(config: Config) -> float:
    return activations(place(config), on_cpu=True).total / most_allocated(config)


@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("policy", ["keep", "recompute", "selective", "offload"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "switch" else []) for name in SHAPES],
)
def test_within_five_percent_in_fp32(shape: str, size: str, policy: str) -> None:
    config = sized(shape, size, offload__precision="fp32", offload__activation=policy)
    assert ratio(config) == pytest.approx(1.0, abs=0.05)


BF16 = {"offload__precision": "bf16"}
IN_PARTS = {"train__chunked_loss": True, "offload__precision": "fp32"}
SOME: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llama", "tokens", 0, {"offload__activation": "recompute", "offload__recompute_blocks": 4}),
    ("gpt", "tokens", 0, BF16),
    ("gpt with dropout", "logits", 0, BF16),
    ("llama", "logits", 1024, IN_PARTS),
]
LATER: list[tuple[str, str, int, dict[str, Any]]] = [
    *(
        ("llama", "tokens", 0, {"offload__activation": policy, "offload__recompute_blocks": again})
        for policy, again in (("recompute", 1), ("recompute", 5), ("offload", 1), ("offload", 4))
    ),
    *(
        (shape, size, 0, BF16)
        for shape in ("switch", "gpt with experts")
        for size in ("tokens", "logits")
    ),
    ("llama", "tokens", 0, BF16),
    ("llama", "logits", 0, BF16),
    ("gpt", "logits", 0, BF16),
    ("gpt", "logits", 128, IN_PARTS),
    ("gpt", "logits", 1024, IN_PARTS),
    ("llama", "logits", 128, IN_PARTS),
]


@pytest.mark.parametrize(
    ("shape", "size", "columns", "keys"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)],
)
def test_so_do_other_options(
    shape: str, size: str, columns: int, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the layers recomputed; a loss in parts of so many columns; bf16, where activations
    are most of it: the CPU's 16-bit matrix products take scratch memory of a weight's size, which a
    plan does not count."""
    config = sized(shape, size, **({"offload__precision": "fp32"} | keys))
    if columns:
        part = 4 * columns * config.train.micro_batch * config.data.seq_len
        monkeypatch.setattr(loss_parts, "PART_BYTES_CPU", part)
    traced_microbatch.cache_clear()
    try:
        assert ratio(config) == pytest.approx(1.0, abs=0.05)
    finally:
        traced_microbatch.cache_clear()


@pytest.mark.cover(0, 2)
@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_documents_apart_take_what_is_planned(shape: str, policy: str) -> None:
    keys: dict[str, Any] = {"offload__precision": "fp32", "offload__activation": policy}
    config = sized(shape, "tokens", data__packing="isolated", **keys)
    plain = sized(shape, "tokens", **keys)
    planned = [activations(place(each), on_cpu=True).total for each in (config, plain)]
    more = most_allocated(config) - most_allocated(plain)
    assert more == pytest.approx(planned[0] - planned[1], rel=0.15)


def test_dropout_on_a_gpu_keeps_a_byte_per_element() -> None:
    """Of the two residual branches of each layer; fused attention keeps no scores for it."""
    dropped = sized("gpt with dropout", "tokens", offload__precision="bf16")
    plain = replace(dropped, model=replace(dropped.model, dropout=0.0))
    saved = [activations(place(config), on_cpu=False).saved for config in (dropped, plain)]
    tokens = dropped.train.micro_batch * dropped.data.seq_len
    assert saved[0] - saved[1] == dropped.model.num_layers * 2 * tokens * dropped.model.d_model


def test_another_model_is_estimated_by_its_width_where_its_heads_do_not_divide_it() -> None:
    """Such as one of width 2880 with 64 heads of 64; its own patterns of names do not matter."""
    base = sized("llama", "tokens")
    other = replace(base, hf=HfModel(hf="other"), model=replace(base.model, num_heads=24))
    other = replace(other, offload=other.offload.replace(keep_fp32=("*.router.*",)))
    trace = ShapeTrace(on_cpu=False)
    assert other.model.problems() and trace(other).activations.saved > 0
    assert trace(other).activations.total == pytest.approx(trace(base).activations.total, rel=0.3)


def test_a_microbatch_that_no_device_holds_is_not_traced_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two traces and beyond them bytes are linear in the samples; the pieces of the loss
    of 10**18 of them would never end."""
    config = sized("gpt", "tokens")

    def bytes_of(samples: int) -> int:
        larger = replace(config, train=replace(config.train, micro_batch=samples))
        return ShapeTrace(on_cpu=True)(larger).activations.total

    full = bytes_of(768)
    monkeypatch.setattr(tracer, "_MOST_TOKENS", 256 * config.data.seq_len)
    assert bytes_of(768) == pytest.approx(full, rel=0.01)
    assert bytes_of(10**18) == pytest.approx(full / 768 * 10**18, rel=0.05)


def drawn_microbatch(norm: str, seed: int) -> Microbatch:
    draw = Random(seed)
    heads, policy = draw.choice((2, 4)), draw.choice(("keep", "recompute", "offload"))
    again = draw.randint(0, 16) if policy != "keep" else None
    shape = ModelShape(
        vocab_size=draw.randint(64, 2000),
        num_layers=draw.randint(6, 16),
        d_model=16 * heads * draw.randint(1, 4),
        num_heads=heads,
        num_kv_heads=draw.choice((heads, 1)),
        mlp=draw.choice(("gelu", "swiglu")),
        norm="layernorm" if norm == "layernorm" else "rmsnorm",
        tie_embeddings=draw.choice((True, False)),
        dropout=draw.choice((0.0, 0.1)),
    )
    if again is not None:
        again = min(again, shape.num_layers)
    options = OffloadConfig(precision="bf16", activation=policy, recompute_blocks=again)
    terms, isolated = draw.choice((None, LossTerms())), draw.choice((True, False))
    sizes = draw.randint(1, 9), draw.randint(8, 300)
    return Microbatch(shape, None, *sizes, terms, isolated, options, on_cpu=False)


def traced_over_fakes(batch: Microbatch) -> TracedStep:
    return trace_step(batch.model(batch.shape), batch.loss, batch.options, on_cpu=False)


@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 4))]
)
def test_the_meta_device_gives_what_fake_tensors_give(seed: int) -> None:
    """Of a few layers of our transformer, and of all its layers over fake tensors."""
    batch = drawn_microbatch("rmsnorm", seed)
    assert traced_microbatch(batch) == traced_over_fakes(batch)


def test_a_layernorm_keeps_statistics_in_fp32_on_a_gpu() -> None:
    """Fake tensors are the CPU's, whose statistics are in the dtype of the input."""
    batch = drawn_microbatch("layernorm", seed=1)
    options = batch.options.replace(activation="keep", recompute_blocks=None)
    batch = replace(batch, options=options)
    saved = [
        traced.activations.saved for traced in (traced_microbatch(batch), traced_over_fakes(batch))
    ]
    rows, numbers = batch.samples * batch.seq_len, 2 * 2 * batch.shape.num_layers
    assert saved[0] - saved[1] == numbers * rows * 2


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("shape", ["gpt", "llama"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.cover(1, 2)
def test_activations_take_no_less_than_their_bound(
    shape: str, size: str, policy: str, chunked: bool
) -> None:
    keys = {"offload__precision": "bf16", "train__chunked_loss": chunked}
    placed = place(sized(shape, size, offload__activation=policy, **keys))
    least = placed.least_activation_bytes
    assert bool(least) == (policy != "offload" or not chunked)
    assert least <= activations(placed, on_cpu=False).total


def test_a_signal_during_a_trace_is_handled_after_it() -> None:
    """A handler that raises inside torch's exchange of modes would leave a mode behind, or take one
    too many away."""
    ran: list[str] = []

    def stopped(model: nn.Module) -> Tensor:
        signal.raise_signal(signal.SIGTERM)
        loss: Tensor = model(torch.empty(2, 8, device="cpu")).sum()
        ran.append("forward")
        return loss

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with ends_as_interrupted(), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        trace_step(model, stopped, OffloadConfig(precision="fp32"), on_cpu=True)
    assert ran == ["forward"]
    assert _get_current_dispatch_mode_stack() == []


def test_a_signal_during_a_trace_is_one_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches for a second stop has read the signal when it arrived."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def stopped(model: nn.Module) -> Tensor:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.2 * REPEAT_S)
        loss: Tensor = model(torch.empty(2, 8, device="cpu")).sum()
        return loss

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(StoppedEarlyError, match="SIGTERM"), StopRequests():
        trace_step(model, stopped, OffloadConfig(precision="fp32"), on_cpu=True)
    assert ended == []
