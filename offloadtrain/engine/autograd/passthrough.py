"""A dispatch mode that changes nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Passthrough(TorchDispatchMode):
    """Stands for the tracker where a tracked forward runs again: under any mode torch computes some
    functions (`ctc_loss`) by other operations, which save other tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for torch's compiler, which the wrapper would import: see `engine.eager`. No
        compiled forward runs under this mode."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def passthrough() -> AbstractContextManager[object]:
    """Return a mode that changes nothing."""
    mode: AbstractContextManager[object] = Passthrough()
    return mode
