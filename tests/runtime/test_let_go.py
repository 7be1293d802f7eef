"""Process groups of an optimizer that nobody closed: gone with the world, and not before."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import offloadtrain as ot
from offloadtrain.runtime.process_group import Ranks


@pytest.mark.parametrize("world", [False, True])
def test_groups_go_when_the_world_is_gone(world: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = [object()]
    monkeypatch.setattr(Ranks, "let_go", _watched(groups))
    optimizer = ot.offload(nn.Linear(4, 4), device="cpu")
    monkeypatch.setattr(dist, "is_initialized", lambda: world)
    optimizer._release.finalizer()  # as at the end of the process
    assert bool(groups) == world


def _watched(groups: list[Any]) -> Any:
    let_go = Ranks.let_go

    def watched(ranks: Ranks) -> None:
        ranks._groups, ranks._of_some = groups, True  # nothing for torch to destroy
        let_go(ranks)

    return watched
