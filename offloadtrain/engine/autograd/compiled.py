"""Layers that torch compiles, and what their backward recomputes.

[Note: Compiled recompute]
The compiler sees forward and backward of a layer together and partitions them: what it does not
save, backward recomputes, fused with the gradients. So a layer that compiles to a single graph
needs no second run ("recompute", which works for any layer, runs the compiled layer again). The
compiler's partitioner has a budget: a share of the memory that it would save without a budget; 0
saves the layer's inputs only. `BudgetedBackend` sets the budget for its own graphs only.

torch's partitioner treats most operations that draw random numbers (`bernoulli`, inductor's
seeds) as recomputable: backward would use the gradient of another dropout mask. So their results
are marked to be saved. At a budget of 0 torch saves inputs only, marked or not; at a
budget just above 0 it respects the marks. torch's cache key of compiled code contains the budget
but not the marks: each budget below 1 is therefore slightly above the requested value, which no
other code uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from offloadtrain.engine.autograd.hooks import ReplacedForward
from offloadtrain.engine.autograd.selective import draws
from offloadtrain.runtime.heartbeat import HEARTBEAT

_NOT_WHOLE = (
    "offloadtrain: what a compiled layer saves can be limited only where torch compiles its "
    "forward as one graph. Set activation = 'recompute', which runs the compiled layer again, or "
    "'keep'"
)

CODE_GENERATOR = "inductor"
"""torch's name of the backend that generates code for the partitioned graphs."""

_BUDGET_EPSILON = 1e-9


@dataclass(frozen=True)
class BudgetedBackend:
    """A backend of `torch.compile` whose graphs save no more than a budget.

    Equal backends share compiled code: all layers of a list, of every engine.

    Attributes:
        budget: share of the memory that torch would save without a budget, from 0 to 1.
    """

    budget: float

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend  # here: imports the compiler

        with self._patched_partitioner():
            return lookup_backend(CODE_GENERATOR)(graph, inputs)

    @contextmanager
    def _patched_partitioner(self) -> Iterator[None]:
        from torch._functorch import config as functorch
        from torch._functorch import partitioners

        original = partitioners.choose_saved_values_set

        def choose_with_draws(joint_graph: Any, *args: Any, **kwargs: Any) -> Any:
            for node in joint_graph.nodes:
                if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return original(joint_graph, *args, **kwargs)

        partitioners.choose_saved_values_set = choose_with_draws
        try:
            with functorch.patch(activation_memory_budget=min(self.budget + _BUDGET_EPSILON, 1.0)):
                yield
        finally:
            partitioners.choose_saved_values_set = original


class CompiledForward(ReplacedForward):
    """A module's forward that `torch.compile` compiles at its first call.

    The module's call is not compiled: hooks stay outside, and all equal layers share compiled code.
    """

    def __init__(self, module: nn.Module, budget: float | None) -> None:
        """`budget`: see [Note: Compiled recompute]; None leaves torch's default, no budget."""
        super().__init__(module)
        # torch's name for this attribute, by which other code detects a compiled forward.
        self._torchdynamo_orig_callable = module.forward
        options: dict[str, Any] = {}
        if budget is not None:
            # A budget applies per graph: a layer in several graphs would save more, without notice.
            options = {"backend": BudgetedBackend(budget), "fullgraph": True}
        self._compiled = torch.compile(module.forward, **options)
        self._has_budget = budget is not None
        _pause_watchdog_while_compiling()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if self._has_budget and type(error).__module__ == "torch._dynamo.exc":
                error.add_note(_NOT_WHOLE)
            raise


def _pause_watchdog_while_compiling() -> None:
    """Keep the watchdog from reporting a hang while torch compiles, which takes up to a minute."""
    # Imported here: the compiler takes over a second to import.
    from torch._dynamo.callback import callback_handler

    if _on_compile_start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_on_compile_start)
        callback_handler.register_end_callback(_on_compile_end)


def _on_compile_start(*_: object) -> None:
    HEARTBEAT.held_up = True


def _on_compile_end(*_: object) -> None:
    HEARTBEAT.held_up = False
