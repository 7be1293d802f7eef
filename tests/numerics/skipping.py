"""Models with experts that some steps leave unused, and the resident loop that skips these: plain
torch with a parameter per expert, whose `.grad` is None where it got no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.reference import ResidentRun

WIDTH, HIDDEN, EXPERTS, VOCAB = 16, 128, 4, 24
PATTERNS = ("*.stacked.*", "*.separate.*")


class Stacked(nn.Module):
    """All experts in tensors, as in the shipped transformer, and their biases in a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 16)

    def forward(self, rows: Tensor, expert: int) -> Tensor:
        return F.linear(
            F.gelu(F.linear(rows, self.up[expert], self.bias[expert])), self.down[expert]
        )


class RoutedLayer(nn.Module):
    """A token goes to the expert of its number, of both kinds."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.stacked = Stacked()
        self.separate = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.hits: set[tuple[int, int]] = set()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        normed, out = self.norm(x), torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows = (tokens + self.number) % EXPERTS == expert
            if rows.any():
                self.hits.add((self.number, expert))
                output = self.stacked(normed[rows], expert) + self.separate[expert](normed[rows])
                out[rows] = output
        return x + out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(RoutedLayer(number) for number in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.head(x)

    def take_hits(self) -> set[str]:
        """Return the names of what was used since the last call."""
        result: set[str] = set()
        for layer in self.layers:
            for number, expert in layer.hits:
                at = f"layers.{number}"
                result |= {f"{at}.stacked.{name}[{expert}]" for name in ("up", "bias", "down")}
                result |= {f"{at}.separate.{expert}.{name}" for name in ("weight", "bias")}
            layer.hits.clear()
        return result


def batches(count: int, seed: int = 0) -> list[Tensor]:
    """Token batches of shape (2, 7), each with tokens of two experts of four."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for number in range(count):
        drawn = torch.randint(VOCAB // EXPERTS, (2, 7), generator=generator) * EXPERTS
        pair = torch.randint(2, (2, 7), generator=generator)
        result.append(drawn + (number // 2 + pair * (1 + number % 3)) % EXPERTS)
    return result


class SkippingRun(ResidentRun):
    """As `ResidentRun`, with a master for each expert; unused ones have no gradient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys = {
            name: [f"{name}[{expert}]" for expert in range(len(param))]
            if "stacked" in name
            else [name]
            for name, param in self.trained.items()
        }
        full = self.masters  # `ResidentRun` has rounded the parameters
        self.masters = {
            key: self._master(part)
            for name, param in self.trained.items()
            for key, part in zip(
                self.keys[name], self._parts(name, full[name][: param.numel()]), strict=True
            )
        }
        self.adam = self.optimizer_of(
            [
                {"params": [master], "lr": self.lr, "weight_decay": self.weight_decay}
                for master in self.masters.values()
            ]
        )
        self.used: set[str] = set()

    def _parts(self, name: str, values: Tensor) -> Sequence[Tensor]:
        """The flat values of each of the parameter's experts."""
        return values.detach().reshape(len(self.keys[name]), -1).unbind()

    def step(
        self, batches: Sequence[object], loss_of: Callable[[nn.Module, object], Tensor]
    ) -> list[float]:
        self.model.take_hits()
        return super().step(batches, loss_of)

    def apply(self, sums: dict[str, Tensor], used: set[str] | None = None) -> None:
        self.used = self.model.take_hits() if used is None else used
        super().apply(sums)

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        for name in self.trained:
            parts = self._parts(name, sums[name].reshape(-1) * factor)
            for key, grad in zip(self.keys[name], parts, strict=True):
                master, expert = self.masters[key], "stacked" in name or "separate" in name
                is_used = not expert or key in self.used
                padded = F.pad(grad, (0, master.numel() - grad.numel()))
                master.grad = padded if is_used else None
        self.adam.step()
        for name, param in self.trained.items():
            param.data.copy_(self.master(name))

    def master(self, name: str) -> Tensor:
        return self._joined(name, lambda key: self.masters[key].detach())

    def moment(self, name: str, key: str) -> Tensor:
        def of(item: str) -> Tensor:
            master = self.masters[item]
            return self.adam.state[master].get(key, torch.zeros_like(master))

        return self._joined(name, of)

    def steps(self, name: str) -> list[int]:
        return [int(self.adam.state[self.masters[k]].get("step", 0)) for k in self.keys[name]]

    def _joined(self, name: str, of: Callable[[str], Tensor]) -> Tensor:
        param = self.trained[name]
        each = param.numel() // len(self.keys[name])
        return torch.cat([of(key)[:each] for key in self.keys[name]]).view(param.shape)
