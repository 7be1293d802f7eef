"""What state on the disk asks of a drive: bytes of a step, seconds of each, wear."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offloadtrain.hardware.machine import Machine
from offloadtrain.step.memory import disk_requests
from offloadtrain.step.operations import Kind, Launch
from offloadtrain.step.spec import StepSpec

ASSUMED_GBPS = 2.0
"""Each way, of a drive that was not measured: less than most NVMe drives sustain."""

_DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLoad:
    """One step of one rank, and the rates that it finds.

    Attributes:
        read_bytes, written_bytes: of a step.
        read_rate, write_rate: bytes per second, while both run.
        assumed: the machine file has no rate of state on the disk.
    """

    read_bytes: int
    written_bytes: int
    read_rate: float
    write_rate: float
    assumed: bool

    def seconds(self, op: Launch) -> float:
        """Return the seconds of a read or a write of state."""
        rate = self.read_rate if op.kind is Kind.READ_STATE else self.write_rate
        return sum(ref.nbytes for ref in op.writes) / rate


def with_rates(machine: Machine) -> Machine:
    """Return the machine with the assumed rates where it has none."""
    return replace(
        machine,
        disk_read_gbps=machine.disk_read_gbps or ASSUMED_GBPS,
        disk_write_gbps=machine.disk_write_gbps or ASSUMED_GBPS,
    )


def disk_load(spec: StepSpec, machine: Machine, local_ranks: int) -> DiskLoad:
    """Return the load by the program: every update reads and writes a bucket once; of matrices,
    whose moments are updated before their masters, twice.

    `local_ranks`: share the drive.
    """
    twice = {bucket.name for bucket in spec.buckets if bucket.matrices}
    requests = disk_requests(spec)
    moved = sum(one.nbytes * (2 if one.bucket in twice else 1) for one in requests)
    known = with_rates(machine)
    read, write = (
        1e9 * rate / local_ranks for rate in (known.disk_read_gbps, known.disk_write_gbps)
    )
    slower = _shared(moved, read, write, 1e9 * machine.disk_both_gbps / local_ranks)
    return DiskLoad(
        read_bytes=moved,
        written_bytes=moved,
        read_rate=read / slower,
        write_rate=write / slower,
        assumed=known != machine,
    )


def _shared(moved: int, read: float, write: float, both: float) -> float:
    """Return how much slower each way is than alone, where reads and writes share the drive: so
    that as many bytes each way take as long as the rate of both at once says."""
    if not both or not moved:
        return 1.0
    return max(1.0, 2 * moved / both / max(moved / read, moved / write))


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes written to one host's drive.

    Attributes:
        per_day: at the planned time of a step.
        days: until the drive's rating is reached; None: the machine file has no rating.
    """

    per_step: int
    per_day: float
    days: float | None


def wear(load: DiskLoad, machine: Machine, local_ranks: int, step_s: float) -> Wear:
    """Return what all ranks of a host write."""
    per_step = load.written_bytes * local_ranks
    per_day = per_step * _DAY_S / step_s
    rated = 1e12 * machine.disk_tbw
    return Wear(per_step, per_day, rated / per_day if rated and per_day else None)
