"""On a GPU: what is planned is what torch allocates, and a refusal comes before the allocation."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from offloadtrain.model.transformer import Transformer
from offloadtrain.plan.plan import make
from offloadtrain.runtime.detect_machine import here
from offloadtrain.train.build import offload_job
from tests.gpu.precision import DEVICE, DTYPE, HAS_GPU, NAME
from tests.plan.test_measured_peaks import OPTIONS, SHAPES, step_job

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
