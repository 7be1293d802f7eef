"""The comparison of ranks after an evaluation.

[Note: Evaluation in ZeRO stage 3]
A forward gathers weights there. Collectives are matched by their order: where one rank takes
another path through the model, each gets weights pieced together from two modules, and computes
with them. In training `step()` compares what was launched; no step follows the last evaluation. So
every forward of the model without gradients ends with a few bytes of each rank.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.autograd.hooks import OfOneModel
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.interpreter import Functions
from offloadtrain.runtime.process_group import RankError, Ranks

Args = ParamSpec("Args")
Found = TypeVar("Found")


def eager(function: Callable[Args, Found]) -> Callable[Args, Found]:
    """Return the function without the wrapper that hides it from torch's compiler.

    The wrapper imports the compiler at its first call, which takes over a second. Where nobody has
    imported it, nothing is compiled, and there is nothing to hide from.
    """
    return function if "torch._dynamo" in sys.modules else inspect.unwrap(function)


class _AfterForward(OfOneModel):
    """Not called where forward raises: the other ranks learn of that from their gathers."""

    __slots__ = ("_functions", "_ranks")

    def __init__(self, functions: Functions, ranks: Ranks) -> None:
        self._functions = weakref.ref(functions)
        self._ranks = ranks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        functions = self._functions()
        if functions is not None and not torch.is_grad_enabled():
            eager(_compare)(functions, self._ranks)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _compare(functions: Functions, ranks: Ranks) -> None:
    # Waits for the other ranks, which have launched the same gathers; not for the gathers.
    digests = ranks.all_gather_host([functions.digests.take_collectives()])
    for rank, digest in enumerate(digests[:, 0]):
        if digest != digests[0, 0]:
            raise RankError(
                f"ranks disagree in an evaluation: rank {rank} has gathered the weights of other "
                "modules than rank 0, or in another order, so that neither has the right result. "
                "With zero_stage = 3 every rank must take the same path through the model: drop or "
                "pad incomplete batches, or name a module that only some use in keep_whole"
            )


def check_evaluations(model: nn.Module, engine: Engine, ranks: Ranks) -> list[RemovableHandle]:
    """Compare the ranks after every forward without gradients, where forwards gather."""
    if not engine.residency.gathers:
        return []
    return [model.register_forward_hook(_AfterForward(engine.functions, ranks))]
