"""Bytes of model state by tier, from a job alone: what can be said before anything is built."""

from __future__ import annotations

from offloadtrain.config import Config
from offloadtrain.shapes import num_params

_WORKING_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "auto": 2}


def state_bytes(config: Config) -> dict[str, dict[str, int]]:
    """Return tier -> state -> bytes, without padding and staging, which need the real model.

    Per parameter: the working weight on the device; on the host fp32 master, exp_avg and
    exp_avg_sq, and one gradient, which is kept because clipping must know the norm of all of them
    (fp32 where microbatches are summed).
    """
    params = num_params(config.model)
    working = _WORKING_BYTES[config.device.precision]
    gradient = working if config.train.grad_accum_steps == 1 else 4
    host = {"master weights": 4, "exp_avg": 4, "exp_avg_sq": 4, "gradients": gradient}
    return {
        "device": {"working weights": working * params},
        "host": {state: size * params for state, size in host.items()},
    }
