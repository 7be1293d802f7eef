"""Weights in shards: reads outside of a forward, and an optimizer that goes out of scope."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import offloadtrain as ot
from offloadtrain.engine.gradient_access import GradientAccessError
from offloadtrain.step.program.streaming import StreamError
from tests.distributed.conftest import Run
from tests.numerics.models import Chain, batches, loss_of


def read_outside_of_a_forward() -> None:
    """Every rank raises the error by itself: a rank that reads alone must not wait for others."""
    model = Chain(6)
    optimizer = ot.offload(model, device="cpu", zero_stage=3)
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        if optimizer.ranks.rank == 0:
            with pytest.raises(StreamError, match=r"optimizer.full_weights.*zero_stage = 2"):
                model.layers[1].up.weight.norm()
    optimizer.close()


class FunctionalHead(Chain):
    """The head's product is made by the model itself, in every forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.head.weight, self.head.bias)


def functional_losses(stage: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = FunctionalHead(4), []
    optimizer = ot.offload(
        model, ot.AdamW(lr=1e-2), device="cpu", precision="fp32", clip_norm=0.5, zero_stage=stage
    )
    for tokens in batches(4):
        loss = loss_of(model, tokens)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    optimizer.close()
    return losses


def test_in_stage_3_a_read_outside_of_a_forward_raises(ranks: Run) -> None:
    ranks(2, read_outside_of_a_forward)


def test_in_stage_3_a_forward_reads_weights_without_a_call(ranks: Run) -> None:
    assert ranks(2, functional_losses, 3) == ranks(2, functional_losses, 2)


def out_of_scope(close: bool) -> tuple[list[str], set[tuple[int, ...]]]:
    """The messages, and the shapes of the layers' parameters afterwards."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offloadtrain").addHandler(handler)
    try:
        model = Chain()
        optimizer = ot.offload(model, device="cpu", zero_stage=3)
        optimizer.backward(loss_of(model, batches(1)[0]))
        optimizer.step()
        if close:
            optimizer.close()
        del optimizer
        return heard, {tuple(param.shape) for param in model.layers.parameters()}
    finally:
        logging.getLogger("offloadtrain").removeHandler(handler)


def test_out_of_scope_in_stage_3_is_told(ranks: Run) -> None:
    """Weights in shards cannot be gathered there: their parameters are empty, and not NaN."""
    for heard, shapes in ranks(2, out_of_scope, False):
        assert "dict(optimizer.full_weights()) on all ranks" in heard[0] and shapes == {(0,)}
    assert ranks(2, out_of_scope, True) == [([], {(0,)})] * 2


def gradients_of_ranks(options: dict[str, Any]) -> tuple[float, float, float]:
    """The largest difference to the mean gradient, to its norms, and to torch's total norm."""
    torch.manual_seed(0)
    model, plain = Chain(), Chain()
    plain.load_state_dict(model.state_dict())
    optimizer = ot.offload(model, device="cpu", precision="fp32", **options)
    ranks = optimizer.ranks
    for number, tokens in enumerate(batches(ranks.size)):
        (loss_of(plain, tokens) / ranks.size).backward()
        if number == ranks.rank:
            loss_of(model, tokens).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with pytest.raises(GradientAccessError, match=r"divided among ranks.*optimizer.gradients\(\)"):
        print(model.head.weight.grad)
    assert not hasattr(model.head.weight, "grad")
    norms, gradients = optimizer.grad_norms(), dict(optimizer.gradients())
    assert norms.keys() == gradients.keys() == expected.keys()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.clip_coef < 0.5
    return (
        max(float((gradients[name] - grad).abs().max()) for name, grad in expected.items()),
        max(abs(norms[name] - float(grad.norm())) for name, grad in expected.items()),
        abs(float(total) - float(torch.nn.utils.get_total_norm(list(expected.values())))),
    )


@pytest.mark.parametrize("options", [{"zero_stage": 2}, {"zero_stage": 3, "working": "host"}])
def test_gradients_in_shards(ranks: Run, options: dict[str, Any]) -> None:
    for differences in ranks(2, gradients_of_ranks, options):
        assert max(differences) < 1e-6
