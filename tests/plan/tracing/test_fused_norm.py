"""A trace for a GPU has the norms of a GPU: torch's RMSNorm is one kernel there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.plan.costs.microbatch import Work
from offloadtrain.plan.tracing.meter import Meter
from offloadtrain.plan.tracing.patches import operations_of_device

ROWS, WIDTH, BF16 = 10, 64, torch.bfloat16


def ran(*, on_cpu: bool, weight_dtype: torch.dtype = BF16) -> tuple[Work, int]:
    """Return the work of a norm and its backward, and the bytes held between them."""
    with FakeTensorMode(), operations_of_device(on_cpu=on_cpu):
        x = torch.empty(2, ROWS // 2, WIDTH, dtype=BF16, requires_grad=True)
        norm = nn.RMSNorm(WIDTH, dtype=weight_dtype)
        with Meter() as meter:
            out = norm(x)
            peak_bytes = sum(meter.segments[-1].at_peak.values())
            torch.autograd.grad(out, [x, norm.weight], torch.empty_like(out))
    work = Work()
    for segment in meter.segments:
        work.add(segment.work)
    assert out.shape == x.shape and out.dtype == x.dtype
    return work, peak_bytes


def test_rmsnorm_is_a_kernel_forward_and_one_backward() -> None:
    work, peak_bytes = ran(on_cpu=False)
    rows, weight, statistics = 2 * ROWS * WIDTH, 2 * WIDTH, 4 * ROWS
    assert peak_bytes == rows + statistics
    forward = 2 * rows + weight + statistics
    assert work.launches == 2 and work.nbytes == forward + 3 * rows + 2 * weight + statistics


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("on_cpu", "weight_dtype"), [(True, BF16), (False, torch.float32)], ids=["cpu", "mixed"]
)
def test_elsewhere_it_is_the_chain_that_torch_runs(on_cpu: bool, weight_dtype: torch.dtype) -> None:
    """A GPU's kernel wants one dtype."""
    with FakeTensorMode(), Meter() as meter:
        x = torch.empty(2, ROWS // 2, WIDTH, dtype=BF16)
        F.rms_norm(x, [WIDTH], torch.empty(WIDTH, dtype=weight_dtype))
    launches = sum(segment.work.launches for segment in meter.segments)
    assert launches > 4
    assert ran(on_cpu=on_cpu, weight_dtype=weight_dtype)[0].launches > 2 * launches - 2
    assert F.rms_norm(torch.ones(4), [4]).allclose(torch.ones(4))
