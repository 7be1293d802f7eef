"""On a GPU: what is planned is what torch allocates, and a refusal comes before the allocation."""

from __future__ import annotations

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
from tests.gpu.precision import DTYPE, NAME
from tests.plan.test_measured_peaks import OPTIONS, SHAPES, step_job

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_of_a_step(shape: str, options: str) -> None:
    """The engine's bytes to the byte, all of torch's within 2 %."""
    config = step_job(shape, options, NAME)
    plan = make(config, *here(on_gpu=True))
    _take_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = Transformer(config.model)
    device = torch.device("cuda", torch.cuda.current_device())
    optimizer = offload_job(model, config, device)
    for _ in range(2):
        for _ in range(config.train.grad_accum_steps):
            tokens = torch.randint(config.model.vocab_size, (4, 512), device="cuda")
            optimizer.backward(model(tokens, tokens))
        optimizer.step()
    torch.cuda.synchronize()
    held = {(row.tier, row.owner): row.peak_bytes for row in optimizer.ledger.rows()}
    for owner, size in plan.placed.device().items():
        assert held["device", owner] == size
    peak = torch.cuda.max_memory_allocated() - before
    optimizer.close()
    assert peak == pytest.approx(sum(plan.device.values()), rel=0.02)


def _take_workspaces() -> None:
    """cuBLAS keeps some memory for each thread and stream from its first product on: it is the
    process's, as the context is, and no step's."""
    for dtype in (torch.float32, DTYPE):
        layer = torch.nn.Linear(64, 64, device="cuda", dtype=dtype)
        layer(torch.randn(64, 64, device="cuda", dtype=dtype)).sum().backward()
    torch.cuda.synchronize()


def test_the_machine_here_is_the_gpu() -> None:
    name, machine = here(on_gpu=True)
    assert machine.gpu == torch.cuda.get_device_name() and not machine.on_cpu
    assert "this machine" in name
    assert machine.gpu_memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_a_planned_step_against_a_measured_one() -> None:
    """With rates that were measured here a second ago, within a factor of two either way."""
    device = torch.device("cuda", torch.cuda.current_device())
    machine = measure(
        device,
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        host_memory=64 << 30,
        cores=8,
        disk_gbps=0.0,
        quick=True,
        say=lambda text: None,
    )
    spec = Spec(size="llama-1.3b", seq_len=1024, micro_batch=8, precision=machine.auto_precision)
    found = measured(spec)["figures"]["step_s"] / planned(spec, machine)["step_s"]
    assert 0.5 < found < 2.0
