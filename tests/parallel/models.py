"""Small models that ranks divide, how they divide them, and the batches that these train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import offloadtrain as ot
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.loss import cross_entropy
from offloadtrain.model.transformer import Transformer
from offloadtrain.parallel.tensor import transformers_plan
from offloadtrain.parallel.tensor.own_model import divide_matrices

VOCABULARY, WIDTH, HEAD = 64, 32, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))

    def project(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values of this rank's heads: (B, heads, T, HEAD)."""
        shape = (*x.shape[:2], -1, HEAD)
        return [linear(x).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v)]


class Layer(nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Passes over the modules that other stages hold."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def columns_and_rows() -> dict[str, Any]:
    """Megatron-LM's plan: columns of the matrices into heads and hidden units, rows of the rest."""
    columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
    rows = ("attention.o", "down")
    return dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())


def sequence_parallel() -> dict[str, Any]:
    """Between the matrices each rank has a part of the sequence, which its norms work on."""
    into: dict[str, Any] = dict.fromkeys(("norm", "mlp_norm"), SequenceParallel())
    into["attention"] = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    columns = dict.fromkeys(("gate", "up"), ColwiseParallel(input_layouts=Shard(1)))
    rows = dict.fromkeys(("attention.o", "down"), RowwiseParallel(output_layouts=Shard(1)))
    return into | columns_and_rows() | columns | rows


def outside_of_layers() -> dict[str, Any]:
    """Embedding and head in parts of the vocabulary."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def divide_llama(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> None:
    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh, sequence_parallel() if sequence else columns_and_rows())
    if sequence:
        parallelize_module(model, mesh, outside_of_layers())


GPT = ModelShape(
    vocab_size=64,
    num_layers=8,
    d_model=32,
    num_heads=2,
    max_seq_len=16,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    bias=True,
)
EXPERTS = ModelShape(
    vocab_size=61,
    num_layers=2,
    d_model=32,
    num_heads=2,
    d_ff=48,
    max_seq_len=16,
    num_experts=4,
    router_aux_loss_coef=0.01,
)
DEEP_EXPERTS = replace(EXPERTS, num_layers=4, router_aux_loss_coef=0.0)
MANY_EXPERTS = replace(DEEP_EXPERTS, num_experts=8, experts_per_token=1)


def gpt(shape: ModelShape = GPT, *, checkpointed: bool = False) -> Transformer:
    """
    Args:
        checkpointed: layers run again in backward by a checkpoint of their own.
    """
    model = Transformer(shape, seed=1)
    for layer in model.blocks if checkpointed else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def with_experts(shape: ModelShape = EXPERTS) -> Transformer:
    """Weights large enough that every expert matters."""
    torch.manual_seed(0)
    model = Transformer(shape)
    for name, param in model.named_parameters():
        nn.init.normal_(param, 1.0 if "norm" in name else 0.0, 0.15)
    return model


def with_one_choice() -> Transformer:
    """Every token goes to the first expert: other ranks get no row, and send what they have."""
    model = with_experts(replace(EXPERTS, experts_per_token=1, router_aux_loss_coef=0.0))

    def check(_: nn.Module, inputs: Any) -> None:
        assert int(inputs[1][0]) == 24, "all tokens of a batch"

    first = torch.tensor([9.0, 0.0, 0.0, 0.0])
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda _, inputs, logits: logits + first)
        block.mlp.experts.register_forward_pre_hook(check)
    return model


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(4)


class RoutedLayer(nn.Module):
    """A layer with a list of experts: in some microbatches a rank uses all of them, in others one
    of them. Its first addition waits for no weight, so that its last gradient is that of a
    vector."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(WIDTH))
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        x = self.router(x + self.before)
        used = self.experts if (turn + dist.get_rank()) % 2 else [self.experts[turn % 3]]
        for expert in used:
            x = x + torch.tanh(expert(x))
        return x


class PartlyUsed(nn.Module):
    """Five such layers; passes over the modules that other stages hold."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.reentrant = reentrant
        self.turn = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x, turn = tokens if self.embed is None else self.embed(tokens), self.turn
        self.turn += 1
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, turn)
            else:
                x = checkpoint(layer, x, turn, use_reentrant=self.reentrant)
        return x if self.head is None else self.head(x)


def partly_used() -> PartlyUsed:
    torch.manual_seed(3)
    return PartlyUsed()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x))) / (1 + number)
        return out


class ComputesOutside(nn.Module):
    """A forward that does something outside of its layers: what, `operation` says."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.operation, self.dropout = operation, nn.Dropout(0.5)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        operation = self.operation
        if self.embed is not None:
            x = self.embed(x)
        if operation == "scale":
            x = x * 3.0
        if operation == "scale in place":
            x.mul_(3.0)
        if operation == "dropout":
            x = self.dropout(x)
        for _ in range(2 if operation == "twice" else 1):
            for number, layer in enumerate(self.layers):
                x = layer(x, number if operation == "number" else 0)
                x = x / 2 if operation == "between" else x.view(-1, 8)
        if operation == "cap":
            x = torch.tanh(x)
        if operation == "transposed" and self.head is None:
            x = x.t().contiguous().t()
        if self.head is None:
            return x
        out = self.head(x)
        return (out, x) if operation == "pair" else out


def residual_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(4)))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def pair_squares(output: Any, target: Tensor) -> Tensor:
    return squares(output[0], target) + 0.1 * squares(output[1], target)


HF_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""Processes draw from torch's generator each for itself."""
HF_MORE: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "GPT2": {"n_inner": 64},
}


def decoder(kind: str, **more: Any) -> Any:
    """A causal language model of transformers. Gemma 2 and 3 have layers of two kinds, whose order
    depends on their numbers."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**HF_SIZES | more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def divide_by_hand(model: Any, mesh: DeviceMesh) -> None:
    """Divide a model of transformers by torch's styles, as docs/ranks.md says."""
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = model.config.base_model_tp_plan.items()
    of_layer = {name.removeprefix("layers.*."): styles[style]() for name, style in plan}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, of_layer)


@dataclass(frozen=True)
class Kind:
    """A model and its batches.

    Attributes:
        divide: divides its matrices.
        vocabulary: 0: it takes vectors of floats instead of tokens.
        microbatches: of each step, of so many rows of this length.
        by_hand: torch's styles divide it, whose parts are no ranges of the whole.
    """

    make: Callable[[], Any]
    divide: Callable[[Any, DeviceMesh], None] = divide_matrices
    loss: Callable[..., Tensor] = token_loss
    vocabulary: int = VOCABULARY
    microbatches: int = 4
    rows: int = 2
    length: int = 16
    by_hand: bool = False

    def example(self, rows: int) -> Tensor:
        if self.vocabulary:
            return torch.zeros(rows, self.length, dtype=torch.int64)
        return torch.zeros(rows, self.length)

    def batch(self, step: int, replica: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all microbatches of a step."""
        generator = torch.Generator().manual_seed(100 * step + replica)
        size = (self.microbatches * self.rows, self.length + 1)
        if not self.vocabulary:
            inputs, target = torch.randn(2, size[0], self.length, generator=generator)
            return inputs, target
        tokens = torch.randint(0, self.vocabulary, size, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _transformers(name: str, **more: Any) -> Kind:
    sizes = NO_DROPOUT | HF_MORE.get(name, {}) | more
    by_hand = name in ("Llama", "Qwen2", "Gemma2")  # others by the plan that each brings along
    divide = divide_by_hand if by_hand else transformers_plan.divide
    return Kind(partial(decoder, name, **sizes), divide, by_hand=by_hand)


_SPARSE = {"vocabulary": 61, "rows": 1, "length": 5, "microbatches": 2}
"""Few tokens, which many experts do not get."""
_FLOATS: dict[str, Any] = {"vocabulary": 0, "length": 8}

KINDS: dict[str, Kind] = {
    "gpt": Kind(gpt),
    "gpt, experts": Kind(partial(gpt, replace(GPT, num_experts=4, router_aux_loss_coef=0.0))),
    "gpt, checkpointed": Kind(partial(gpt, checkpointed=True)),
    "llama": Kind(llama, divide_llama, by_hand=True),
    "llama, sequence": Kind(llama, partial(divide_llama, sequence=True), by_hand=True),
    "experts": Kind(with_experts, vocabulary=61, length=12, microbatches=1),
    "one choice": Kind(with_one_choice, vocabulary=61, length=12, microbatches=1),
    "one layer of experts": Kind(
        partial(with_experts, replace(EXPERTS, num_layers=1)),
        vocabulary=61,
        length=12,
        microbatches=1,
    ),
    "deep experts": Kind(partial(with_experts, DEEP_EXPERTS), vocabulary=61, microbatches=2),
    "many experts": Kind(partial(with_experts, MANY_EXPERTS), **_SPARSE),
    "two experts": Kind(
        partial(with_experts, replace(MANY_EXPERTS, num_experts=2)),
        **_SPARSE | {"length": 1, "microbatches": 1},
    ),
    "partly used": Kind(partly_used, length=8),
    "layers": Kind(residual_layers, loss=squares, **_FLOATS),
    "between": Kind(partial(ComputesOutside, "between"), loss=squares, **_FLOATS),
    "pair": Kind(partial(ComputesOutside, "pair"), loss=pair_squares, **_FLOATS),
    **{
        name: _transformers(name)
        for name in ("Llama", "Gemma2", "Gemma3Text", "GPT2", "GPTNeoX", "Mistral", "Mixtral")
    },
    **{
        f"{name}, shallow": _transformers(name, num_hidden_layers=3)
        for name in ("Gemma2", "GPT2", "Llama", "Mixtral", "Olmo2", "Phi3", "Qwen2")
    },
    "sparse Mixtral": replace(
        _transformers("Mixtral", num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=1),
        **_SPARSE,
    ),
}


def divide(kind: Kind, model: Any, mesh: DeviceMesh) -> None:
    """Divide matrices along the axis "tp" of the mesh, and experts along "ep"."""
    axes = mesh.mesh_dim_names or ()
    if "tp" in axes and mesh["tp"].size() > 1:
        kind.divide(model, mesh["tp"])
    if "ep" in axes:
        ot.expert_parallel(model, mesh)
