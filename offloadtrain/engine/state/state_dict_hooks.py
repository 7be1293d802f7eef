"""Hooks of the offloaded model that save and load its state dicts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.autograd.hooks import OfOneModel
from offloadtrain.engine.local_part import local


class WeightsOwner(Protocol):
    """The methods of the optimizer that the hooks call."""

    def synchronize(self) -> None: ...
    def expect_weights(self, values: Mapping[str, Tensor]) -> None: ...
    def adopt_written_weights(self) -> None: ...
    def require_whole_weights(self) -> None: ...


class _StateDictHook(OfOneModel):
    """Refers to the optimizer weakly, and to its engine strongly: that of an optimizer that is
    dropped in a reference cycle must outlive it, to give the model its weights back."""

    __slots__ = ("_engine", "_from_public_api", "_owner")

    def __init__(self, owner: WeightsOwner, engine: object) -> None:
        self._owner = weakref.ref(owner)
        self._engine = engine


class _WaitBeforeSaving(_StateDictHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        owner = self._owner()
        # torch reads the parameters next, without a forward whose hooks would wait for uploads.
        if owner is not None:
            owner.require_whole_weights()
            owner.synchronize()


class _CopyToHost(_StateDictHook):
    """A state dict of host copies: views of a flat buffer would be saved with all of it."""

    __slots__ = ()

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        # Tied names share one copy.
        copies: dict[tuple[int, torch.Size], Tensor] = {}
        for name, value in state_dict.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad:
                # A DTensor itself has no memory, and address 0.
                key = (local(value).data_ptr(), value.shape)
                # Always a copy: the next upload writes the memory that the parameter views.
                if key not in copies:
                    copies[key] = value.detach().to("cpu", copy=True)
                state_dict[name] = copies[key]


class _AdoptAfterLoading(_StateDictHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        owner = self._owner()
        if owner is not None:
            owner.adopt_written_weights()


class _WaitBeforeLoading(_StateDictHook):
    """A late upload would overwrite what is loaded; masters take the values as they are given."""

    __slots__ = ()

    def __call__(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        owner = self._owner()
        if owner is None:
            return
        owner.require_whole_weights()
        # torch writes the parameters next: an upload in flight would overwrite them.
        owner.synchronize()
        entries = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        owner.expect_weights({k: v for k, v in entries.items() if isinstance(v, Tensor)})


def attach_state_dict_hooks(
    model: nn.Module, owner: WeightsOwner, engine: object
) -> list[RemovableHandle]:
    """Hooks of the root module; see the classes."""
    return [
        model.register_state_dict_pre_hook(_WaitBeforeSaving(owner, engine)),
        model.register_state_dict_post_hook(_CopyToHost(owner, engine)),
        model.register_load_state_dict_pre_hook(_WaitBeforeLoading(owner, engine)),
        model.register_load_state_dict_post_hook(_AdoptAfterLoading(owner, engine)),
    ]
