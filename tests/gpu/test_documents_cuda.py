"""Variable-length attention within packed documents, by torch's kernel on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model import documents
from offloadtrain.model.documents import attend_documents, document_bias, document_bounds
from offloadtrain.model.transformer import Transformer
from tests.gpu.precision import DEVICE, DTYPE, HAS_GPU, offload
from tests.numerics.comparison import ADAMW

pytestmark = pytest.mark.gpu

LENGTHS = (50, 1, 200, 5)


def positions(rows: int) -> torch.Tensor:
    """Return positions of packed documents; the last row is one document."""
    packed = torch.cat([torch.arange(length) for length in LENGTHS])
    return torch.stack([*[packed] * (rows - 1), torch.arange(len(packed))]).to(DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_that_under_a_mask(causal: bool, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    positions_BT = positions(3)
    sizes = [(3, heads, 256, 64) for heads in (4, kv_heads, kv_heads)]
    inputs = [
        torch.randn(size, generator=generator).to(DEVICE, DTYPE).requires_grad_() for size in sizes
    ]
    has_kernel = torch.__version__ >= "2.12"
    if HAS_GPU and has_kernel and torch.cuda.get_device_capability(DEVICE) >= (8, 0):
        assert documents._flash_kernel(inputs[0], inputs[2]) is not None
    exact = [x.detach().float().requires_grad_() for x in inputs]
    bias = document_bias(positions_BT, torch.float32, causal=causal)
    expected = F.scaled_dot_product_attention(
        *(exact[0], exact[1], exact[2]), attn_mask=bias, enable_gqa=kv_heads != 4
    )
    query, key, value = inputs
    mixed = attend_documents(query, key, value, document_bounds(positions_BT), causal=causal)
    torch.testing.assert_close(mixed.float(), expected, rtol=2e-2, atol=2e-2)
    weights = torch.randn(expected.shape, generator=generator).to(DEVICE)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for grad, other in zip(
        torch.autograd.grad((mixed * weights).sum(), inputs), wanted, strict=True
    ):
        torch.testing.assert_close(grad.float(), other, rtol=2e-2, atol=5e-2)


def test_a_streamed_model_trains_on_packed_documents() -> None:
    """With recompute, whose second run gets the bounds again: gradients of one without."""
    shape = ModelShape(vocab_size=97, num_layers=2, d_model=256, num_heads=4, max_seq_len=256)
    model = Transformer(shape)
    model.varlen_attention = True
    copied = copy.deepcopy(model)
    tokens_BT = torch.randint(97, (2, 256), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    norms = []
    placements: list[dict[str, Any]] = [{"working": "host", "activation": "recompute"}, {}]
    for module, options in zip((model, copied), placements, strict=True):
        optimizer = offload(module, ADAMW, **options)
        for _ in range(2):
            loss = module(tokens_BT, tokens_BT.roll(-1, 1), positions_BT=positions(2))
            optimizer.backward(loss)
            optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
