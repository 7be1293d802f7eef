"""Offloaded training with narrow state has the bits of a resident run that keeps each parameter's
state for itself and updates it with the plain torch kernel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime import kernels
from tests import torch_kernels
from tests.numerics.comparison import train
from tests.numerics.models import VOCAB, WIDTH, Chain, batches


def test_another_seed_has_other_bits() -> None:
    results = []
    for seed in (0, 1):
        torch.manual_seed(0)
        model = Chain()
        optimizer = ot.offload(model, device="cpu", state="split16", seed=seed)
        for tokens in batches(3):
            train(optimizer, model, [tokens])
        results.append(torch.cat([s["exp_avg_sq"].flatten() for _, s in optimizer.named_state()]))
    assert not torch.equal(*results)


@pytest.mark.parametrize("state", ["split16", "int8"])
def test_state_of_another_format_is_taken_over(state: str) -> None:
    model, stream = Chain(), batches(4)
    source = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu")
    for tokens in stream:
        train(source, model, [tokens])
    saved = copy.deepcopy(source.state_dict())
    other = Chain()
    target = ot.offload(other, ot.AdamW(lr=1e-2), device="cpu", state=state)
    target.load_state_dict(saved)
    for (name, tensors), (_, narrow) in zip(
        source.named_state(), target.named_state(), strict=True
    ):
        fields = tuple(value.reshape(-1) for value in narrow.values())
        kind = kernels.Split16State if state == "split16" else kernels.Int8State
        values = torch_kernels.to_fp32(kind(*fields))
        bound = 0.0 if state == "split16" else 2.0**-16
        master = tensors["master"].reshape(-1)
        assert bool(((values.master - master).abs() <= bound * master.abs()).all()), name
        largest = tensors["exp_avg"].abs().max()
        error = (values.exp_avg - tensors["exp_avg"].reshape(-1)).abs().max()
        assert error <= largest / 16, name
    assert target.state_dict()["state"][0]["step"] == 4


def test_wide_state_is_taken_back_from_narrow() -> None:
    model = Chain()
    source = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", state="split16")
    train(source, model, batches(1))
    other = Chain()
    target = ot.offload(other, ot.AdamW(lr=1e-2), device="cpu")
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for (_, state), (_, wide) in zip(source.named_state(), target.named_state(), strict=True):
        fields = (value.reshape(-1) for value in state.values())
        master = torch_kernels.decoded_master(kernels.Split16State(*fields))
        assert torch.equal(wide["master"].reshape(-1), master)


class Normed(nn.Module):
    """A module whose parameters stay fp32 in a 16-bit model, among others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2).to(x.dtype))


def test_weights_that_stay_fp32_keep_fp32_state() -> None:
    model = Normed()
    optimizer = ot.offload(model, device="cpu", state="int8")
    train(optimizer, model, batches(1))
    kinds = {name: set(state) for name, state in optimizer.named_state()}
    assert kinds["norm.weight"] == {"master", "exp_avg", "exp_avg_sq"}
    assert "correction" in kinds["head.weight"]


def test_split16_refuses_fp16_and_fp32_and_says_why() -> None:
    with pytest.raises(ValueError, match="does not fit in 16 bits"):
        ot.offload(Chain(), device="cpu", precision="fp16", state="split16")
    with pytest.raises(ValueError, match="16-bit working weight"):
        ot.offload(Chain(), device="cpu", precision="fp32", state="int8")


@pytest.mark.parametrize(("state", "per_param"), [("fp32", 14), ("split16", 10), ("int8", 7)])
def test_host_bytes_per_parameter(state: str, per_param: int) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = ot.offload(model, device="cpu", state=state)
    rows = [row for row in optimizer.ledger.rows() if row.tier == "host"]
    host = sum(row.bytes for row in rows if row.owner != "padding")
    params = sum(p.numel() for p in model.parameters())
    norms = 2 * 8 * 8  # those of the host, and the device's
    scales = params // 128 * 8 if state == "int8" else 0
    assert host - norms == per_param * params + scales
