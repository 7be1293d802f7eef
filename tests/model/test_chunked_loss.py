"""The head's product and its cross-entropy in parts, against torch's over whole logits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offloadtrain.config import loss_parts
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.sections import IGNORED
from offloadtrain.engine import offload
from offloadtrain.model.loss import linear_cross_entropy
from offloadtrain.model.transformer import LossTerms, Transformer
from offloadtrain.optim import AdamW

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


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=2))[1:])
def test_only_gradients_that_are_wanted_are_made(wanted: tuple[bool, bool]) -> None:
    hidden, weight, _ = inputs(torch.float32)
    assert hidden is not None and weight is not None
    hidden, weight = hidden.detach(), weight.detach()
    hidden.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    linear_cross_entropy(hidden, weight, targets()).backward()
    assert (hidden.grad is not None, weight.grad is not None) == wanted


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
