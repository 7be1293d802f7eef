"""Cross-entropy in row chunks against the plain formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offloadtrain.config import loss_parts
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.sections import IGNORED
from offloadtrain.engine import offload
from offloadtrain.model import loss as loss_module
from offloadtrain.model.loss import cross_entropy, linear_cross_entropy
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.optim import AdamW


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


# The head's product and its cross-entropy in parts, against torch's over whole logits.


TOKENS, WIDTH, CLASSES = 37, 24, 700
SMOOTHING_Z = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 128 classes: six of them, the last one narrower."""
    monkeypatch.setattr(loss_parts, "PART_BYTES_CPU", 1)


def inputs(dtype: torch.dtype, *, biased: bool = False) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(CLASSES, WIDTH, generator=generator).to(dtype)
    bias = torch.randn(CLASSES, generator=generator).to(dtype) if biased else None
    return [None if x is None else x.requires_grad_() for x in (hidden, weight, bias)]


def targets() -> Tensor:
    result = torch.randint(0, CLASSES, (TOKENS,), generator=torch.Generator().manual_seed(4))
    result[::5] = IGNORED
    result[1], result[2], result[3] = 0, CLASSES - 1, 128  # the edges of parts
    return result


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    divisor: float | None,
    smoothing: float,
    z: float,
) -> Tensor:
    logits, wanted = F.linear(hidden, weight, bias), targets()
    sums = F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=smoothing)
    counted = wanted != IGNORED
    sums = sums + z * logits[counted].logsumexp(1).square().sum()
    return sums / (counted.sum() if divisor is None else divisor)


@pytest.mark.parametrize(("smoothing", "z"), SMOOTHING_Z)
@pytest.mark.parametrize(("biased", "divisor"), [(False, None), (True, 11.5)])
def test_loss_and_gradients_are_those_of_whole_logits(
    biased: bool, divisor: float | None, smoothing: float, z: float
) -> None:
    chunked = inputs(torch.float32, biased=biased)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in chunked]
    hidden, weight, bias = chunked
    assert hidden is not None and weight is not None
    loss = linear_cross_entropy(
        hidden, weight, targets(), bias, divisor=divisor, label_smoothing=smoothing, z_loss=z
    )
    wanted = reference(*exact, divisor, smoothing, z)  # type: ignore[arg-type]
    (3.0 * loss).backward()
    (3.0 * wanted).backward()
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    for tensor, other in zip(chunked, exact, strict=True):
        if tensor is not None and other is not None:
            assert tensor.grad is not None and other.grad is not None
            scale = other.grad.abs().max()
            assert (tensor.grad.double() - other.grad).abs().max() <= 3e-6 * scale


def test_in_16_bits_it_is_no_less_exact_than_whole_logits() -> None:
    """Against fp64 of the same 16-bit values; the sums of errors of all elements."""
    chunked, unchunked = (inputs(torch.bfloat16)[:2] for _ in range(2))
    exact = [x.detach().double().requires_grad_() for x in chunked if x is not None]
    linear_cross_entropy(*chunked, targets()).backward()  # type: ignore[arg-type]
    F.cross_entropy(F.linear(*unchunked).float(), targets()).backward()  # type: ignore[arg-type]
    F.cross_entropy(F.linear(*exact), targets()).backward()
    for tensor, other, right in zip(chunked, unchunked, exact, strict=True):
        assert tensor is not None and other is not None
        assert tensor.grad is not None and other.grad is not None and right.grad is not None
        assert tensor.grad.dtype is torch.bfloat16
        error, its = ((x.grad.double() - right.grad).abs().sum() for x in (tensor, other))
        assert error <= 1.1 * its


def test_logits_never_exist_as_a_whole() -> None:
    """No tensor made in forward or backward has as many elements as the logits."""
    made: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                made.append(out.numel())
            return out

    tokens = 8 * CLASSES  # so that logits are far larger than weights and inputs
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)
    with Sizes():
        linear_cross_entropy(hidden, weight, torch.zeros(tokens, dtype=torch.long)).backward()
    assert max(made) <= tokens * 128 < tokens * CLASSES


def transformer() -> Transformer:
    sizes = dict(vocab_size=300, d_model=16, num_layers=2, num_heads=2, max_seq_len=12)
    return Transformer(ModelShape(**sizes), seed=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "recompute"}])
def test_our_own_model_trains_as_with_whole_logits(options: dict[str, Any]) -> None:
    tokens = torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(2))
    losses: list[list[float]] = []
    for chunked in (None, LossTerms()):
        model = transformer()
        model.chunked_loss = chunked
        optimizer = offload(model, AdamW(lr=1e-2), device="cpu", precision="fp32", **options)
        losses.append([])
        for _ in range(4):
            loss = model(tokens, tokens.roll(-1, 1))
            losses[-1].append(loss.item())
            optimizer.backward(loss)
            optimizer.step()
        optimizer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[0][-1] < losses[0][0]
