"""Bytes of model state by tier, from a job alone: what can be said before anything is built."""

from __future__ import annotations

from offloadtrain.config import Config
from offloadtrain.shapes import num_params

_WORKING_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "auto": 2}
_HOST_BYTES: dict[str, dict[str, float]] = {
    "fp32": {"master weights": 4, "exp_avg": 4, "exp_avg_sq": 4},
    "split16": {"host weights": 2, "low": 2, "exp_avg": 2, "exp_avg_sq": 2},
    "int8": {"host weights": 2, "correction": 1, "exp_avg": 1, "exp_avg_sq": 1, "scales": 8 / 128},
}
"""Per parameter, without its gradient, by state format."""


def state_bytes(config: Config) -> dict[str, dict[str, int]]:
    """Return tier -> state -> bytes, without padding and staging, which need the real model.

    Per parameter: the working weight on the device; on the host the state in its format, and one
    gradient, which is kept because clipping must know the norm of all of them (fp32 where
    microbatches are summed).
    """
    params = num_params(config.model)
    working = _WORKING_BYTES[config.device.precision]
    gradient = working if config.train.grad_accum_steps == 1 else 4
    host = _HOST_BYTES[config.optim.state] | {"gradients": gradient}
    return {
        "device": {"working weights": working * params},
        "host": {state: round(size * params) for state, size in host.items()},
    }
