"""Lays a step out: which blocks are streamed, where the state is, what has a second copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.offload import OffloadConfig, OptionError
from offloadtrain.config.units import format_bytes
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.layout.buffer_table import arena_rows, device_bytes, second_copy_bytes
from offloadtrain.step.layout.buffers import largest_owners, span_bytes
from offloadtrain.step.layout.state_tiers import with_state_tiers
from offloadtrain.step.layout.step_spec import StepSpec, UpdatePolicy
from offloadtrain.step.layout.streamed_blocks import streamed_blocks
from offloadtrain.step.layout.tiers import Tier

HEADROOM = 0.9
"""The share of the available host memory that second copies may fill; the rest is for others."""


def lay_out(
    blocks: Sequence[BlockSpec],
    config: OffloadConfig,
    *,
    ranks: int,
    num_tensors: int,
    available_bytes: int | None,
    weight_versions: int = 1,
    gradient_sums: int = 1,
    update_policy: UpdatePolicy | None = None,
    copies: int = 1,
    parts: int = 1,
) -> StepSpec:
    """Decide which blocks are streamed, where the state is, and which blocks have a second copy.

    Frozen buckets of blocks that stay on the device are left out: they stay where the rest of the
    model's frozen weights are.

    Args:
        available_bytes: host memory that state and second copies may fill if the config sets no
            limit; None: no second copies.
        weight_versions, gradient_sums, update_policy, copies: as in `StepSpec`.
        parts: ranks that hold the other parts of matrices, and have the same inputs.

    Raises:
        OptionError: the config does not go with so many ranks, or asks for more state on the device
            than can be there.
        DeviceMemoryError: a limit of the device holds not even the rest and the slots.
    """
    config.zero_stage_among(ranks)
    if config.gradients.sums_tier == "auto":
        raise OptionError(
            "sums_on = 'auto' is decided by the plan of a job; in offload() give 'host' or "
            "'device', which plan_model(..., sums_on='auto') tells"
        )
    if config.activations.partition and parts == 1:
        raise OptionError(
            "partition_activations = True divides block inputs among the ranks of tensor parallel, "
            "and there are none: offload with a mesh that has an axis 'tp', or leave it out"
        )
    spec = StepSpec(
        tuple(blocks),
        config,
        ranks,
        num_tensors,
        weight_versions=weight_versions,
        gradient_sums=gradient_sums,
        update_policy=update_policy,
        copies=copies,
        input_parts=parts if config.activations.partition else 1,
    )
    streamed = streamed_blocks(spec)
    laid_out = tuple(b if b.name in streamed else replace(b, frozen=()) for b in spec.blocks)
    spec = with_state_tiers(replace(spec, blocks=laid_out, streamed=streamed), device_bytes)
    return spec if available_bytes is None else with_second_copies(spec, available_bytes)


def with_second_copies(spec: StepSpec, available_bytes: int) -> StepSpec:
    """Give second copies to the last blocks, whose gradients come first, as far as memory goes;
    see `lay_out`."""
    if spec.config.update != "speculative":
        return spec
    limit = spec.config.memory.host_limit
    room = int(available_bytes * HEADROOM) if limit is None else limit
    room -= span_bytes(arena_rows(replace(spec, second_copies=frozenset())))
    copied = set()
    for block in reversed(spec.blocks):
        # Experts are updated in step() only: which of them are used is known then.
        on_host = [b for b in block.buckets if b.state_tier is Tier.HOST and not b.experts]
        room -= sum(second_copy_bytes(spec, bucket) for bucket in on_host)
        if room < 0:
            break
        copied.add(block.name)
    return replace(spec, second_copies=frozenset(copied))


def check_host_limit(spec: StepSpec) -> None:
    """Raises HostMemoryError if the config's limit does not hold one copy of everything."""
    limit = spec.config.memory.host_limit
    if limit is None:
        return
    rows = arena_rows(replace(spec, second_copies=frozenset()))
    if (needed := span_bytes(rows)) > limit:
        raise HostMemoryError(
            f"the engine needs {format_bytes(needed)} of host memory and host_memory_limit is "
            f"{format_bytes(limit)}. Largest: {largest_owners(rows)}. Raise it, or take a "
            "narrower state ('split16', 'int8')"
        )
