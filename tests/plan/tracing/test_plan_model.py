"""A plan of any module is what its engine books and what torch allocates; a GPT's is the same from
its shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import flops_per_token
from offloadtrain.hardware.machine import find
from offloadtrain.model.transformer import Transformer
from offloadtrain.plan.placement import PlanError
from offloadtrain.plan.plan import make
from offloadtrain.plan.plan_model import ModelPlan, plan_model
from offloadtrain.plan.times import compute_seconds
from offloadtrain.plan.tracing import meter, step
from offloadtrain.plan.tracing.step import TraceError
from offloadtrain.plan.tracing.tracer import Tracer
from tests.plan.test_memory import GPT, job
from tests.plan.tracing.measured import most_allocated
from tests.plan.tracing.models import CONFIGS, Batch, batch_of, maker

FP32 = {"precision": "fp32"}

of_groups = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"),
    reason="torch 2.9 has no grouped products, whose loop reads values",
)


def booked(optimizer: ot.OffloadOptimizer) -> dict[str, dict[str, int]]:
    owners: dict[str, dict[str, int]] = {"host": {}, "device": {}}
    for row in optimizer.ledger.rows():
        if row.peak_bytes:
            owners[row.tier][row.owner] = row.peak_bytes
    return owners


def planned(plan: ModelPlan) -> dict[str, dict[str, int]]:
    return {"host": plan.plan.with_copies.host(), "device": plan.plan.placed.device()}


def compare(name: str, **options: Any) -> float:
    return compare_made(maker(name), batch_of(name), **options)


def compare_made(make_model: Callable[[], nn.Module], batch: Batch, **options: Any) -> float:
    """The engine's bytes must be equal; returns planned over measured activations."""
    torch.manual_seed(0)
    plan = plan_model(make_model, batch, machine="cpu2", **options)
    model = make_model()
    optimizer = ot.offload(model, device="cpu", **options)

    def step() -> None:
        optimizer.backward(model(**batch).loss)
        optimizer.step()

    most, owners = most_allocated(step), booked(optimizer)
    optimizer.close()
    assert planned(plan) == owners
    return plan.plan.activations.total / most


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_fifteen_architectures_within_five_percent(name: str) -> None:
    assert compare(name, **FP32) == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute", "selective", "offload", "offload_saved"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert"])
def test_policies_within_five_percent(name: str, policy: str) -> None:
    above = {"offload_saved_above": 1 << 12} if policy == "offload_saved" else {}
    ratio = compare(name, **FP32, activation=policy, working="host", **above)
    assert ratio == pytest.approx(1.0, abs=0.05)


@of_groups
@pytest.mark.parametrize(
    "policy",
    ["keep", *(pytest.param(name, marks=pytest.mark.slow) for name in ("recompute", "offload"))],
)
def test_experts_in_fp32_within_five_percent(policy: str) -> None:
    """Of transformers, with all experts as one grouped product."""
    transformers = pytest.importorskip("transformers")
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**CONFIGS["qwen3"][1], **sizes)
    config._experts_implementation = "grouped_mm"

    def make_model() -> nn.Module:
        model: nn.Module = transformers.Qwen3MoeForCausalLM(config).train()
        return model

    ratio = compare_made(make_model, batch_of("qwen3"), **FP32, activation=policy)
    assert ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("policy", "precision", "experts"),
    [
        ("keep", "fp32", {}),
        pytest.param("recompute", "fp32", {}, marks=pytest.mark.slow),
        pytest.param("keep", "bf16", {"num_experts": 4}, marks=[pytest.mark.slow, of_groups]),
        pytest.param("recompute", "bf16", {"num_experts": 4}, marks=of_groups),
        pytest.param("keep", "fp32", {"num_experts": 4}, marks=of_groups),
        pytest.param("recompute", "fp32", {"num_experts": 4}, marks=[pytest.mark.slow, of_groups]),
    ],
)
def test_a_gpt_has_the_same_bytes_from_its_shape_and_from_its_module(
    policy: str, precision: str, experts: dict[str, int]
) -> None:
    config = job(
        GPT
        | {"d_model": 64, "vocab_size": 256, "num_layers": 4, "tie_embeddings": True, **experts},
        offload__precision=precision,
        offload__activation=policy,
        optim__decay="all",
    )
    shaped = make(config, "cpu2", find("cpu2")[1])
    tokens = torch.empty(2, 16, dtype=torch.long, device="meta")
    traced = plan_model(
        lambda: Transformer(config.model),
        (tokens, tokens),
        machine="cpu2",
        config=config.offload,
    )
    assert planned(traced) == {"host": shaped.with_copies.host(), "device": shaped.placed.device()}
    assert traced.plan.activations.total == pytest.approx(shaped.activations.total, rel=0.05)
    step = traced.plan.placed.traced
    assert step is not None
    forward = sum(block.forward.flops for block in step.blocks.values())
    assert forward == pytest.approx(flops_per_token(config.model, 16) / 3 * tokens.numel())
    again = [
        prediction.hardware_tflops / prediction.tflops
        for prediction in (traced.plan.prediction, shaped.prediction)
    ]
    # Of attention's backward the trace counts five products, the formula of a shape four.
    assert again[0] == pytest.approx(again[1], rel=2e-3)
    assert (again[0] > 1.0) == (policy == "recompute")


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("positions", "norm", "experts"),
    [
        ("learned", "layernorm", 0),
        ("rotary", "rmsnorm", 0),
        pytest.param("learned", "rmsnorm", 0, marks=pytest.mark.slow),
        pytest.param("rotary", "layernorm", 0, marks=pytest.mark.slow),
        pytest.param("learned", "layernorm", 8, marks=pytest.mark.slow),
    ],
)
def test_a_gpt_takes_the_same_time_from_its_shape_and_from_its_module(
    policy: str, positions: str, norm: str, experts: int
) -> None:
    """But for the softmax of the loss, which is two operations on a CPU."""
    shape = {"d_model": 1024, "vocab_size": 4096, "num_heads": 8, "max_seq_len": 512}
    shape["num_experts"] = experts
    config = job(
        GPT | shape | {"norm": norm, "positions": positions},
        offload__precision="bf16",
        offload__activation=policy,
        train__micro_batch=8,
        device__kind="auto",
    )
    config = replace(config, data=replace(config.data, seq_len=512))
    name, machine = "h100", find("h100")[1]
    shaped = compute_seconds(make(config, name, machine).placed, machine)
    tokens = torch.empty(8, 512, dtype=torch.long, device="meta")
    options = config.offload
    planned = plan_model(
        lambda: Transformer(config.model), (tokens, tokens), machine=name, config=options
    )
    traced = compute_seconds(planned.plan.placed, machine)
    assert traced.forward + traced.backward == pytest.approx(
        shaped.forward + shaped.backward, rel=0.08
    )
    at_once = make(config, name, machine).activations.total
    assert planned.plan.activations.total == pytest.approx(at_once, rel=0.05)


class Net(nn.Module):
    """Layers in a list, and a forward that may look at values, or loop over its features."""

    def __init__(self, *, looks: bool = False, loops: int = 0) -> None:
        super().__init__()
        self.loops = loops
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        self.norm = nn.BatchNorm1d(32)
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        if self.looks and x.sum() > 0:
            return x
        out: Tensor = self.norm(self.layers(x))
        for _ in range(self.loops):
            out = out * 0.5
        return out


def test_the_model_stays_as_it_is() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = plan_model(model, torch.ones(8, 32), machine="cpu2", loss=Tensor.sum)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "It fits" in str(result) and result.fits and result.device_bytes > 0 < result.host_bytes
    optimizer = ot.offload(model, device="cpu")
    assert planned(result)["host"] == booked(optimizer)["host"]  # the batch norm stays fp32
    optimizer.close()


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (Net(looks=True), torch.ones(8, 32), "asks for the values of a tensor"),
        (Net(), torch.ones(8, 32), "give loss="),
        (Net(), {}, "the batch holds no tensor"),
        (Net(), torch.ones(8, 31), "cannot be traced in .*; torch says: "),
        (Net(loops=10**9), torch.ones(8, 32), "runs more than 64 operations"),
    ],
)
def test_what_cannot_be_planned_is_said(
    model: nn.Module, batch: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (meter, step):
        monkeypatch.setattr(module, "MOST_OPERATIONS", 64)
    with pytest.raises(TraceError, match=message):
        plan_model(model, batch, machine="cpu2")


def test_a_microbatch_that_the_model_refuses_is_traced_once() -> None:
    """A search asks for it again with each combination of options that a trace does not know."""
    config, forwards = job(GPT, offload__precision="fp32", train__micro_batch=1), []

    def loss_of(model: nn.Module, config: Config) -> Tensor:
        forwards.append(config)
        loss: Tensor = model(torch.empty(config.train.micro_batch, 32)).sum()
        return loss

    trace = Tracer(Net(), loss_of, 8, on_cpu=True)
    for state in ("fp32", "int8"):
        with pytest.raises(PlanError, match="a microbatch of 1 cannot be traced: Expected more"):
            trace(replace(config, offload=config.offload.replace(state=state)))
    assert len(forwards) == 1


@pytest.mark.slow
def test_what_does_not_fit_says_what_does() -> None:
    machine, batch = find("v100_32gb")[1], torch.empty(1 << 18, 32, device="meta")
    options: dict[str, Any] = {"precision": "fp16", "loss": Tensor.sum}
    needed = plan_model(Net, batch, machine=machine, **options).device_bytes
    less = f"{machine.gpu_reserved_bytes + needed * 2 // 3}"
    planned = plan_model(Net, batch, machine=replace(machine, gpu_memory=less), **options)
    assert not planned.fits and "It does not fit" in str(planned)
    assert planned.changes and all(change.plan.fits for change in planned.changes)


@pytest.mark.slow
def test_what_is_interpolated_is_never_too_small() -> None:
    config = job(GPT | {"d_model": 32}, offload__precision="fp32", offload__activation="recompute")

    def loss_of(model: nn.Module, config: Config) -> Tensor:
        tokens = torch.empty(config.train.micro_batch, 16, dtype=torch.long)
        loss: Tensor = model(tokens, tokens)
        return loss

    def sized(count: int) -> Config:
        return replace(config, train=replace(config.train, micro_batch=count))

    with torch.device("meta"):
        model = Transformer(config.model)
    few = Tracer(model, loss_of, 8, on_cpu=True)
    for count in (2, 4, 7):
        exact = Tracer(model, loss_of, count, on_cpu=True)(sized(count)).activations.total
        assert exact <= few(sized(count)).activations.total <= 1.2 * exact
