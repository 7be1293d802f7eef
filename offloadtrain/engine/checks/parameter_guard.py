"""Detects that somebody else changes an offloaded model's parameters."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_

from torch import nn

from offloadtrain.engine.checks.model_checks import MOVED, ModelError, changed
from offloadtrain.engine.local_part import local

_Seal = tuple[int, int, bool]


class ParameterGuard:
    """Detects parameters that were written, moved, frozen or added outside the engine.

    The engine writes through flat buffers, which changes neither a parameter's version counter nor
    its address; any other write changes one of them.
    """

    def __init__(self, model: nn.Module, moving: Collection[nn.Parameter] = ()) -> None:
        """`moving`: parameters whose address the engine changes, those of streamed blocks."""
        self._model = model
        self._moving = set(map(id, moving))
        self._names = [name for name, _ in model.named_parameters()]
        self._params = list(model.parameters())
        self._walked = _parameters(model)
        self._seals = [self._seal(param) for param in self._params]

    def written(self) -> list[nn.Parameter]:
        """Return the parameters whose values were written by others since the last renewal."""
        pairs = zip(self._params, self._seals, strict=True)
        return [param for param, seal in pairs if _version(param) != seal[0]]

    def renew(self) -> None:
        """Accept the values as they are."""
        self._seals = [self._seal(param) for param in self._params]

    def _seal(self, param: nn.Parameter) -> _Seal:
        address = 0 if id(param) in self._moving else local(param).data_ptr()
        return (_version(param), address, param.requires_grad)

    def check(self) -> None:
        """Raises ModelError naming the first parameter that others have changed."""
        walked = _parameters(self._model)
        same = len(walked) == len(self._walked) and all(map(is_, walked, self._walked))
        if not same or [self._seal(param) for param in self._params] != self._seals:
            self._raise()

    def _raise(self) -> None:
        current = list(self._model.parameters())
        if len(current) != len(self._params):
            raise ModelError(
                f"the model has {len(current)} parameters, {len(self._params)} when it "
                "was offloaded: "
                "close() the optimizer and offload the changed model"
            )
        for name, param, now, seal in zip(
            self._names, self._params, current, self._seals, strict=True
        ):
            if now is not param or self._seal(param) != seal:
                raise ModelError(_describe(name, now is param, param, seal))


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the model's parameters once each, module by module. Every step calls it; it is faster
    than `model.parameters()`, with a generator per level and a name for each."""
    # By id: a tensor's own hash is a function of Python.
    params: dict[int, nn.Parameter | None] = {}
    modules, visited = [model], {id(model)}
    # The list grows while it is walked.
    for module in modules:
        for param in module._parameters.values():
            params[id(param)] = param
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                modules.append(child)
    return [param for param in params.values() if param is not None]


def _version(param: nn.Parameter) -> int:
    """Count the writes into a parameter; of a DTensor also those into its part
    (`to_local().copy_(…)`), which are those into itself, too."""
    part = local(param)
    return part._version + (param._version if part is not param else 0)


def _describe(name: str, same: bool, param: nn.Parameter, seal: _Seal) -> str:
    version, _, trainable = seal
    if not same:
        what = "was replaced by another object"
    elif param.requires_grad != trainable:
        what = "was frozen" if trainable else "was unfrozen"
    elif _version(param) == version:
        what = MOVED
    else:
        what = f"was written in place ({_version(param) - version} time(s))"
    return changed(name, what)
