"""Small models whose shapes are the ones that break naive engines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.transformer import Transformer

WIDTH = 24
VOCAB = 37


class Layer(nn.Module):
    """Norm, MLP and residual; 37 and 24 make sure that nothing is a multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, VOCAB)
        self.down = nn.Linear(VOCAB, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, depth: int = 3, *, tied: bool = False, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(x))


class Unusual(nn.Module):
    """Weights read without calling their module, used through detach(), used twice, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.twice = Layer()
        self.experts = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0))
        self.turn = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        attended, _ = self.attention(x, x, x, need_weights=False)
        x = self.twice(self.twice(x + attended))
        x = self.experts[self.turn % 2](x)  # the third is never used
        self.turn += 1
        x = x + F.linear(x, self.twice.down.weight.detach() @ self.twice.up.weight.detach())
        return F.linear(x * self.scale, self.embed.weight)


class Frozen(Chain):
    """Every other layer frozen, and one bias inside a trained layer."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[0].requires_grad_(False)
        self.layers[2].up.bias.requires_grad_(False)


class SharedLayer(nn.Module):
    """One layer entered three times, in a container of length one (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.embed = nn.Embedding(VOCAB, WIDTH)  # registered after it is used
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.layers[0](x)
        return self.head(x)


class MixedReentrant(nn.Module):
    """A weight used inside a reentrant recompute and outside: it delivers twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.layers[0], x, use_reentrant=True)
        x = self.layers[1](x)
        x = self.layers[0](x)
        return self.head(x)


class PartlyUsed(Chain):
    """Blocks in which some parameters get no gradient, behind blocks of the same size that do."""

    def __init__(self) -> None:
        super().__init__(4)
        for index, layer in enumerate(self.layers):
            layer.spare = nn.Linear(WIDTH, WIDTH)
            layer.uses_spare = index % 2 == 1
            # Registered first, so that what is missing lies in front of what is there.
            layer._modules = {"early": nn.Linear(WIDTH, WIDTH), **layer._modules}
            layer.uses_early = index in (0, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer.early(x) if layer.uses_early else x
            x = layer(layer.spare(x) if layer.uses_spare else x)
        return self.head(self.norm(x))


class Detached(Chain):
    """A layer's weights are read through detach() before the layer runs: in backward after its
    gradient is complete."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        first = self.layers[0]
        x = x + F.linear(F.linear(x, first.up.weight.detach()), first.down.weight.detach())
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class TwoHeads(Chain):
    """One trunk, two heads whose logits are added; the second head sees a middle layer too."""

    def __init__(self) -> None:
        super().__init__(3)
        self.other = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        middle = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            middle = x if index == 1 else middle
        return self.head(self.norm(x)) + self.other(middle) + self.other(x)


class Skipping(Chain):
    """All layers on even turns, none on odd ones."""

    turn = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.turn % 2 == 0:
            for layer in self.layers:
                x = layer(x)
        self.turn += 1
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Blocks that return a tensor and a term of the loss; weights of three axes, of which a token
    uses some."""

    def __init__(self) -> None:
        super().__init__()
        shape = ModelShape(
            vocab_size=VOCAB,
            num_layers=3,
            d_model=WIDTH,
            num_heads=2,
            d_ff=40,
            max_seq_len=16,
            num_experts=5,
        )
        self.gpt = Transformer(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens[:, :-1], tokens[:, 1:])


MODELS = {
    "chain": Chain,
    "tied": lambda: Chain(tied=True),
    "recompute": lambda: Chain(recompute="plain"),
    "reentrant": lambda: Chain(recompute="reentrant"),
    "unusual": Unusual,
    "partly used": PartlyUsed,
    "frozen": Frozen,
    "shared": SharedLayer,
    "skipping": Skipping,
    "two heads": TwoHeads,
    "detached": Detached,
    "experts": Experts,
}


def batches(count: int, seed: int = 0) -> list[Tensor]:
    """Token batches of shape (3, 11)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (3, 11), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy in fp32, or the model's own loss."""
    if isinstance(model, Experts):
        return model.loss(tokens)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
