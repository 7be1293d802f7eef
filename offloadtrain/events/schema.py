"""The run log: one frozen dataclass per kind of event, one JSON line per record.

Standard library only; the trainer writes it and the monitor reads it (`log_lines.py`). A line
combines an envelope with the event's fields, which have units in their names:

    {"v":1,"k":"step","t":1763690000.25,"m":81234567890,"r":0,"step":3,"loss":2.31,…}

`v` is the schema version, `k` the kind, `t` Unix seconds, `m` a monotonic clock in nanoseconds of
the writing process, `r` the rank. Readers ignore keys and kinds they do not know, so a field may
be added (with a default) without a new version. JSON has no nan and inf: they are the strings
"nan", "inf" and "-inf".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

SCHEMA = 1
WAIT = "wait"
"""A pseudo-lane of the waits of compute."""

Json: TypeAlias = dict[str, Any]
"""Plain JSON data with string keys; a non-finite float in it is read back as a string."""


KINDS: dict[str, type[Event]] = {}
"""Name in the log → class."""


class Event:
    """The base of all events, with the kind's name in the log."""

    __slots__ = ()
    KIND: ClassVar[str]

    def __init_subclass__(cls, kind: str = "") -> None:
        # Called a second time, without a kind, for the copy of the class that has slots.
        cls.KIND = kind or cls.KIND
        KINDS[cls.KIND] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event, kind="run_started"):
    """The resolved run; written once per start, so again after each resume.

    Attributes:
        plan: the planned bytes by owner, and other facts of the plan.
        backend: the kernels: name, isa, threads, reason.
        machine: the result of `telemetry.probe`.
        nproc: the ranks that `--nproc` starts anew; 1 where they are on several hosts.
        start_step: optimizer steps already done by an earlier run of this folder.
        peak_flops: of the compute device, per second, if known.
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
    """The set-up before a start's first step; the log begins after it. `parts_s`: its longest
    parts, by name."""

    duration_s: float
    parts_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event, kind="step"):
    """One optimizer step.

    Attributes:
        step: 1 for the first; a skipped step has a number too.
        loss: mean over the microbatches, nats per token.
        grad_norm: global, before clipping; None if nothing needed it.
        clip_coef: factor on the gradient by clipping; 1.0 if nothing was clipped.
        loss_scale: None without loss scaling.
        skipped: the gradients overflowed, nothing was updated.
        tokens: total tokens of all ranks, including this step's.
        step_ms: wall time since the end of the previous step.
        exposed_ms: time compute waited for the host or transfers.
        busy_ms: lane → its work time, hidden or exposed.
        early_buckets: buckets updated inside backward.
        speculation_hit: True if the prediction of a speculative update was right; None without
            speculation.
        mfu: share of the devices' peak, 0 to 1; None if the peak is unknown.
        comm_bytes: bytes this rank has sent in the engine's collectives, over gradients, weights
            and block inputs in parts; those inside of a model's own forward and backward (sums over
            parts of matrices, tokens to experts) are not among them.
        disk_read_bytes, disk_written_bytes: state, gradients and weights on this rank's disk; a
            checkpoint reads it once.
        own_ms: step time without waits for slower ranks in collectives; 0: a single rank.
        device_peak_bytes: most that torch's allocator held within the step; 0: no GPU.
        host_peak_bytes: most resident memory the sampler saw within the step; 0: no sample.
        ranks_ms: in the log of rank 0, the `own_ms` of every rank; empty for a single rank.
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
"""What `LiveMemory` has of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveMemory(Event, kind="live_memory"):
    """The memory sampler's readings since its last record.

    A quantity is (least, newest, peak) in KiB, one number where the three are equal, or nothing if
    it is not known.

    Attributes:
        step: the step in progress.
        allocated_kib: tensors of torch's allocator on the device.
        reserved_kib: device memory of torch's allocator, including its cache.
        inactive_kib: free parts of reserved segments that other tensors keep in place:
            fragmentation.
        free_kib: free device memory as the driver reports it, all processes considered.
        pinned_kib: page-locked host memory of this process.
        rss_kib: resident memory of this process.
        available_kib: of the host, under every limit.
        swap_kib, page_cache_kib: of the host, used.
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
        at_ms: since the beginning of the step, as of its spans.
        kib: the most between this time and the one before.
    """

    step: int
    tier: str
    at_ms: tuple[float, ...]
    kib: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpan(Event, kind="span"):
    """One operation on one lane; sampled. `start_ms` counts from the beginning of the step;
    `num_bytes`: bytes written by a copy or collective. On the lane WAIT: a wait of compute, named
    after the lane it waited for."""

    step: int
    lane: str
    name: str
    start_ms: float
    duration_ms: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with memory on a GPU; `num_bytes` None: the driver does not say."""

    pid: int
    num_bytes: int | None = None
    user: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU as NVML sees it, all processes included; None: not reported by the driver.

    Attributes:
        pcie_tx_bytes_per_s: sent by the GPU (to the host) since the last sample; rx: received.
        nvlink_tx_bytes_per_s, nvlink_rx_bytes_per_s: the same over all NVLinks together.
        clock_mhz: of its multiprocessors.
        throttle: why its clocks are throttled, "" if they are not.
        processes: only in the monitor's own samples, never in a log.
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
        cpu_percent: of this process; 100 is one core.
        host_cpu_percent: of all processes of the host.
        host_cpus: CPUs of the host; 0: not logged.
        rss_bytes: resident memory of this process.
        host_available_bytes: memory still available under every limit.
        gpu_state: "" if the GPUs could be queried, otherwise why not.
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
    """The mean loss on held-out tokens after `step` steps, nats per token."""

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
    """What a run has decided after `step` steps by what it has measured; `message`: a sentence."""

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
        id: id of the request, its file's name.
        action: "checkpoint", "stop", "abort", "note", "acknowledge" or "trace".
        message: the note, or why it was refused.
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
    """One quantity; `unit` is "bytes" or "s"."""

    what: str
    planned: float
    measured: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCompared(Event, kind="plan_compared"):
    """Planned against measured figures: peak bytes by tier, medians of times."""

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
