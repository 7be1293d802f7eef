"""What compiled layers with a budget save: planned, measured on an H100, and saved by real code."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import networkx
import pytest
import torch
from torch import Tensor

from benchmarks.gpu.planned import job_of, planned
from benchmarks.gpu.spec import Spec
from offloadtrain.cli import results_tables
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.autograd.compiled import CompiledForward
from offloadtrain.hardware.machine import Machine
from offloadtrain.model.transformer import Transformer
from offloadtrain.plan.tracing.compiled import saved_share
from offloadtrain.plan.tracing.tracer import ShapeTrace

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LAYERS = SIZES["llama-3b"].num_layers
MIB = 1 << 20
COMPILED = {"activation": "selective", "compile_blocks": True}

# The table of docs/speed.md, measured on an H100, without the layer's input of 200 MiB.
MEASURED_MIB = {
    (1.0, "off"): 3256,
    (0.5, "off"): 1492,
    (0.3, "off"): 836,
    (0.15, "off"): 412,
    (0.0, "off"): 0,
    (0.3, "tensorwise"): 624,
    (1.0, "tensorwise"): 2116,
}
QUICK = [(0.3, "tensorwise")]


@pytest.mark.parametrize(
    ("case", "mib"),
    [
        pytest.param(case, mib, marks=[] if case in QUICK else pytest.mark.slow)
        for case, mib in MEASURED_MIB.items()
    ],
)
def test_a_layer_saves_what_an_h100_has_measured(case: tuple[float, str], mib: int) -> None:
    budget, fp8 = case
    if fp8 != "off":
        pytest.importorskip("torchao")
    options = {**COMPILED, "activation_budget": budget, "fp8": fp8, "state_on": {"device": 0.1}}
    spec = Spec(size="llama-3b", seq_len=2048, micro_batch=16, options=options)
    trace, job = ShapeTrace(on_cpu=False), job_of(spec)
    again = replace(
        job, offload=job.offload.replace(activation="recompute", activation_budget=None)
    )
    saved = trace(job).activations.saved - trace(again).activations.saved
    assert saved / LAYERS / MIB == pytest.approx(mib, rel=0.005, abs=1)
    if budget == 1.0:
        keep = job.offload.replace(activation="keep", activation_budget=None)
        kept = trace(replace(job, offload=keep)).activations.saved
        assert kept - trace(again).activations.saved == saved, "torch's own choice has no budget"


@pytest.mark.slow
def test_planned_peaks_are_those_of_results_files() -> None:
    """Of each step on a GPU within 5 %: torch's peak of allocated memory."""
    compared = 0
    for file in results_tables.read(RESULTS):
        machine = Machine(**file.machine["machine"])
        for steps in file.steps:
            if steps.system == "offloadtrain":
                known = {key: steps.spec[key] for key in Spec.__dataclass_fields__}
                plan = planned(Spec(**known), machine)
                measured = steps.figures["device_peak_bytes"]
                assert plan["device_bytes"] == pytest.approx(measured, rel=0.05), steps.name
                compared += 1
    assert compared > 5


GPT = ModelShape(
    vocab_size=64,
    num_layers=2,
    d_model=64,
    num_heads=4,
    max_seq_len=64,
    mlp="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
)
LLAMA = ModelShape(
    vocab_size=64,
    num_layers=2,
    d_model=96,
    num_heads=4,
    num_kv_heads=2,
    d_ff=160,
    max_seq_len=64,
)
TOKENS = torch.zeros(4, 64, dtype=torch.long)


def loss_of(model: torch.nn.Module) -> Tensor:
    tokens = TOKENS.clone()
    loss: Tensor = model(tokens, tokens)
    return loss


def test_layers_that_cannot_be_asked_about_are_planned_by_the_budget_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no partition")

    options = OffloadConfig(precision="fp32", activation_budget=0.3, **COMPILED)
    partitioner = "torch._functorch.partitioners.min_cut_rematerialization_partition"
    monkeypatch.setattr(partitioner, refuse)
    assert saved_share(Transformer(LLAMA), loss_of, options, on_cpu=False) == 0.3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "compiled TransformerBlock saves is not known (RuntimeError: no partition)" in warning


class Locked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, lock: object) -> Tensor:
        return self.up(x).relu()  # type: ignore[no-any-return]


def test_layers_with_arguments_that_cannot_be_copied_are_planned_by_the_budget() -> None:
    model, lock = torch.nn.ModuleList(Locked() for _ in range(2)), threading.Lock()

    def loss(layers: torch.nn.Module) -> Tensor:
        x = torch.zeros(4, 8, requires_grad=True)
        for layer in layers.children():
            x = layer(x, lock)
        return x.sum()

    options = OffloadConfig(precision="fp32", activation_budget=0.3, **COMPILED)
    assert saved_share(model, loss, options, on_cpu=True) == 0.3


def test_a_failure_of_the_partitioner_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(graph: networkx.DiGraph[str], *args: object) -> None:
        graph.add_edge("source", "sink", capacity=math.inf)  # what torch then looks for
        raise networkx.NetworkXUnbounded

    monkeypatch.setattr(networkx, "minimum_cut", refuse)
    monkeypatch.chdir(tmp_path)
    options = OffloadConfig(precision="fp32", activation_budget=0.3, **COMPILED)
    assert saved_share(Transformer(LLAMA), loss_of, options, on_cpu=False) == 0.3
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("shape", [GPT, LLAMA, replace(GPT, dropout=0.1)])
def test_a_layer_saves_what_its_compiled_code_saves(shape: ModelShape, budget: float) -> None:
    torch._dynamo.reset()
    options = OffloadConfig(precision="fp32", activation_budget=budget, **COMPILED)
    model = Transformer(shape).train()
    planned_share = saved_share(model, loss_of, options, on_cpu=True)

    def saved_by_all_layers() -> int:
        weights = {param.untyped_storage()._cdata for param in model.parameters()}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if (key := tensor.untyped_storage()._cdata) not in weights:
                saved[key] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(model)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    eager = saved_by_all_layers()
    rest = {}
    for share in (0.0, budget):
        forwards = [CompiledForward(block, share) for block in model.blocks]
        for forward in forwards:
            forward.put()
        rest[share] = saved_by_all_layers()
        for forward in forwards:
            forward.remove()
    inside = rest[budget] - rest[0.0]
    assert inside == pytest.approx(planned_share * (eager - rest[0.0]), rel=0.02)
