"""Bytes of model state by tier, from a job alone: what can be said before anything is built."""

from __future__ import annotations

from offloadtrain.config import Config
from offloadtrain.shapes import num_block_params, num_params
from offloadtrain.units import parse_bytes

_WORKING_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "auto": 2}
_HOST_BYTES: dict[str, dict[str, float]] = {
    "fp32": {"master weights": 4, "exp_avg": 4, "exp_avg_sq": 4},
    "split16": {"host weights": 2, "low": 2, "exp_avg": 2, "exp_avg_sq": 2},
    "int8": {"host weights": 2, "correction": 1, "exp_avg": 1, "exp_avg_sq": 1, "scales": 8 / 128},
}
"""Per parameter, without its gradient, by state format."""

_STAGING_BYTES = 64 << 20
"""Of one of the two slots for gradients on the device, as the engine has them."""


def state_bytes(config: Config, ranks: int = 1) -> dict[str, dict[str, int]]:
    """Return tier -> state -> bytes of one rank, without padding and staging, which need the real
    model. `config`: the rank's own part of the job (`share.shared`).

    Per parameter: the working weight, on the device or, of streamed blocks, on the host; on the
    host the state in its format, and one gradient, which is kept because clipping must know the
    norm of all of them (fp32 where microbatches are summed). The second copy of the state that
    update = "speculative" takes, as far as memory goes, is not counted. Among ranks a host holds
    one part of all of it.
    """
    params, streamed = num_params(config.model), streamed_params(config)
    working = _WORKING_BYTES[config.device.precision]
    gradient = working if config.train.grad_accum_steps == 1 else 4
    stage = config.ranks.zero_stage if ranks > 1 else 0
    gathered = _gathered_params(config) if stage == 3 and not streamed else 0
    device = {"working weights": working * (params - streamed - gathered)}
    if gathered:
        device["weight shards"] = working * gathered // ranks
    if stage == 1:
        device["gradients"] = working * params
    if streamed or gathered:
        blocks = (streamed or gathered) // num_block_params(config.model)
        slots = min(config.device.slots, blocks)
        device["streaming slots"] = working * slots * num_block_params(config.model)
    host = {state: size * params for state, size in _HOST_BYTES[config.optim.state].items()}
    sums = config.train.grad_accum_steps > 1
    host["gradient sums" if sums else "gradients"] = gradient * params
    for owner, count in _waiting_params(config, params, streamed).items():
        if count:
            host[owner] = working * count
    return {"device": device, "host": {owner: round(size / ranks) for owner, size in host.items()}}


def _gathered_params(config: Config) -> int:
    """Return how many parameters are gathered from shards on the devices."""
    stay = max(config.device.resident_blocks, 0)
    return max(config.model.num_layers - stay, 0) * num_block_params(config.model)


def streamed_params(config: Config) -> int:
    """Return how many parameters have their working weights on the host."""
    device, block = config.device, num_block_params(config.model)
    if device.working == "device":
        return 0
    stay = max(device.resident_blocks, 0)
    if device.resident_blocks < 0 and device.memory_limit:
        per_block = block * _WORKING_BYTES[device.precision]
        rest = num_params(config.model) * _WORKING_BYTES[device.precision]
        rest -= config.model.num_layers * per_block
        largest = max(block, config.model.vocab_size * config.model.d_model)
        rest += 2 * min(largest * _WORKING_BYTES[device.precision], _STAGING_BYTES)
        room = parse_bytes(device.memory_limit) - rest - device.slots * per_block
        stay = max(room // per_block, 0)
    return max(config.model.num_layers - stay, 0) * block


def _waiting_params(config: Config, params: int, streamed: int) -> dict[str, int]:
    """Return owner -> how many parameters have working weights on the host in such a role."""
    optim, sums = config.optim, config.train.grad_accum_steps > 1
    early = optim.update == "exact" and not optim.clip_norm and not optim.skip_nonfinite
    waits = optim.update == "delayed" or (early and sums)
    fp32 = optim.state == "fp32"
    shown = early or optim.update != "exact"
    return {
        "pending weights": (params if waits else streamed) if fp32 else 0,
        "shown weights": streamed if shown else 0,
    }
