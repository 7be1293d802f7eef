"""What the offloaded model itself does: saves and loads whole state dicts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offloadtrain.engine.autograd.hooks import OfOneModel


class Face(Protocol):
    """What the hooks need of the optimizer."""

    def synchronize(self) -> None: ...
    def expect_weights(self, values: Mapping[str, Tensor]) -> None: ...
    def adopt_written_weights(self) -> None: ...
    def require_whole_weights(self) -> None: ...


class _FaceHook(OfOneModel):
    """Holds the optimizer weakly."""

    __slots__ = ("_face", "_from_public_api")

    def __init__(self, face: Face) -> None:
        self._face = weakref.ref(face)


class _WaitBeforeSaving(_FaceHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        face = self._face()
        if face is not None:
            face.require_whole_weights()
            face.synchronize()


class _CopyToHost(_FaceHook):
    """A state dict of host copies: views of a flat buffer would be saved with all of it."""

    __slots__ = ()

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        copies: dict[tuple[int, torch.Size], Tensor] = {}  # tied names share one copy
        for name, value in state_dict.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and not value.requires_grad:
                key = (value.data_ptr(), value.shape)
                if key not in copies:
                    copies[key] = value.detach().to("cpu", copy=True)
                state_dict[name] = copies[key]


class _AdoptAfterLoading(_FaceHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        face = self._face()
        if face is not None:
            face.adopt_written_weights()


class _WaitBeforeLoading(_FaceHook):
    """A late upload would overwrite what is loaded; masters take the values as they are given."""

    __slots__ = ()

    def __call__(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        face = self._face()
        if face is None:
            return
        face.require_whole_weights()
        face.synchronize()
        own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        face.expect_weights({k: v for k, v in own.items() if isinstance(v, Tensor)})


def attach_faces(model: nn.Module, face: Face) -> list[RemovableHandle]:
    """Hooks of the root module; see the classes."""
    return [
        model.register_state_dict_pre_hook(_WaitBeforeSaving(face)),
        model.register_state_dict_post_hook(_CopyToHost(face)),
        model.register_load_state_dict_pre_hook(_WaitBeforeLoading(face)),
        model.register_load_state_dict_post_hook(_AdoptAfterLoading(face)),
    ]
