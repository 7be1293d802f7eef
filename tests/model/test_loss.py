"""Cross-entropy in row chunks against the plain formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offloadtrain.model import loss as loss_module
from offloadtrain.model.loss import cross_entropy
from tests.plan.tracing.measured import most_allocated


@pytest.mark.parametrize("rows_bytes", [1, 4 * 50 * 3, 1 << 20], ids=["1 row", "3 rows", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_equal_the_formula(
    rows_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "_ROWS_BYTES_CPU", rows_bytes)
    logits_NV = (4 * torch.randn(11, 50)).to(dtype).requires_grad_()
    targets_N = torch.randint(50, (11,))
    loss = cross_entropy(logits_NV, targets_N)
    (3.0 * loss).backward()
    wide_NV = logits_NV.detach().double().requires_grad_()
    expected = F.cross_entropy(wide_NV, targets_N)
    (3.0 * expected).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logits_NV.grad is not None and logits_NV.grad.dtype == dtype
    assert wide_NV.grad is not None
    # one rounding to the dtype of the logits, on top of fp32 arithmetic
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(logits_NV.grad.double(), wide_NV.grad, rtol=spacing, atol=1e-7)


@pytest.mark.parametrize("rows_bytes", [1, 4 * 50 * 3, 1 << 20], ids=["1 row", "3 rows", "all"])
def test_ignored_rows_have_no_loss_and_no_gradient(
    rows_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "_ROWS_BYTES_CPU", rows_bytes)
    logits_NV = (4 * torch.randn(11, 50)).requires_grad_()
    targets_N = torch.randint(50, (11,))
    targets_N[[0, 4, 5, 10]] = loss_module.IGNORED
    loss = cross_entropy(logits_NV, targets_N, divisor=3.5)
    (grad_NV,) = torch.autograd.grad(loss, logits_NV)
    expected = F.cross_entropy(logits_NV.double(), targets_N, reduction="sum") / 3.5
    (expected_NV,) = torch.autograd.grad(expected, logits_NV)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(grad_NV, expected_NV, rtol=1e-5, atol=1e-7)
    assert not grad_NV[targets_N == loss_module.IGNORED].any()


def test_a_microbatch_without_counted_rows_has_the_loss_0() -> None:
    logits_NV = torch.full((3, 5), float("inf"), requires_grad=True)
    loss = cross_entropy(logits_NV, torch.full((3,), loss_module.IGNORED), divisor=7)
    loss.backward()
    assert loss.item() == 0.0
    assert logits_NV.grad is not None and not logits_NV.grad.any()


def test_scaled_gradients_do_not_underflow_in_fp16() -> None:
    """The scale is applied in fp32, before the gradient is rounded."""
    logits_NV = torch.zeros(1, 60000, dtype=torch.float16, requires_grad=True)
    loss = cross_entropy(logits_NV.expand(64, -1), torch.zeros(64, dtype=torch.int64))
    (65536.0 * loss).backward()
    assert logits_NV.grad is not None
    assert logits_NV.grad[0, 1].item() == pytest.approx(65536 / 60000, rel=2e-2)


def test_large_logits_do_not_overflow() -> None:
    logits_NV = torch.tensor([[30000.0, -30000.0]], dtype=torch.float16, requires_grad=True)
    loss = cross_entropy(logits_NV, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 60000.0
    assert logits_NV.grad is not None and logits_NV.grad.tolist() == [[1.0, -1.0]]


def test_nothing_of_the_size_of_fp32_logits_waits_for_backward() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    logits_NV = torch.randn(64, 1000).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cross_entropy(logits_NV, torch.zeros(64, dtype=torch.int64))
    assert sum(t.nbytes for t in saved) == logits_NV.nbytes + 64 * 8


@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_backward_keeps_no_fp32_rows_of_the_chunk_before(
    dtype: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its peak it holds a chunk's logits in fp32, where they are narrower, and their softmax."""
    num_rows, vocab_size, rows_of_chunk = 64, 4096, 8
    chunk_bytes = 4 * rows_of_chunk * vocab_size
    monkeypatch.setattr(loss_module, "_ROWS_BYTES_CPU", chunk_bytes)
    logits_NV = torch.randn(num_rows, vocab_size).to(dtype).requires_grad_()
    targets_N = torch.randint(vocab_size, (num_rows,))

    def step() -> None:
        torch.autograd.grad(cross_entropy(logits_NV, targets_N), logits_NV)

    alive_bytes = most_allocated(step) - logits_NV.nbytes  # the gradient's own
    assert alive_bytes == pytest.approx(chunks * chunk_bytes, rel=0.05)
