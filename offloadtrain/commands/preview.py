"""What a job will need, from its shape alone: `offloadtrain train JOB --dry-run`."""

from __future__ import annotations

from offloadtrain.config import Config
from offloadtrain.shapes import flops_per_token, num_params
from offloadtrain.units import format_bytes, format_count

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


def preview(config: Config) -> str:
    """Return some lines: size, tokens, and bytes of model state by tier."""
    train, params = config.train, num_params(config.model)
    flops = flops_per_token(config.model, config.data.seq_len)
    lines = [
        f"{config.name}: {format_count(params)} parameters, {config.model.num_layers} blocks of "
        f"width {config.model.d_model}, sequences of {config.data.seq_len}",
        f"{train.steps} steps of {format_count(config.batch_tokens)} tokens "
        f"({train.micro_batch} sequences x {train.grad_accum_steps} microbatches): "
        f"{format_count(train.steps * config.batch_tokens)} tokens, "
        f"{flops * train.steps * config.batch_tokens:.2e} FLOPs",
    ]
    for tier, states in state_bytes(config).items():
        parts = ", ".join(f"{state} {format_bytes(size)}" for state, size in states.items())
        lines.append(f"model state on the {tier}: {format_bytes(sum(states.values()))} ({parts})")
    lines.append("and activations on the device, which depend on the batch and are not in this sum")
    return "\n".join(lines)
