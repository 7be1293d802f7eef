"""The run log: one frozen dataclass per kind of event, one JSON line per record.

Standard library only; the trainer writes it and the monitor reads it. A line is an envelope with
the event's fields beside it, units in their names:

    {"v":1,"k":"step","t":1763690000.25,"m":81234567890,"r":0,"step":3,"loss":2.31,…}

`v` is the schema version, `k` the kind, `t` Unix seconds, `m` a monotonic clock in nanoseconds of
the writing process, `r` the rank. Readers ignore keys and kinds they do not know, so a field may
be added (with a default) without a new version. JSON has no nan and inf: they are the strings
"nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from offloadtrain.events import codec

SCHEMA = 1

WAIT = "wait"
"""Beside the lanes of a step: the stretches in which compute waited for one of them."""

Json: TypeAlias = dict[str, Any]
"""Plain JSON data with string keys; a non-finite float in it is read back as a string."""


class Event:
    """What all kinds share: the name of the kind in the log."""

    __slots__ = ()
    KIND: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The run as it was resolved; written once per start, so again after each resume.

    Attributes:
        plan: where every byte was planned to live.
        backend: the kernels: name, isa, threads, why.
        machine: what `telemetry.probe` found.
        start_step: optimizer steps already done by an earlier run of this folder.
        peak_flops: of the compute device, per second, if known.
    """

    KIND: ClassVar[str] = "run_started"
    run_id: str
    name: str
    pid: int
    num_params: int
    config: Json
    plan: Json
    backend: Json
    machine: Json
    world_size: int = 1
    start_step: int = 0
    peak_flops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """One optimizer step.

    Attributes:
        step: 1 for the first; a skipped step has its number too.
        loss: mean over the microbatches, nats per token.
        grad_norm: global, before clipping; None if nothing needed it.
        loss_scale: None where there is no loss scaling.
        skipped: the gradients overflowed, nothing was updated.
        tokens: trained on since the very first step, this one included, on all ranks.
        step_ms: wall time since the end of the previous step.
        exposed_ms: host or transfer time that the compute device waited for.
        busy_ms: lane → time that it worked, hidden or exposed.
        early_buckets: buckets updated inside backward.
        speculation_hit: whether these updates, made on a guess, held; None where nothing was guessed.
        mfu: share of the devices' peak, 0 to 1; None if the peak is not known.
        comm_bytes: that this rank has sent to others in collectives.
        own_ms: of the step, without waiting for slower ranks in collectives; 0: there is one rank.
        ranks_ms: in the log of rank 0, the `own_ms` of every rank; empty where there is one.
    """

    KIND: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    tokens: int
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    tokens_per_s: float = 0.0
    step_ms: float = 0.0
    data_ms: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    optimizer_ms: float = 0.0
    exposed_ms: float = 0.0
    busy_ms: dict[str, float] = field(default_factory=dict)
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    mfu: float | None = None
    early_buckets: int = 0
    speculation_hit: bool | None = None
    comm_bytes: int = 0
    own_ms: float = 0.0
    ranks_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one owner in one tier, now and at most so far."""

    owner: str
    tier: str
    num_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Event):
    """The ledger: every byte with its owner."""

    KIND: ClassVar[str] = "memory"
    step: int
    rows: tuple[MemoryRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan(Event):
    """One operation on one lane; sampled. `start_ms` counts from the beginning of the step;
    `num_bytes`: of what a copy or a collective wrote. On the lane WAIT: a stretch in which compute
    waited, named as the lane that it waited for."""

    KIND: ClassVar[str] = "span"
    step: int
    lane: str
    name: str
    start_ms: float
    duration_ms: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU as NVML sees it, all processes included; None: the driver does not tell.

    Attributes:
        pcie_tx_bytes_per_s: sent by the GPU (to the host) since the last sample; rx: received.
        throttle: why its clocks are held back, "" if they are not.
    """

    index: int
    name: str
    uuid: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    throttle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class System(Event):
    """A sample of the machine and of this process.

    Attributes:
        cpu_percent: of this process; 100 is one core.
        rss_bytes: resident memory of this process.
        host_available_bytes: what may still be used, under every memory limit.
        gpu_state: "" if the GPUs could be asked, otherwise why not.
    """

    KIND: ClassVar[str] = "system"
    cpu_percent: float
    rss_bytes: int
    host_available_bytes: int
    host_total_bytes: int
    swap_used_bytes: int
    gpus: tuple[GpuSample, ...] = ()
    gpu_state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval(Event):
    """The mean loss on held-out tokens after `step` steps, nats per token."""

    KIND: ClassVar[str] = "eval"
    step: int
    val_loss: float
    tokens: int = 0
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Event):
    """State saved after `step` steps; `state` is "saving", "saved" or "failed"."""

    KIND: ClassVar[str] = "checkpoint"
    step: int
    path: str
    state: str = "saved"
    num_bytes: int = 0
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning_(Event):  # noqa: N801 (the builtin has the name)
    """Something a person should know; `code` is short and stable, `message` a sentence."""

    KIND: ClassVar[str] = "warning"
    code: str
    message: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert(Event):
    """A rule of the trainer's says that something needs a person, or that it is over.

    Attributes:
        code: of the rule, short and stable; at most one alert of it is active.
        state: "raised" or "cleared".
        level: "warning" or "error".
        message: what is, what was expected, and what to do.
    """

    KIND: ClassVar[str] = "alert"
    code: str
    state: str
    message: str
    level: str = "warning"
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Event):
    """What became of a request from outside; `state` is "accepted", "done" or "refused".

    Attributes:
        id: of the request: its file's name.
        action: "checkpoint", "stop", "abort", "note", "acknowledge" or "trace".
        message: the note, or why it was refused.
    """

    KIND: ClassVar[str] = "control"
    id: str
    action: str
    state: str
    message: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Event):
    """Text that the model generated."""

    KIND: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One quantity; `unit` is "bytes" or "s"."""

    what: str
    planned: float
    measured: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCompared(Event):
    """What was planned beside what was measured: peak bytes by tier, medians of times."""

    KIND: ClassVar[str] = "plan_compared"
    rows: tuple[PlanRow, ...]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The last record of a start; `status` is "done", "stopped" (resumable) or "failed"."""

    KIND: ClassVar[str] = "run_ended"
    status: str
    step: int
    message: str = ""
    val_loss: float | None = None
    duration_s: float = 0.0


KINDS: dict[str, type[Event]] = {
    kind.KIND: kind
    for kind in (
        RunStarted, Step, Memory, LaneSpan, System, Eval, Checkpoint, Warning_, Alert, Control, Sample,
        PlanCompared, RunEnded,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """An event and its envelope."""

    event: Event
    rank: int
    time_s: float
    monotonic_ns: int = 0
    version: int = SCHEMA


def to_line(event: Event, rank: int, time_s: float, monotonic_ns: int = 0) -> bytes:
    """Return the record as one line of ASCII, newline included.

    Raises:
        TypeError: a dict in the event has a key that is no string.
        ValueError, RecursionError: a dict in the event holds itself, or is very deep.
    """
    envelope = {"v": SCHEMA, "k": event.KIND, "t": time_s, "m": monotonic_ns, "r": rank}
    return codec.encode(envelope | codec.as_dict(event)) + b"\n"


def from_line(line: bytes | str) -> Record | None:
    """Return the record, or None for a torn or foreign line and for a kind of a later version."""
    try:
        return from_values(json.loads(line))
    except (ValueError, RecursionError):
        return None


def from_values(values: Any) -> Record | None:
    """As `from_line`, of JSON that is parsed already."""
    try:
        event: Event = codec.decode(KINDS[values["k"]], values)
        envelope: _Envelope = codec.decode(_Envelope, values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return Record(event, envelope.r, envelope.t, envelope.m, envelope.v)


@dataclass(frozen=True, slots=True)
class _Envelope:
    v: int
    t: float
    r: int
    m: int = 0


def read(path: str | Path) -> Iterator[Record]:
    """Yield the records of a log, in the order written; lines that cannot be read are left out."""
    with open(path, "rb") as log:
        for line in log:
            if record := from_line(line):
                yield record
