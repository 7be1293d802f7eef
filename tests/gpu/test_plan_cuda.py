"""On a GPU: what is planned is what torch allocates, and a refusal comes before the allocation."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.planned import planned
from benchmarks.gpu.spec import Spec
from benchmarks.gpu.step import measure as measured
from offloadtrain.cli.doctor.measure import measure
from offloadtrain.model.transformer import Transformer
from offloadtrain.plan.plan import make
from offloadtrain.runtime.detect_machine import here
from offloadtrain.train.build import offload_job
from tests.gpu.precision import DEVICE, DTYPE, HAS_BF16, HAS_GPU, NAME
from tests.plan.test_measured_peaks import OPTIONS, SHAPES, step_job
from tests.small_buffers import small_doctor

pytestmark = pytest.mark.gpu


@pytest.mark.gpu(until="torch.cuda.max_memory_allocated")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_of_a_step(shape: str, options: str) -> None:
    """The engine's bytes to the byte, all of torch's within 2 %."""
    config = step_job(shape, options, NAME)
    if not HAS_GPU:
        small = replace(config.model, num_layers=2, d_model=64, vocab_size=256)
        config = replace(config, model=small, data=replace(config.data, seq_len=16))
    plan = make(config, *here(on_gpu=HAS_GPU))
    _take_workspaces()
    gc.collect()  # tensors of earlier tests would be freed while this one measures
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = Transformer(config.model)
    optimizer = offload_job(model, config, DEVICE)
    inputs = (config.train.micro_batch, config.data.seq_len)
    for _ in range(2):
        for _ in range(config.train.grad_accum_steps):
            tokens = torch.randint(config.model.vocab_size, inputs, device=DEVICE)
            optimizer.backward(model(tokens, tokens))
        optimizer.step()
    torch.cuda.synchronize()
    peaks = {(row.tier, row.owner): row.peak_bytes for row in optimizer.ledger.rows()}
    for owner, size in plan.placed.device().items():
        assert peaks["device", owner] == size
    peak = torch.cuda.max_memory_allocated() - before
    optimizer.close()
    assert peak == pytest.approx(sum(plan.device.values()), rel=0.02)


def _take_workspaces() -> None:
    """cuBLAS keeps some memory for each thread and stream from its first product on: it is the
    process's, as the context is, and no step's."""
    for dtype in (torch.float32, DTYPE):
        layer = torch.nn.Linear(64, 64, device=DEVICE, dtype=dtype)
        layer(torch.randn(64, 64, device=DEVICE, dtype=dtype)).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.gpu(until="torch.cuda._lazy_init")
def test_the_machine_here_is_the_gpu() -> None:
    name, machine = here(on_gpu=True)
    assert machine.gpu == torch.cuda.get_device_name() and not machine.on_cpu
    assert "this machine" in name
    assert machine.gpu_memory_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.slow
def test_a_planned_step_against_a_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rates that were measured here a second ago, within a factor of two either way; without
    a GPU a toy, which is held to nothing."""
    if not HAS_GPU:
        small_doctor(monkeypatch)
    machine = measure(
        DEVICE,
        bf16=HAS_BF16,
        host_memory=64 << 30,
        cores=8,
        drive=None,
        quick=True,
        say=lambda text: None,
    )
    size, seq_len = ("llama-1.3b", 1024) if HAS_GPU else ("debug", 16)
    spec = Spec(size=size, seq_len=seq_len, micro_batch=8, precision=machine.auto_precision)
    ratio = measured(spec)["figures"]["step_s"] / planned(spec, machine)["step_s"]
    assert 0.5 < ratio < 2.0 or not HAS_GPU
