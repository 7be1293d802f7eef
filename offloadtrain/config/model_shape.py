"""Model shapes: the numbers that define a transformer, and the named sizes.

Standard library only, so that the configuration and the planner can read shapes without torch.
`offloadtrain.model.transformer` builds the module that a shape describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from offloadtrain.config.errors import broken

Positions = Literal["rotary", "learned"]
Norm = Literal["rmsnorm", "layernorm"]
Mlp = Literal["swiglu", "gelu"]
Objective = Literal["causal", "mlm"]


MOST_LAYERS, MOST_PARAMS = 1024, 1 << 43
"""Upper bounds of layers and parameters. A plan of this many layers takes about ten seconds; of
10^9, it would never end."""
MOST_SEQ_LEN, MOST_TOKENS = 1 << 23, 1 << 24
"""Upper bounds of sequence length and vocabulary: a plan takes time for each piece of a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of one transformer. Zero in `num_kv_heads` or `d_ff` means "the usual value".

    Attributes:
        vocab_size: number of tokens of the embedding, at least the number of tokens of the data.
        num_layers: number of blocks.
        d_model: width of the residual stream.
        num_heads: number of query heads; must divide `d_model`.
        num_kv_heads: key/value heads of grouped-query attention; 0: as many as `num_heads`.
        d_ff: hidden width of the MLP; 0: 4 x `d_model`, or with "swiglu" 8/3 x, rounded up.
        max_seq_len: longest sequence; with learned positions, also rows of the position table.
        positions: rotation of queries and keys, or a trained table.
        norm: the norm before attention, MLP and head.
        mlp: two matrices and a gate, or two matrices.
        num_experts: number of MLPs of each block, from which a router chooses for each token; 0:
            one MLP for all tokens and no router.
        experts_per_token: number of experts that compute each token: 1 as in Switch Transformer, 2
            as in GShard and Mixtral. No effect without experts.
        router_aux_loss_coef: factor of the load-balancing loss of each block, which training adds
            to the loss. No effect without experts.
        tie_embeddings: the output head is the token embedding (one parameter).
        bias: additive biases in LayerNorm and in every linear layer, except in the head, routers
            and experts.
        dropout: probability, after the embedding, in attention and on both residual branches.
        rope_theta: base of the rotary angles.
        norm_eps: added to the variance.
        objective: "causal": attention to earlier tokens, and each token is predicted from them;
            "mlm": an encoder: bidirectional attention, and hidden tokens are predicted from all
            other tokens (masked language modelling). The last row of the embedding is the mask
            token.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int = 0
    d_ff: int = 0
    max_seq_len: int = 1024
    positions: Positions = "rotary"
    norm: Norm = "rmsnorm"
    mlp: Mlp = "swiglu"
    num_experts: int = 0
    experts_per_token: int = 2
    router_aux_loss_coef: float = 0.01
    tie_embeddings: bool = False
    bias: bool = False
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    objective: Objective = "causal"

    @property
    def is_causal(self) -> bool:
        return self.objective == "causal"

    @property
    def mask_token(self) -> int:
        """The token that replaces a hidden token; larger than every token of the data."""
        return self.vocab_size - 1

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def held_experts(self) -> int:
        """Number of experts of each layer on one rank."""
        return self.num_experts

    @property
    def ff_width(self) -> int:
        """`d_ff`, or 4·d for GELU, or 8/3·d for SwiGLU (three matrices with as many parameters).

        The SwiGLU width is rounded up to a multiple of 256 as in Llama (of 64 below d = 1024).
        """
        if self.d_ff:
            return self.d_ff
        if self.mlp == "gelu":
            return 4 * self.d_model
        multiple = 256 if self.d_model >= 1024 else 64
        return -(-8 * self.d_model // (3 * multiple)) * multiple

    def problems(self) -> list[str]:
        """Return one sentence per broken rule, with the key to change; empty if the shape is
        valid."""
        at_least_1 = ("vocab_size", "num_layers", "d_model", "num_heads", "max_seq_len")
        choices = {"positions": Positions, "norm": Norm, "mlp": Mlp, "objective": Objective}
        values = {key: getattr(self, key) for key in ModelShape.__dataclass_fields__}
        divides = min(self.num_heads, self.kv_heads, self.d_model) >= 1
        rest = self.d_model % self.num_heads if divides else 0
        return broken(
            *((values[key] < 1, f"{key} = {values[key]} must be at least 1") for key in at_least_1),
            *_too_large(self, divides and self.num_experts >= 0),
            *(
                (
                    values[key] < 0,
                    f"{key} = {values[key]} must not be negative (0: the usual value)",
                )
                for key in ("num_kv_heads", "d_ff")
            ),
            (not 0.0 <= self.dropout < 1.0, f"dropout = {self.dropout} must be in [0, 1)"),
            *(
                (
                    not 0.0 < values[key] < float("inf"),
                    f"{key} = {values[key]} must be a finite number above 0",
                )
                for key in ("rope_theta", "norm_eps")
            ),
            *(
                (
                    values[key] not in get_args(choice),
                    f"{key} = {values[key]!r} is not one of {', '.join(get_args(choice))}",
                )
                for key, choice in choices.items()
            ),
            (rest, f"d_model = {self.d_model} must be a multiple of num_heads = {self.num_heads}"),
            (
                divides and not rest and self.positions == "rotary" and self.head_dim % 2,
                "rotary positions need an even head width; d_model / num_heads = "
                f"{self.d_model // max(self.num_heads, 1)}",
            ),
            (
                divides and self.num_heads % self.kv_heads,
                f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = "
                f"{self.kv_heads}",
            ),
            (
                self.num_experts < 0 or self.num_experts == 1,
                f"num_experts = {self.num_experts} must be at least 2, or 0 for one MLP without "
                "router",
            ),
            (
                self.num_experts > 1 and not 1 <= self.experts_per_token <= self.num_experts,
                f"experts_per_token = {self.experts_per_token} must be from 1 to num_experts = "
                f"{self.num_experts}",
            ),
            (
                not 0.0 <= self.router_aux_loss_coef < float("inf"),
                f"router_aux_loss_coef = {self.router_aux_loss_coef} must be a finite number, at "
                "least 0 (0: no load-balancing loss)",
            ),
        )


def _too_large(shape: ModelShape, counts: bool) -> list[tuple[bool, str]]:
    """Return the rules of `problems` about size; `counts`: the number of parameters can be
    counted."""
    params = num_params(shape) if counts and shape.vocab_size <= MOST_TOKENS else 0
    bounds = {"num_layers": MOST_LAYERS, "max_seq_len": MOST_SEQ_LEN, "vocab_size": MOST_TOKENS}
    return [
        *(
            (value > most, f"{key} = {value}, and no model has more than {most}")
            for key, most in bounds.items()
            for value in (getattr(shape, key),)
        ),
        (
            params > MOST_PARAMS,
            f"d_model = {shape.d_model}, d_ff = {shape.ff_width} and num_experts = "
            f"{shape.num_experts}: the model has {params:,} parameters, and at most "
            f"{MOST_PARAMS:,} are planned",
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfShape(ModelShape):
    """Part of a shape on one rank. With tensor parallel the rank has a part of the heads and hidden
    units, with expert parallel a part of the experts, and with both a part of the heads and some
    whole experts.

    Attributes:
        parts: number of ranks with different parts.
        expert_parts: number of ranks with different experts.
    """

    parts: int = 1
    expert_parts: int = 1

    @classmethod
    def of(cls, shape: ModelShape, parts: int, expert_parts: int = 1) -> ModelShape:
        """Return a part of a shape; the parts divide its heads, and its hidden units or experts."""
        if parts == expert_parts == 1:
            return shape
        values = {key: getattr(shape, key) for key in ModelShape.__dataclass_fields__}
        values["num_heads"] = shape.num_heads // parts
        values["num_kv_heads"] = shape.kv_heads // parts
        if not shape.num_experts:  # every part has whole experts
            values["d_ff"] = shape.ff_width // parts
        return cls(**values, parts=parts, expert_parts=expert_parts)

    @property
    def held_experts(self) -> int:
        return self.num_experts // self.expert_parts

    @property
    def head_dim(self) -> int:
        return self.d_model // (self.num_heads * self.parts)


def num_params(shape: ModelShape) -> int:
    """Return the exact number of parameters; a tied embedding counts once."""
    embedding = shape.vocab_size * shape.d_model
    positions = shape.max_seq_len * shape.d_model if shape.positions == "learned" else 0
    head = 0 if shape.tie_embeddings else embedding
    blocks = shape.num_layers * num_block_params(shape)
    return embedding + positions + blocks + _norm_params(shape) + head


def num_active_params(shape: ModelShape) -> int:
    """Return the number of parameters that compute one token: all except the experts not chosen."""
    idle = max(shape.num_experts - shape.experts_per_token, 0)
    return num_params(shape) - shape.num_layers * idle * _mlp_matrix_params(shape)


def num_block_params(shape: ModelShape) -> int:
    """Return the exact number of parameters of one transformer block."""
    of_attention = shape.d_model + 2 * shape.kv_heads * shape.head_dim + shape.d_model
    of_mlp = (2 if shape.mlp == "swiglu" else 1) * shape.ff_width + shape.d_model
    biases = shape.bias * (of_attention + (0 if shape.num_experts else of_mlp))
    matrices = _attention_params(shape) + mlp_params(shape)
    return matrices + biases + 2 * _norm_params(shape)


def mlp_params(shape: ModelShape) -> int:
    """Return the weights of one block's MLP, or of its router and all experts; no biases."""
    return _router_params(shape) + max(shape.held_experts, 1) * _mlp_matrix_params(shape)


def _block_matrix_params(shape: ModelShape) -> int:
    """Return the number of weights of one block that multiply each token."""
    mlps = chosen_experts(shape) * _mlp_matrix_params(shape)
    return _attention_params(shape) + _router_params(shape) + mlps


def chosen_experts(shape: ModelShape) -> int:
    """Return the number of MLPs of one block that compute a token."""
    return shape.experts_per_token if shape.num_experts else 1


def _attention_params(shape: ModelShape) -> int:
    return 2 * shape.d_model * (shape.d_model + shape.kv_heads * shape.head_dim)


def _router_params(shape: ModelShape) -> int:
    return shape.num_experts * shape.d_model


def _mlp_matrix_params(shape: ModelShape) -> int:
    """Return the number of weights of one expert, or of the only MLP."""
    return (3 if shape.mlp == "swiglu" else 2) * shape.d_model * shape.ff_width


def _norm_params(shape: ModelShape) -> int:
    with_bias = shape.norm == "layernorm" and shape.bias
    return shape.d_model * (2 if with_bias else 1)


def flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token: 6·N + 12·L·d·T, without recompute.

    This is the formula of PaLM (arXiv:2204.02311, appendix B), whose 12·L·H·Q·T is 12·L·d·T because
    H·Q = d_model. A matrix multiply costs 2 FLOPs per weight and token in forward and 4 in
    backward; attention multiplies Q by K and the scores by V, 4·d·T in forward. N counts the
    weights of matrix products: the matrices of the blocks and the head (also if tied to the
    embedding), but no embedding lookup, norm or bias, and only the experts chosen for a token.
    Attention is counted in full, not halved for causality.
    """
    matrices = shape.num_layers * _block_matrix_params(shape) + shape.vocab_size * shape.d_model
    return 6.0 * matrices + 12.0 * shape.num_layers * shape.d_model * seq_len


def block_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Return the FLOPs of one block's forward per token; see `flops_per_token`."""
    return 2.0 * _block_matrix_params(shape) + 4.0 * shape.d_model * seq_len


def again_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Return the FLOPs per token of one block's recompute in backward. It omits the MLP's last
    product, because nothing needs its output, except with experts: the router's weights need it."""
    last = 0 if shape.num_experts else shape.ff_width * shape.d_model
    return block_flops_per_token(shape, seq_len) - 2.0 * last


def _gpt(layers: int, d_model: int, heads: int, vocab_size: int) -> ModelShape:
    """Return the architecture of GPT-2, which the ZeRO papers also use."""
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=layers,
        d_model=d_model,
        num_heads=heads,
        max_seq_len=1024,
        positions="learned",
        norm="layernorm",
        mlp="gelu",
        tie_embeddings=True,
        bias=True,
    )


def _zero_offload(layers: int, d_model: int) -> ModelShape:
    """Return one row of Table 3 of ZeRO-Offload (arXiv:2101.06840).

    The table has only layers and hidden size. This assumes heads of width 128 (which gives the 32
    heads of the 10B run in DeepSpeed's tutorial), sequences of 1024 tokens, and GPT-2's vocabulary
    padded to 50304, a multiple of 128.
    """
    return _gpt(layers, d_model, heads=d_model // 128, vocab_size=50304)


_SMALL = {
    # For tests: the smallest model with every part of a real model.
    "debug": ModelShape(vocab_size=256, num_layers=2, d_model=64, num_heads=4, max_seq_len=128),
    # Byte-level, learns Python source in minutes on a CPU.
    "demo": ModelShape(vocab_size=256, num_layers=4, d_model=192, num_heads=6, max_seq_len=256),
}

_GPT2 = {
    "gpt2-124m": _gpt(12, 768, 12, 50257),
    "gpt2-355m": _gpt(24, 1024, 16, 50257),
    "gpt2-774m": _gpt(36, 1280, 20, 50257),
    "gpt2-1.5b": _gpt(48, 1600, 25, 50257),
}

_ZERO_OFFLOAD = {
    "gpt-1b": _zero_offload(20, 2048),
    "gpt-2b": _zero_offload(40, 2048),
    "gpt-4b": _zero_offload(64, 2304),
    "gpt-6b": _zero_offload(53, 3072),
    "gpt-8b": _zero_offload(72, 3072),
    "gpt-10b": _zero_offload(50, 4096),
    "gpt-11b": _zero_offload(55, 4096),
    "gpt-12b": _zero_offload(60, 4096),
    "gpt-13b": _zero_offload(65, 4096),
    "gpt-15b": _zero_offload(78, 4096),
    "gpt-20b": _zero_offload(25, 8192),
    "gpt-40b": _zero_offload(50, 8192),
    "gpt-60b": _zero_offload(75, 8192),
    "gpt-70b": _zero_offload(69, 9216),
}

_LLAMA = {
    # Sheared-LLaMA-1.3B
    "llama-1.3b": ModelShape(
        vocab_size=32000, num_layers=24, d_model=2048, num_heads=16, d_ff=5504, max_seq_len=4096
    ),
    # OpenLLaMA-3B
    "llama-3b": ModelShape(
        vocab_size=32000,
        num_layers=26,
        d_model=3200,
        num_heads=32,
        d_ff=8640,
        max_seq_len=2048,
        norm_eps=1e-6,
    ),
    # Llama-2-7B
    "llama-7b": ModelShape(
        vocab_size=32000, num_layers=32, d_model=4096, num_heads=32, d_ff=11008, max_seq_len=4096
    ),
    # Llama-3-8B
    "llama-8b": ModelShape(
        vocab_size=128256,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        d_ff=14336,
        max_seq_len=8192,
        rope_theta=500000.0,
    ),
    # Llama-2-13B
    "llama-13b": ModelShape(
        vocab_size=32000, num_layers=40, d_model=5120, num_heads=40, d_ff=13824, max_seq_len=4096
    ),
}

SIZES: Mapping[str, ModelShape] = MappingProxyType({**_SMALL, **_GPT2, **_ZERO_OFFLOAD, **_LLAMA})
