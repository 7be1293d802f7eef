"""Host memory that is refused while a run is built or trains, in the words of the engine."""

from __future__ import annotations

from types import TracebackType

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.hardware.host_memory import least_room
from offloadtrain.runtime.arena import Ledger, is_out_of_memory


class NamedMemoryErrors:
    """Turns a refusal of Python, of torch or of the kernel into a HostMemoryError, which names the
    tightest limit and the largest owners.

    Attributes:
        ledger: of the engine; empty until it is made.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()

    def __enter__(self) -> NamedMemoryErrors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and is_out_of_memory(error):
            reason = str(error).strip().partition("\n")[0].rpartition("DefaultCPUAllocator: ")[2]
            raise HostMemoryError(
                f"the host gives no more memory ({reason}): {least_room()}. Held by the engine: "
                f"{self.ledger.summary()}. Set a smaller train.micro_batch, "
                'offload.activation = "recompute" or a narrower offload.state'
            ) from error
