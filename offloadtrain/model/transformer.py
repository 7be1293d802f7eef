"""A transformer, decoder or encoder: GPT-2 and Llama shapes from one `ModelShape`.

Shape suffixes: B batch, T time, D d_model, V vocab_size, F ff_width, N query heads,
K key/value heads, H head_dim, P = H/2 rotary pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.documents import attend_documents, document_bias, document_bounds
from offloadtrain.model.experts import Experts, MixtureOfExperts
from offloadtrain.model.layers import Embedding, Linear, RotaryTables, activated, own_draws, rotate
from offloadtrain.model.loss import cross_entropy, linear_cross_entropy

Rotary = tuple[Tensor, Tensor]  # cos_TP, sin_TP, or cos_B1TP, sin_B1TP; fp32

_INIT_STD = 0.02  # GPT-2's


class Transformer(nn.Module):
    """Embedding, `blocks`, final norm and head, which may be tied to the embedding.

    Attributes:
        chunked_loss: the terms of the loss; if set, the loss computes logits for a part of the
            vocabulary at a time.
        varlen_attention: attention within documents computes only the pairs of a document; False: a
            mask hides other pairs. See [Note: Packed documents] in `documents.py`.

    Blocks are pre-norm residual blocks. Parameters are made in torch's default dtype on its default
    device. On the meta device no weight is drawn: call `init_weights` after `to_empty`.

    Raises:
        ValueError: in the constructor, if `shape.problems()` is not empty.
    """

    def __init__(self, shape: ModelShape, *, seed: int = 0) -> None:
        super().__init__()
        if problems := shape.problems():
            raise ValueError(f"impossible model shape: {'; '.join(problems)}")
        self.shape = shape
        self.chunked_loss: LossTerms | None = None
        self.varlen_attention = False
        self.embedding = Embedding(shape.vocab_size, shape.d_model)
        self.positions: nn.Module
        if shape.positions == "learned":
            self.positions = Embedding(shape.max_seq_len, shape.d_model)
        else:
            self.positions = RotaryTables(shape.head_dim, shape.max_seq_len, shape.rope_theta)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.num_layers))
        self.norm = _norm(shape)
        self.head = Head(shape.d_model, shape.vocab_size, bias=False)
        self.tie()
        self.init_weights(seed)

    def tie(self) -> None:
        """Tie head and embedding if the shape says so; call it after `to_empty`, which unties
        them."""
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        positions_BT: Tensor | None = None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) in the parameters' dtype, or with targets the loss, fp32.

        Args:
            tokens_BT: int64, T at most `shape.max_seq_len`; in a later stage of a pipeline, the
                output of the previous stage, (B, T, D).
            targets_BT: int64, the token after each of `tokens_BT`, or with objective "mlm" the
                original token; with a divisor, `loss.IGNORED` for tokens that the loss does not
                count.
            positions_BT: int64, the position of each token in its document. A document begins at
                each position 0, and attention does not cross its start. Default: each row is one
                document.
            divisor: divides the sum of losses; default: B · T, so that the loss is the mean.
        """
        seq_len = tokens_BT.shape[1]
        if seq_len > self.shape.max_seq_len:
            raise ValueError(
                f"a sequence of {seq_len} tokens does not fit max_seq_len = "
                f"{self.shape.max_seq_len}: shorten it or set model.max_seq_len"
            )
        # In a stage of a pipeline, the modules of other stages are None.
        x_BTD = tokens_BT if self.embedding is None else self._embedded(tokens_BT, positions_BT)
        rotary: Rotary | None = None
        if self.shape.positions == "rotary":
            rotary = self.positions(seq_len, positions_BT)
        bias: Tensor | None = None
        bounds: Tensor | None = None
        if positions_BT is not None and self.varlen_attention:
            bounds = document_bounds(positions_BT)
        elif positions_BT is not None:
            bias = document_bias(positions_BT, x_BTD.dtype, causal=self.shape.is_causal)
        balances: list[Tensor] = []
        for block in self.blocks:
            output = block(x_BTD, rotary, bias, bounds)
            if self.shape.num_experts:
                x_BTD, balance = output
                balances.append(balance)
            else:
                x_BTD = output
        self._check_stage()
        if self.head is None:
            return x_BTD
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return cast(Tensor, self.head(x_BTD))
        loss = self._loss(x_BTD, targets_BT, divisor)
        if balances and torch.is_grad_enabled():  # validation measures only cross-entropy
            loss = loss + self.shape.router_aux_loss_coef * torch.stack(balances).sum()
        return loss

    def _loss(self, x_BTD: Tensor, targets_BT: Tensor, divisor: float | None) -> Tensor:
        if self.chunked_loss is not None:
            # Validation measures only cross-entropy.
            terms = self.chunked_loss if torch.is_grad_enabled() else LossTerms()
            return cast(Tensor, self.head(x_BTD, targets_BT, divisor, terms))
        logits_BTV: Tensor = self.head(x_BTD)
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), divisor)

    def _check_stage(self) -> None:
        """Raise ValueError for a stage of a pipeline that would drop its load-balancing loss."""
        alone = self.embedding is not None and self.head is not None
        if self.shape.num_experts and self.shape.router_aux_loss_coef and not alone:
            raise ValueError(
                f"router_aux_loss_coef = {self.shape.router_aux_loss_coef}, and the model is a "
                "stage of a pipeline, which passes on no load-balancing loss: set "
                "model.router_aux_loss_coef = 0"
            )

    def _embedded(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.shape.positions == "learned":
            places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            x_BTD = x_BTD + self.positions(places if positions_BT is None else positions_BT)
        return cast(Tensor, self.dropout(x_BTD))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every weight as in GPT-2: normal with deviation 0.02, biases 0, norms 1.

        The projections into the residual stream get 0.02 / sqrt(2 · num_layers), so that the
        variance of the stream does not grow with depth. One CPU generator draws the weights in
        fp32: every device gets the same weights. Parameters on the meta device are skipped.
        """
        init = self.initializer(seed)
        for module in self.modules():
            init(module)

    def initializer(
        self, seed: int, keep: Callable[[nn.Module, str, Tensor], None] | None = None
    ) -> Callable[[nn.Module], None]:
        """Return the initialiser of one module for `init_weights`, which calls it on `modules()` in
        order.

        Args:
            keep: stores a whole drawn weight, fp32 on the host, in its module under its name. The
                module may have only a part of it. None: each module has the whole weight.
        """
        generator = torch.Generator().manual_seed(seed)
        residual = {id(weight) for weight in self._residual_weights()}
        residual_std = _INIT_STD / math.sqrt(2 * self.shape.num_layers)
        drawn: set[int] = set()

        def draw(module: nn.Module, name: str, std: float) -> None:
            weight: Tensor = getattr(module, name)
            if weight.is_meta:
                return
            full = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
            full.normal_(0.0, std, generator=generator)
            if keep is None:
                weight.copy_(full)
            else:
                keep(module, name, full)

        @torch.no_grad()
        def init(module: nn.Module) -> None:
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, Linear | Embedding) and id(module.weight) not in drawn:
                drawn.add(id(module.weight))
                std = residual_std if id(module.weight) in residual else _INIT_STD
                draw(module, "weight", std)
                if isinstance(module, Linear) and module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Experts):
                draw(module, "up", _INIT_STD)
                draw(module, "down", residual_std)

        return init

    def _residual_weights(self) -> Iterator[Tensor]:
        for block in self.blocks:
            block = cast(TransformerBlock, block)
            yield block.attention.out.weight
            if isinstance(block.mlp, Mlp):
                yield block.mlp.down.weight


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = _norm(shape)
        self.mlp = MixtureOfExperts(shape) if shape.num_experts else Mlp(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        bias_B1TT: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return (B, T, D); with experts, a tuple of this tensor and the load-balancing loss.

        Args:
            bias_B1TT, bounds: separate the documents, see `documents.py`; None: one document per
                row.
        """
        mixed_BTD = self.attention(self.attention_norm(x_BTD), rotary, bias_B1TT, bounds)
        x_BTD = x_BTD + self.dropout(mixed_BTD)
        output = self.mlp(self.mlp_norm(x_BTD))
        if isinstance(self.mlp, MixtureOfExperts):
            mixed_BTD, balance = output
            return x_BTD + self.dropout(mixed_BTD), balance
        return cast(Tensor, x_BTD + self.dropout(output))


class Attention(nn.Module):
    """Causal or bidirectional attention; N / K query heads share one key/value head
    (arXiv:2305.13245).

    One matrix has the rows of queries, keys and values, in this order.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = shape.num_heads, shape.kv_heads
        self.head_dim = shape.head_dim
        self.dropout, self.causal = shape.dropout, shape.is_causal
        width = (self.num_heads + 2 * self.kv_heads) * self.head_dim
        self.part: int | None = None
        """Number of this rank's part of the heads; None: the rank has all heads."""
        self.qkv = Linear(shape.d_model, width, bias=shape.bias)
        self.out = Linear(self.num_heads * self.head_dim, shape.d_model, bias=shape.bias)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        bias_B1TT: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        qkv_BTMH = self.qkv(x_BTD).unflatten(2, (-1, self.head_dim))  # M = N + 2K
        heads = (self.num_heads, self.kv_heads, self.kv_heads)
        q_BNTH, k_BKTH, v_BKTH = qkv_BTMH.transpose(1, 2).split(heads, dim=1)
        if rotary is not None:
            q_BNTH, k_BKTH = rotate(q_BNTH, *rotary), rotate(k_BKTH, *rotary)
        if bounds is not None:
            mixed_BNTH = attend_documents(q_BNTH, k_BKTH, v_BKTH, bounds, causal=self.causal)
            return cast(Tensor, self.out(mixed_BNTH.transpose(1, 2).flatten(2)))
        drops = self.dropout if self.training else 0.0
        with own_draws(self.part if drops else None, x_BTD.device):
            mixed_BNTH = F.scaled_dot_product_attention(
                q_BNTH,
                k_BKTH,
                v_BKTH,
                attn_mask=bias_B1TT,
                dropout_p=drops,
                is_causal=self.causal and bias_B1TT is None,
                enable_gqa=self.kv_heads != self.num_heads,
            )
        return cast(Tensor, self.out(mixed_BNTH.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """GELU or SwiGLU between two matrices; with SwiGLU `up` is gate above value."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gated = shape.mlp == "swiglu"
        width = shape.ff_width
        self.up = Linear(shape.d_model, 2 * width if self.gated else width, bias=shape.bias)
        self.down = Linear(width, shape.d_model, bias=shape.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return cast(Tensor, self.down(activated(self.up(x_BTD), gated=self.gated)))


@dataclass(frozen=True, slots=True)
class LossTerms:
    """See `linear_cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Head(Linear):
    """Computes logits, or with targets the loss, so that it is computed where the weight is."""

    def forward(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor | None = None,
        divisor: float | None = None,
        terms: LossTerms | None = None,
    ) -> Tensor:
        if targets_BT is None or terms is None:
            return super().forward(x_BTD)
        return linear_cross_entropy(
            x_BTD.flatten(0, 1),
            self.weight,
            targets_BT.flatten(),
            divisor=divisor,
            label_smoothing=terms.label_smoothing,
            z_loss=terms.z_loss,
        )


def _norm(shape: ModelShape) -> nn.Module:
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.d_model, eps=shape.norm_eps, bias=shape.bias)
    return nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
