"""The [device] section of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device of forward and backward.

    Attributes:
        kind: "auto": a GPU if there is one.
        threads: number of torch's CPU threads; 0: torch's choice.
        process_memory_limit: limit on torch's GPU memory in this process, activations included
            (CUDA only), such as "10 GiB"; empty: none.
        placement: "as-set": as [offload] says; "auto": the plan chooses the fastest `working` and
            `activation` that fit.
        machine: a machine file written by `offloadtrain doctor --save`; the plan uses its rates.
    """

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    process_memory_limit: str = ""
    placement: Literal["as-set", "auto"] = "as-set"
    machine: str = ""
