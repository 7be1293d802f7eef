"""What a job will need, from its shape alone: `offloadtrain train JOB --dry-run`."""

from __future__ import annotations

from offloadtrain.config import Config
from offloadtrain.footprint import state_bytes
from offloadtrain.shapes import flops_per_token, num_params
from offloadtrain.share import explain, shared
from offloadtrain.units import format_bytes, format_count


def preview(config: Config, ranks: int = 1) -> str:
    """Return some lines: size, tokens, and bytes of model state by tier, on each rank."""
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
    local = shared(config, ranks)
    if ranks > 1:
        lines.append(f"{explain(config, local, ranks)}. Each rank:")
    for tier, states in state_bytes(local, ranks).items():
        parts = ", ".join(f"{state} {format_bytes(size)}" for state, size in states.items())
        lines.append(f"model state on the {tier}: {format_bytes(sum(states.values()))} ({parts})")
    lines.append("and activations on the device, which depend on the batch and are not in this sum")
    return "\n".join(lines)
