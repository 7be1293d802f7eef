"""Attention within the documents of packed rows.

[Note: Packed documents]
A token attends only to tokens of its own document. There are two implementations. The first adds a
mask, `document_bias`, to the scores of all pairs in a row: torch computes all pairs, with its
memory-efficient kernel. The second, variable-length attention, computes only the pairs within
documents: the rows are concatenated, and `document_bounds` lists the starts of documents. It uses
torch's flash attention if a kernel exists (16 bits on a GPU of compute capability 8.0 or higher),
and otherwise one call per document. The results of the two implementations differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def document_bias(positions_BT: Tensor, dtype: torch.dtype, *, causal: bool = True) -> Tensor:
    """Return the bias of the scores of attention within documents, (B, 1, T, T): 0 if a token
    attends to the other token, else -inf.

    All layers share one bias. With a boolean mask, each layer would store a converted copy for
    backward.
    """
    document_BT = (positions_BT == 0).cumsum(1)
    visible_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    if causal:
        visible_BTT = visible_BTT.tril()
    bias_BTT = torch.zeros(visible_BTT.shape, dtype=dtype, device=positions_BT.device)
    return bias_BTT.masked_fill_(~visible_BTT, float("-inf"))[:, None]


def document_bounds(positions_BT: Tensor) -> Tensor:
    """Return the starts of documents in the concatenated rows, and the end of the last document:
    (documents + 1,) int32, on the device of the positions.

    A document begins at the start of each row and at each position 0. On a GPU this waits for the
    device, once per forward. Tensors without values (fake, meta) count as one document per row.
    """
    rows, seq_len = positions_BT.shape
    if _has_no_values(positions_BT):
        return positions_BT.new_empty(rows + 1, dtype=torch.int32)
    begins_BT = positions_BT == 0
    begins_BT[:, 0] = True
    begins_N = begins_BT.flatten().nonzero().flatten().int()
    return F.pad(begins_N, (0, 1), value=rows * seq_len)


def attend_documents(
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    bounds: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Return attention within documents, (B, N, T, H), in the dtype of the queries.

    Args:
        q_BNTH, k_BKTH, v_BKTH: K divides N.
        bounds: the result of `document_bounds`.
        causal: a token attends to itself and earlier tokens; False: to its whole document.
        scale: factor of the scores; None: 1 / sqrt(H).
    """
    rows, _, seq_len, _ = q_BNTH.shape
    shared = k_BKTH.shape[1] != q_BNTH.shape[1]
    if _has_no_values(bounds):
        return F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=causal, scale=scale, enable_gqa=shared
        )
    # S = B * T: the concatenated rows.
    q_SNH, k_SKH, v_SKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNTH, k_BKTH, v_BKTH))
    if (varlen_attn := _flash_kernel(q_BNTH, v_BKTH)) is not None:
        mixed_SNH = varlen_attn(
            *(q_SNH, k_SKH, v_SKH, bounds, bounds, seq_len, seq_len),
            window_size=(-1, 0 if causal else -1),
            scale=scale,
            enable_gqa=shared,
        )
    else:
        mixed_SNH = _one_by_one(q_SNH, k_SKH, v_SKH, bounds, causal, scale, shared)
    return cast(Tensor, mixed_SNH.unflatten(0, (rows, seq_len)).transpose(1, 2))


@torch._disable_dynamo  # type: ignore[attr-defined]  # its sizes are values of a tensor
def _one_by_one(
    q_SNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    bounds: Tensor,
    causal: bool,
    scale: float | None,
    shared: bool,
) -> Tensor:
    lengths = bounds.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q_SNH, k_SKH, v_SKH)), strict=True)
    mixed = [
        F.scaled_dot_product_attention(
            q_NLH[None], k_KLH[None], v_KLH[None], is_causal=causal, scale=scale, enable_gqa=shared
        )[0]
        for q_NLH, k_KLH, v_KLH in parts
    ]
    return torch.cat(mixed, 1).transpose(0, 1)


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _flash_kernel(q_BNTH: Tensor, v_BKTH: Tensor) -> Callable[..., Any] | None:
    """Return torch's `varlen_attn` if it supports these queries and values."""
    width, in_16_bits = q_BNTH.shape[-1], q_BNTH.dtype in (torch.bfloat16, torch.float16)
    if not q_BNTH.is_cuda or not in_16_bits or width % 8 or width > 256:
        return None
    if v_BKTH.shape[-1] != width:  # narrower values, for example in DeepSeek-V3
        return None
    # Shared key/value heads and windows need torch 2.12 or later.
    if torch.__version__ < "2.12" or torch.cuda.get_device_capability(q_BNTH.device) < (8, 0):
        return None
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
