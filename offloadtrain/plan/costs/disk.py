"""The load of state, gradients and weights on a drive: bytes of a step, seconds, wear; and the cost
of a checkpoint, which is written during the next steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offloadtrain.hardware.machine import Machine
from offloadtrain.step.layout.buffer_table import disk_rows
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Lane, Launch
from offloadtrain.step.proof.simulate import moved

ASSUMED_GBPS = 2.0
"""Rate in each direction of an unmeasured drive: less than most NVMe drives sustain."""

MICRO_STEPS = (2, 3)
"""Numbers of microbatches that are simulated; each further one adds their difference."""
READING = (Lane.DISK_READ, Lane.DISK_LOAD)
DISK_LANES = (*READING, Lane.DISK_WRITE)

_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLoad:
    """Disk traffic of one rank's step, and the rates available to it.

    Attributes:
        read_bytes, written_bytes: bytes of a step.
        read_rate, write_rate: bytes per second while both run.
        assumed: the machine file has no disk rates.
    """

    read_bytes: int
    written_bytes: int
    read_rate: float
    write_rate: float
    assumed: bool

    def seconds(self, op: Launch) -> float:
        """Return the seconds of a read or write."""
        rate = self.read_rate if op.lane in READING else self.write_rate
        return sum(ref.nbytes for ref in op.writes) / rate


def with_rates(machine: Machine) -> Machine:
    """Return the machine with assumed rates in place of missing ones."""
    return replace(
        machine,
        disk_read_gbps=machine.disk_read_gbps or ASSUMED_GBPS,
        disk_write_gbps=machine.disk_write_gbps or ASSUMED_GBPS,
    )


def disk_load(spec: StepSpec, machine: Machine, local_ranks: int) -> DiskLoad:
    """Return the disk load of a step's program.

    Args:
        local_ranks: number of ranks that share the drive.
    """
    from_disk, to_disk = _moved(spec)
    known = with_rates(machine)
    read, write = (
        1e9 * rate / local_ranks for rate in (known.disk_read_gbps, known.disk_write_gbps)
    )
    both = 1e9 * machine.disk_both_gbps / local_ranks
    slower = _contention_factor(from_disk, to_disk, read, write, both)
    return DiskLoad(
        read_bytes=from_disk,
        written_bytes=to_disk,
        read_rate=read / slower,
        write_rate=write / slower,
        assumed=known != machine,
    )


def _moved(spec: StepSpec) -> tuple[int, int]:
    """Return the bytes that a step reads and writes. Every update reads and writes the state of a
    bucket once; of matrices, whose moments are updated before their masters, twice. Traffic of
    gradients and weights depends on the contents of slots, so the program is run for it."""
    if not spec.gradient_slots and not spec.weight_slots:
        twice = {bucket.name for bucket in spec.buckets if bucket.matrices}
        sizes = (row.nbytes * (2 if key.bucket in twice else 1) for key, row in disk_rows(spec))
        state = sum(sizes)
        return state, state
    count = spec.config.grad_accum_steps
    few, some = MICRO_STEPS
    totals = _of_program(spec, min(count, some))
    if count <= some:
        return totals
    before = _of_program(spec, few)
    more = [(count - some) * (b - a) for a, b in zip(before, totals, strict=True)]
    return totals[0] + more[0], totals[1] + more[1]


def _of_program(spec: StepSpec, micro_steps: int) -> tuple[int, int]:
    config = spec.config.replace(grad_accum_steps=micro_steps, warmup_steps=0)
    by_lane = moved(replace(spec, config=config), DISK_LANES)
    return sum(by_lane.get(lane, 0) for lane in READING), by_lane.get(Lane.DISK_WRITE, 0)


def _contention_factor(
    from_disk: int, to_disk: int, read: float, write: float, both: float
) -> float:
    """Return the slowdown of reads and writes that share a drive, at least 1.0, from the measured
    rate of both at once. Sizes are in bytes, rates in bytes per second."""
    if not both or not from_disk + to_disk:
        return 1.0
    return max(1.0, (from_disk + to_disk) / both / max(from_disk / read, to_disk / write))


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes written to one host's drive.

    Attributes:
        per_day: bytes per day, at the planned step time.
        days: days until the drive's rating is reached; None if the machine file has no rating.
    """

    per_step: int
    per_day: float
    days: float | None


def wear(load: DiskLoad, machine: Machine, local_ranks: int, step_s: float) -> Wear:
    """Return the bytes that all ranks of a host write. `step_s`: planned step time."""
    per_step = load.written_bytes * local_ranks
    per_day = per_step * _DAY_S / step_s
    rated = 1e12 * machine.disk_tbw
    return Wear(per_step, per_day, rated / per_day if rated and per_day else None)


SHARE = 0.03
"""Largest fraction of a run's time that checkpoints should take."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The cost of a checkpoint.

    Attributes:
        write_s: seconds to write its files.
        stall_s: seconds in which training stands still: the next update waits for the writes.
        interval: smallest number of steps between checkpoints with a cost of at most `SHARE`.
    """

    write_s: float
    stall_s: float
    interval: int


def save_cost(write_s: float, step_s: float, spill_s: float = 0.0) -> SaveCost:
    """Return the cost of a checkpoint. One step and the writes of the spill hide part of its time.

    Args:
        write_s: seconds to write the checkpoint at the disk's rate.
        spill_s: seconds to write the spill at this rate; updates do not wait for the spill.
    """
    stall_s = max(0.0, write_s - step_s - spill_s)
    # A checkpoint begins only after the previous one is written.
    spent_s = max(stall_s / SHARE, write_s)
    return SaveCost(write_s, stall_s, max(1, math.ceil(spent_s / step_s)))
