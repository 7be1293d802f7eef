"""What of the tensors that `activation = "offload_saved"` moves compute can hide."""

from __future__ import annotations

from itertools import groupby

from offloadtrain.config.units import format_bytes
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.times import compute_seconds


def hidden_above(placed: Placement, machine: Machine) -> int:
    """Return the least `offload_saved_above`, in bytes, from which on all that is moved goes down
    while forward computes and comes back while backward does; 0: with the job's own.

    The copies of weights and gradients use the same bus and are not counted: a simulation of the
    step tells what they leave.

    Raises:
        MachineError: as `predict`.
    """
    costs, compute = Costs(placed, machine), compute_seconds(placed, machine)
    down = compute.forward * costs.bus(machine.d2h_gbps)
    up = compute.backward * costs.bus(machine.h2d_gbps)
    moved, above = 0, max(placed.block_inputs, default=0) + 1
    for size, alike in groupby(sorted(placed.block_inputs, reverse=True)):
        moved += sum(alike)
        if moved > min(down, up):
            return above
        above = size
    return 0


def told(placed: Placement, machine: Machine) -> str:
    """Say how many tensors move and, where compute does not hide them, which it would."""
    sizes, threshold = placed.block_inputs, placed.config.offload.activations.offload_saved_above
    if not sizes:
        return (
            f"saved tensors: none has {format_bytes(threshold)}, so nothing moves: lower "
            "offload.offload_saved_above"
        )
    size = format_bytes(sum(sizes))
    line = f"saved tensors: {len(sizes)}, {size}, go to the host in each microbatch"
    if (above := hidden_above(placed, machine)) == 0:
        return f"{line}, which takes no longer than forward and backward"
    return (
        f"{line}, which takes longer than forward or backward; those from "
        f"{format_bytes(above)} on do not (offload_saved_above = {above})"
    )
