"""A model and host state as a checkpoint asks for them, without the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offloadtrain.engine.saved_state import FlatState, OwnState, Piece, StateWriter, whole
from offloadtrain.runtime.process_group import Extent, Ranks

KINDS = ("master", "exp_avg", "exp_avg_sq")


class ToyModel(torch.nn.Module):
    """Two trained layers, a frozen one, a persistent and another buffer, an empty weight."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, 3, bias=False)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(5), persistent=False)


class ToyState:
    """Host tensors per trained parameter, as `OffloadedState`. Of several ranks each holds all of
    them, and writes its share."""

    def __init__(self, model: torch.nn.Module, rank: int = 0, num_ranks: int = 1) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self.ranks = Ranks()
        self.ranks.rank = rank
        self.param_groups: list[dict[str, Any]] = [{"lr": 1e-3}]
        self.tensors = {
            name: {kind: torch.zeros(param.shape) for kind in KINDS}
            for name, param in model.named_parameters()
            if param.requires_grad
        }

    @property
    def saves_untrained(self) -> bool:
        return self._rank == 0

    def extents(self) -> dict[str, Extent]:
        shapes = {name: tensors["master"].shape for name, tensors in self.tensors.items()}
        return {name: Extent(tuple(shape), 0, shape.numel()) for name, shape in shapes.items()}

    def flat_states(self) -> list[FlatState]:
        return [
            FlatState(name, kind, "float32", hi - lo, (_piece(name, x, lo, hi),))
            for name, tensors in self.tensors.items()
            for kind, x in tensors.items()
            for lo, hi in [self._share(x)]
        ]

    def write_state(self, writer: StateWriter) -> None:
        for name, tensors in self.tensors.items():
            writer.write(name, whole(x.view(-1)[slice(*self._share(x))] for x in tensors.values()))
        writer.finish()

    def _share(self, x: torch.Tensor) -> tuple[int, int]:
        """Return the elements that this rank writes."""
        cuts = [x.numel() * rank // self._num_ranks for rank in range(self._num_ranks + 1)]
        return cuts[self._rank], cuts[self._rank + 1]

    def finish_writing(self) -> None:
        """Everything was written by `write_state`."""

    def own_states(self) -> dict[str, list[OwnState]]:
        return {
            name: [
                OwnState(
                    tensors["master"].stride(),
                    0,
                    tensors["master"].numel(),
                    {kind: (tensor.view(-1), 1) for kind, tensor in tensors.items()},
                )
            ]
            for name, tensors in self.tensors.items()
        }

    def own_weights(self) -> dict[str, list[OwnState]]:
        return {}

    def load_named_state(
        self, name: str, state: Mapping[str, torch.Tensor], *, lo: int | None = None
    ) -> None:
        assert lo is None
        for kind, tensor in state.items():
            self.tensors[name][kind].copy_(tensor)


def _piece(name: str, values: torch.Tensor, lo: int, hi: int) -> Piece:
    return Piece(name, tuple(values.shape), values.stride(), lo, hi, 0, hi - lo)


def filled(
    step: int, width: int = 8, *, rank: int = 0, num_ranks: int = 1
) -> tuple[ToyModel, ToyState]:
    """Return a model and state whose every value follows from `step`."""
    model = ToyModel(width)
    state = ToyState(model, rank, num_ranks)
    generator = torch.Generator().manual_seed(step)
    for tensors in state.tensors.values():
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model.seen.fill_(step)
    torch.nn.init.constant_(model.frozen.weight, step + 0.5)
    return model, state


def same(state: ToyState, other: ToyState) -> bool:
    return all(
        torch.equal(state.tensors[name][kind], other.tensors[name][kind])
        for name in state.tensors
        for kind in KINDS
    )
