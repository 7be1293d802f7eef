"""Names of parameters, without what wrappers of modules put into them."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.integrations.foreign.found import Wanted

_INSIDE = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Of FSDP, of recomputation and of torch.compile."""
_BEFORE = "module."
"""Of DistributedDataParallel."""


class Names:
    """From the names of a checkpoint to the model's first names; tied weights have several."""

    def __init__(self, found: Sequence[str], wanted: Sequence[Wanted]) -> None:
        bare = [_unwrapped(name) for name in found]
        has_prefix = any(
            name.startswith(_BEFORE) for target in wanted for name in (target.name, *target.aliases)
        )
        self._prefix = "" if has_prefix or not all(n.startswith(_BEFORE) for n in bare) else _BEFORE

    def own(self, name: str) -> str:
        """Return the name without wrappers."""
        return _unwrapped(name).removeprefix(self._prefix)


def _unwrapped(name: str) -> str:
    for part in _INSIDE:
        name = name.replace(part, "")
    return name
