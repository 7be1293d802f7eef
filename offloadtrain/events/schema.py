"""The run log: one frozen dataclass per kind of event, one JSON line per record.

Standard library only; the trainer writes it and the monitor reads it (`log_lines.py`). A line
combines an envelope with the event's fields, which have units in their names:

    {"v":1,"k":"step","t":1763690000.25,"m":81234567890,"r":0,"step":3,"loss":2.31,…}

`v` is the schema version, `k` the kind, `t` Unix seconds, `m` a monotonic clock in nanoseconds of
the writing process, `r` the rank. Readers ignore unknown keys and kinds, so a field may
be added (with a default) without a new version. JSON has no nan and inf: they are the strings
"nan", "inf" and "-inf".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

SCHEMA = 1
WAIT = "wait"
"""Pseudo-lane for waits of compute."""

Json: TypeAlias = dict[str, Any]
"""Plain JSON data with string keys; a non-finite float in it is read back as a string."""


KINDS: dict[str, type[Event]] = {}
"""Name of a kind in the log → its class."""


class Event:
    """Base class of all events; `KIND` is the kind's name in the log."""

    __slots__ = ()
    KIND: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        # `slots=True` creates a second class, for which this is called without `kind`.
        cls.KIND = kind or cls.KIND
        KINDS[cls.KIND] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event, kind="run_started"):
    """The resolved run; written once per start, so again after each resume.

    Attributes:
        plan: planned bytes by owner, and other facts of the plan.
        backend: CPU kernels: name, isa, threads, reason.
        machine: result of `telemetry.probe`.
        nproc: ranks that `--nproc` starts again; 1 if the ranks are on several hosts.
        start_step: optimizer steps completed before this start.
        peak_flops: peak FLOP/s of the devices of all ranks; None if unknown.
    """

    run_id: str
    name: str
    pid: int
    num_params: int
    config: Json
    plan: Json
    backend: Json
    machine: Json
    world_size: int = 1
    nproc: int = 1
    start_step: int = 0
    peak_flops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp(Event, kind="set_up"):
    """The set-up before a start's first step; the log begins after it. `parts_s`: duration of its
    parts, by name."""

    duration_s: float
    parts_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event, kind="step"):
    """One optimizer step.

    Attributes:
        step: number of the step, from 1; a skipped step has a number as well.
        loss: mean over the microbatches, nats per token.
        grad_norm: global norm before clipping; None if nothing needed it.
        clip_coef: factor by which clipping scaled the gradients; 1.0 if it did not.
        loss_scale: None without loss scaling.
        skipped: gradients were not finite, or the loss was a spike: nothing was updated.
        tokens: total tokens of all ranks so far, including this step.
        step_ms: wall time since the end of the previous step.
        exposed_ms: time in which compute waited for the host or for transfers.
        busy_ms: lane → work time, hidden or exposed.
        early_buckets: buckets updated inside backward.
        speculation_hit: True if the prediction of a speculative update was right; None without
            speculation.
        mfu: share of the devices' peak, 0 to 1; None if the peak is unknown.
        comm_bytes: bytes that this rank sent in the engine's collectives, for gradients, weights
            and partitioned block inputs. Collectives inside a model's forward and backward (tensor
            parallel sums, tokens to experts) are not included.
        disk_read_bytes, disk_written_bytes: state, gradients and weights on this rank's disk; a
            checkpoint reads the state once.
        own_ms: step time without waits for slower ranks in collectives; 0 for a single rank.
        device_peak_bytes: peak of torch's allocator within the step; 0 without a GPU.
        host_peak_bytes: peak resident memory that the sampler saw within the step; 0: no sample.
        ranks_ms: in rank 0's log, `own_ms` of every rank; empty for a single rank.
    """

    step: int
    loss: float
    lr: float
    tokens: int
    grad_norm: float | None = None
    clip_coef: float | None = None
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
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    own_ms: float = 0.0
    ranks_ms: tuple[float, ...] = ()
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes of one owner in one tier, current and peak."""

    owner: str
    tier: str
    num_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Event, kind="memory"):
    """The Ledger: bytes by owner."""

    step: int
    rows: tuple[MemoryRow, ...]


MEMORY_QUANTITIES = (
    "allocated", "reserved", "inactive", "free", "pinned", "rss", "available", "swap",
    "page_cache",
)  # fmt: skip
"""Quantities of a `LiveMemory` sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveMemory(Event, kind="live_memory"):
    """The memory sampler's readings since its last record.

    A quantity is (least, newest, peak) in KiB, a single number if the three are equal, or empty if
    it is unknown.

    Attributes:
        step: the step in progress.
        allocated_kib: tensors of torch's allocator on the device.
        reserved_kib: device memory of torch's allocator, including its cache.
        inactive_kib: free parts of reserved segments that still contain other tensors:
            fragmentation.
        free_kib: free device memory reported by the driver, for all processes.
        pinned_kib: page-locked host memory of this process.
        rss_kib: resident memory of this process.
        available_kib: available host memory under all limits.
        swap_kib, page_cache_kib: used by the host.
    """

    step: int
    allocated_kib: tuple[int, ...] = ()
    reserved_kib: tuple[int, ...] = ()
    inactive_kib: tuple[int, ...] = ()
    free_kib: tuple[int, ...] = ()
    pinned_kib: tuple[int, ...] = ()
    rss_kib: tuple[int, ...] = ()
    available_kib: tuple[int, ...] = ()
    swap_kib: tuple[int, ...] = ()
    page_cache_kib: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory(Event, kind="step_memory"):
    """Memory inside a sampled step.

    Attributes:
        tier: "device": held by torch's allocator; "host": resident memory of the process.
        at_ms: time since the start of the step, as in its spans.
        kib: peak between the previous time and this one.
    """

    step: int
    tier: str
    at_ms: tuple[float, ...]
    kib: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan(Event, kind="span"):
    """One operation on one lane, in a sampled step. `start_ms` counts from the start of the step;
    `num_bytes`: bytes written by a copy or collective. On lane WAIT: a wait of compute, named
    after the awaited lane."""

    step: int
    lane: str
    name: str
    start_ms: float
    duration_ms: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with memory on a GPU; `num_bytes` is None if the driver does not report it."""

    pid: int
    num_bytes: int | None = None
    user: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU as reported by NVML, for all processes; None: not reported by the driver.

    Attributes:
        pcie_tx_bytes_per_s: sent by the GPU (to the host) since the last sample; rx: received.
        nvlink_tx_bytes_per_s, nvlink_rx_bytes_per_s: the same, summed over all NVLinks.
        clock_mhz: clock of its multiprocessors.
        throttle: why its clocks are throttled; "" if they are not.
        processes: only in the monitor's samples, never in a log.
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
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    throttle: str = ""
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class System(Event, kind="system"):
    """A sample of the machine and of this process.

    Attributes:
        cpu_percent: load of this process; 100 is one core.
        host_cpu_percent: load of all processes of the host.
        host_cpus: CPUs of the host; 0: not logged.
        rss_bytes: resident memory of this process.
        host_available_bytes: memory still available under all limits.
        gpu_state: "" if the GPUs could be queried, otherwise the reason.
    """

    cpu_percent: float
    rss_bytes: int
    host_available_bytes: int
    host_total_bytes: int
    swap_used_bytes: int
    gpus: tuple[GpuSample, ...] = ()
    gpu_state: str = ""
    host_cpu_percent: float = 0.0
    host_cpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval(Event, kind="eval"):
    """Mean loss on held-out tokens after `step` steps, in nats per token."""

    step: int
    val_loss: float
    tokens: int = 0
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Event, kind="checkpoint"):
    """State saved after `step` steps; `state` is "saving", "saved" or "failed"."""

    step: int
    path: str
    state: str = "saved"
    num_bytes: int = 0
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning_(Event, kind="warning"):  # noqa: N801 (the builtin has the name)
    """A warning to the user; `code` is short and stable, `message` a sentence."""

    code: str
    message: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Event, kind="decided"):
    """A decision that a run made from measurements after `step` steps; `message`: a sentence."""

    step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert(Event, kind="alert"):
    """An alert of the trainer's rules, raised or cleared.

    Attributes:
        code: the rule's code, short and stable; at most one alert per code is active.
        state: "raised" or "cleared".
        level: "warning" or "error".
        message: the finding, the expected value, and the remedy.
    """

    code: str
    state: str
    message: str
    level: str = "warning"
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Event, kind="control"):
    """The state of a request from outside: "accepted", "done" or "refused".

    Attributes:
        id: id of the request, which is its file's name.
        action: "checkpoint", "stop", "abort", "note", "acknowledge" or "trace".
        message: the note, or the reason for a refusal.
    """

    id: str
    action: str
    state: str
    message: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Event, kind="sample"):
    """Text that the model generated."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One quantity, planned and measured; `unit` is "bytes" or "s"."""

    what: str
    planned: float
    measured: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCompared(Event, kind="plan_compared"):
    """Planned and measured figures: peak bytes by tier, medians of times."""

    rows: tuple[PlanRow, ...]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event, kind="run_ended"):
    """The last record of a start; `status` is "done", "stopped" (resumable) or "failed"."""

    status: str
    step: int
    message: str = ""
    val_loss: float | None = None
    duration_s: float = 0.0
