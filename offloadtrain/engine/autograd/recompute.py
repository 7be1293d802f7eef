"""Recompute: a block's forward runs again in backward, from its inputs.

[Note: Recompute]
The forward of a repeated module is replaced by one that runs the user's under torch's non-reentrant
checkpoint, which keeps the inputs only and restores torch's random state, so that dropout draws the
same; for other generators see [Note: Random numbers of the second run] in `random_states.py`. The
second run is no module call, so no hook fires. The replacement itself therefore reports the
beginning and end of the module's forward; in the first forward it does so inside the hooks' own
reports. Saved weights stay handles: the engine's hooks are innermost in both runs. Changes that the
first run made to its inputs, and to what its modules keep, are undone for the second one: [Note:
Rewound inputs] in `rewind.py`. Tensors that it wrote there, such as a key-value cache, live until
backward: a warning says so once.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.autograd.hooks import Watcher
from offloadtrain.engine.autograd.passthrough import passthrough
from offloadtrain.engine.autograd.random_states import RandomStates
from offloadtrain.engine.autograd.replaced_forward import ReplacedForward
from offloadtrain.engine.autograd.rewind import BufferChanges, Rewind

_log = logging.getLogger(__name__)


class RecomputeError(OffloadTrainError):
    """A forward cannot run again as it ran."""


class _Runs:
    """A forward: the first call runs it, later calls run it again from the state before.

    Attributes:
        failed: what the first call has raised. It returns instead: some releases of torch (2.9)
            leave checkpoint's hooks on all that follows where the forward inside it raises.
    """

    def __init__(self, run: Callable[..., Any], inputs: Rewind, random: RandomStates) -> None:
        self._run = run
        self._inputs = inputs
        self._random = random
        self._ran = False
        self._modes = 0
        self.failed: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ran:
            was_tracked = self._modes > torch._C._len_torch_dispatch_stack()
            tracked = passthrough() if was_tracked else nullcontext()
            with self._inputs.again(), self._random.again(), tracked:
                return self._run(*args, **kwargs)
        self._ran = True
        self._modes = torch._C._len_torch_dispatch_stack()
        try:
            return self._run(*args, **kwargs)
        except BaseException as error:
            self.failed = error


class Written:
    """Warns once for a model of the bytes that a layer writes into its inputs."""

    def __init__(self) -> None:
        self._looked = False

    def look(self, before: Rewind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the inputs after the first forward of the first layer."""
        if self._looked:
            return
        self._looked = True
        known = {id(tensor) for tensor in before.tensors()}
        new = [tensor for tensor in Rewind(args, kwargs).tensors() if id(tensor) not in known]
        if new:
            _log.warning(
                "a layer has written %s into its inputs, which is held until backward though its "
                "activations are not: if that is a key-value cache, call the model with "
                "use_cache=False",
                format_bytes(sum(tensor.nbytes for tensor in new)),
            )


class Recomputed(ReplacedForward):
    """Stands in for a forward that runs again in backward."""

    def __init__(
        self, module: nn.Module, watcher: Callable[[], Watcher | None], written: Written
    ) -> None:
        # torch's checkpoint reads a setting of the compiler, whose import takes seconds. Inside of
        # the first forward an error that it catches would keep the forward's frames, and with them
        # its hidden states and logits, until Python collects garbage.
        importlib.import_module("torch._dynamo")

        super().__init__(module)
        self._written = written
        self._watcher = watcher
        self._changes = BufferChanges()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        if self._module._compiled_call_impl is not None:
            raise RecomputeError(
                f"a {type(self._module).__name__} that runs again in backward was compiled by "
                "module.compile(), of which torch's checkpoint would leave nothing: leave that "
                "out, and give offload(compile_blocks=True), or set module.forward = "
                "torch.compile(module.forward) before it"
            )
        modules = list(self._module.modules())
        inputs = Rewind(args, kwargs, modules)
        random = RandomStates(modules, (*args, *kwargs.values()))
        run = _Runs(self._run, inputs, random)
        copies = self._changes.copies(modules)
        output = checkpoint(run, *args, use_reentrant=False, **kwargs)
        if run.failed is not None:
            try:
                raise run.failed
            finally:
                run.failed = None  # its traceback holds this frame: a cycle, of activations too
        random.forget_unused()
        inputs.copies = self._changes.changed(copies)
        self._written.look(inputs, args, kwargs)
        return output

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        watcher = self._watcher()
        if watcher is None:
            return self._original(*args, **kwargs)
        # In backward this is what makes compute wait for the block's weights and pins its slot.
        watcher.enter(self._module, again=True)
        try:
            return self._original(*args, **kwargs)
        finally:
            watcher.leave(self._module)
