"""The comparison of ranks after an evaluation.

[Note: Evaluation in ZeRO stage 3]
In stage 3 a forward gathers weights. Collectives are matched by their order: if a rank takes
another path through the model, each rank gets weights pieced together from two modules, and
computes with them. In training `step()` compares the launched collectives; no step follows the last
evaluation. So every forward of the model without gradients ends with an exchange of a few bytes.
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

    The wrapper imports the compiler at its first call, which takes over a second. If the compiler
    was not imported, nothing is compiled, and the wrapper is not needed.
    """
    return function if "torch._dynamo" in sys.modules else inspect.unwrap(function)


class _AfterForward(OfOneModel):
    """Not called if forward raises: the other ranks then fail in their gathers."""

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
    # Waits for the other ranks to launch the same gathers, not for the gathers.
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
    """Compare the ranks after every forward without gradients, if forwards gather weights."""
    if not engine.residency.gathers:
        return []
    return [model.register_forward_hook(_AfterForward(engine.functions, ranks))]
