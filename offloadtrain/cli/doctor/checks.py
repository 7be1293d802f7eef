"""One check per function, from facts to a `Status`. Checks measure nothing themselves.

WARN: training works, but slower or with less memory than possible. FAIL: it does not work. SKIP: it
was not measured.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.hardware.machine import Machine

LEAST_TORCH = (2, 9)
LEAST_FREE_BYTES, LITTLE_FREE_BYTES = 1 << 30, 20 << 30
SLOW_DISK_GBPS = 0.2

STATE_BYTES = {"fp32": 14, "split16": 10, "int8": 7}
"""Host memory in bytes per parameter, by state format: the state and 16-bit gradients."""

_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA major version → oldest driver branch for its minor versions (NVIDIA's release notes)."""

_LAST_OF_DEFAULT = (7, 5)
"""Lowest compute capability in builds of torch 2.11 and newer for CUDA after 12.6."""

_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")

LEAST_OF_LINK, LEAST_OF_DRAM = 0.6, 0.5
FP32_TRAFFIC_BYTES = 28
"""Bytes per parameter of fp32 Adam: gradient, master weight and moments are read; master weight,
moments and working weight are written."""

KERNELS = ("fp32", "split16", "int8", "norm", "accumulate")
"""Kernels with a rate in a `Machine`: Adam by state format, the norm, the sum of gradients."""


class Status(StrEnum):
    """The result of a check."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


PASS, WARN, FAIL, SKIP = Status


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        found: the finding.
        advice: the remedy; "" if none is needed.
    """

    name: str
    status: Status
    found: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.status}  {self.name:14}  {self.found}"
        return f"{line}\n      {self.advice}" if self.advice else line


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """Rates in 10^9 bytes per second, as in `Machine`; 0 if unknown."""

    disk_gbps: float
    disk_read_gbps: float = 0.0
    disk_write_gbps: float = 0.0
    disk_both_gbps: float = 0.0


def _judged(name: str, finding: str, *problems: tuple[object, Status, str]) -> Check:
    """Return the check of a finding with its first problem, or PASS.

    Args:
        problems: (true if there is this problem, its status, the remedy).
    """
    first = next((problem for problem in problems if problem[0]), (True, PASS, ""))
    return Check(name, first[1], finding, first[2])


def check_versions(versions: Mapping[str, str]) -> Check:
    """Check the versions of packages; `versions` must include torch."""
    finding = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in versions.items()
    )
    least = ".".join(map(str, LEAST_TORCH))
    is_old = _numbers(versions["torch"])[:2] < LEAST_TORCH
    return _judged("versions", finding, (is_old, FAIL, f"Install torch {least} or newer."))


def check_gpu(
    names: Sequence[str], nvml_names: Sequence[str], *, cuda: str | None, reason: str, hidden: bool
) -> Check:
    """Check whether torch can use the installed GPUs.

    Args:
        names: descriptions of the GPUs that torch sees.
        nvml_names: names of the GPUs that NVML sees.
        cuda: CUDA version of this torch build.
        reason: why torch or NVML sees no GPU.
        hidden: GPUs are hidden by CUDA_VISIBLE_DEVICES.
    """
    if names:
        return Check("gpu", PASS, "; ".join(names))
    if not nvml_names:
        needed = "driver and a CUDA build of torch" if cuda is None else "driver"
        advice = f"Training will use the CPU. A GPU needs NVIDIA's {needed}."
        return Check("gpu", WARN, f"torch sees no CUDA GPU ({reason})", advice)
    if hidden:
        advice = "Training will use the CPU. Unset CUDA_VISIBLE_DEVICES to train on a GPU."
        return Check("gpu", WARN, "hidden by CUDA_VISIBLE_DEVICES", advice)
    why = "this torch is built without CUDA" if cuda is None else f"torch cannot use it: {reason}"
    advice = f"Install a driver for CUDA {cuda} or newer, or a torch build for an older CUDA."
    return _judged(
        "gpu",
        f"{', '.join(nvml_names)}, but {why}",
        (
            cuda is None,
            FAIL,
            "Install a CUDA build of torch: the installed one is for CPUs only.",
        ),
        (True, FAIL, advice),
    )


def check_arch(
    name: str, capability: tuple[int, int], arch_list: Sequence[str], torch_version: str
) -> Check:
    """Check whether this torch build has kernels for a card; torch itself only warns."""
    card = f"sm_{capability[0]}{capability[1]}"
    if any(_runs_on(arch, capability) for arch in arch_list):
        return Check("torch kernels", PASS, f"{name}: torch {torch_version} has {card}")
    listed = ", ".join(arch_list) or "none"
    return _judged(
        "torch kernels",
        f"{name} is {card}; torch {torch_version} has kernels for {listed}",
        (capability >= _LAST_OF_DEFAULT, FAIL, f"Install a torch build with {card}."),
        (
            True,
            FAIL,
            f"Install a torch build with {card} kernels, such as the CUDA 12.6 build of torch 2.9: "
            "builds of torch 2.11 and newer for later CUDA versions have none.",
        ),
    )


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Return True if code for `arch` runs on a card: on its own and later minor versions; PTX on
    all later cards."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        return False
    kind, built = match[1], (int(match[2]), int(match[3]))
    if match[4] == "a":  # uses features of that card only
        return built == capability
    return built <= capability and (kind == "compute" or built[0] == capability[0])


def check_bf16(finding: str, pays: bool, fallback: str) -> Check:
    """Check bf16; `finding` shows whether it pays, which also decides precision "auto"."""
    advice = f'offload.precision = "auto" selects {fallback}.'
    return _judged("bf16", finding, (not pays, WARN, advice))


def check_driver(driver: str, cuda: str | None) -> Check:
    """Check NVIDIA's driver against the CUDA version of this torch build."""
    if not driver:
        return Check("driver", WARN, "no NVIDIA driver answers")
    least = _LEAST_DRIVER.get(_numbers(cuda or "")[0], 0)
    if _numbers(driver)[0] < least:
        finding = f"{driver}; CUDA {cuda}, which torch is built for, needs {least}"
        return Check("driver", FAIL, finding, "Update the driver, or install an older build.")
    return Check("driver", PASS, f"{driver}, torch is built for CUDA {cuda or '-'}")


def check_nvml(state: str, gpus: int) -> Check:
    """Check NVML; `state`: "" if every GPU could be queried, otherwise the reason."""
    advice = "Install nvidia-ml-py." if "pynvml is not installed" in state else ""
    finding = state or f"answers for {gpus} GPU{'s' if gpus > 1 else ''}"
    return _judged("NVML", finding, (state, WARN, advice))


def check_pcie(
    index: int,
    generation: tuple[int | None, int | None],
    width: tuple[int | None, int | None],
    busy: bool,
) -> Check:
    """Check a GPU's link; generation and width are (current, maximum), None if not reported.

    Args:
        busy: a copy has just run (an idle link slows down to save power).
    """
    if generation[0] is None or width[0] is None:
        return Check("PCIe", PASS, f"GPU {index}: NVML does not report it")
    most = (generation[1] or generation[0], width[1] or width[0])
    is_narrow, is_slow = width[0] < most[1], generation[0] < most[0]
    idle = " (an idle link slows down)" if is_slow and not (busy or is_narrow) else ""
    return _judged(
        "PCIe",
        f"GPU {index}: gen {generation[0]} x{width[0]} of gen {most[0]} x{most[1]}{idle}",
        (is_narrow, WARN, "Use a slot with all lanes, and reseat the card and its riser."),
        (
            is_slow and busy,
            WARN,
            "The link is slow under load: check the firmware's PCIe generation and the riser.",
        ),
    )


def check_gpu_memory(index: int, used: int | None, total: int | None) -> Check:
    """Check GPU memory; call it before this process uses any."""
    if used is None or not total:
        return Check("gpu memory", PASS, f"GPU {index}: NVML does not report it")
    finding = f"GPU {index}: {format_bytes(total - used)} of {format_bytes(total)} free"
    advice = "Other processes use it: see nvidia-smi."
    return _judged("gpu memory", finding, (used > total // 10, WARN, advice))


def check_memlock(limit: int | None, needed: int) -> Check:
    """Check `ulimit -l`; None: unlimited. `needed`: bytes that a run may lock, 0 without a GPU."""
    finding = "unlimited" if limit is None else format_bytes(limit)
    if not needed:
        return Check("ulimit -l", PASS, f"{finding}; without a GPU nothing is page-locked")
    if limit is None or limit >= needed:
        return Check("ulimit -l", PASS, finding)
    advice = (
        "NVIDIA's driver usually pins outside this limit. If pinning is refused: ulimit -l "
        "unlimited (docker run --ulimit memlock=-1)."
    )
    return Check("ulimit -l", WARN, f"{finding}, a run may lock {format_bytes(needed)}", advice)


def check_pinning(num_bytes: int, locked: bool) -> Check:
    """Check whether the driver could page-lock memory."""
    size = format_bytes(num_bytes)
    finding = f"{size} page-locked at once" if locked else f"the driver refused {size}"
    advice = "Transfers will be slow and will not overlap: check ulimit -l and the memory limit."
    return _judged("pinning", finding, (not locked, WARN, advice))


def check_host_memory(total: int, available: int) -> Check:
    """Check host memory; `total` and `available` respect all limits."""
    rooms = ", ".join(
        f"{format_count(available / size)} in {state}" for state, size in STATE_BYTES.items()
    )
    finding = f"{format_bytes(available)} of {format_bytes(total)} available: parameters {rooms}"
    advice = "Free some: other processes use half."
    return _judged("host memory", finding, (available < total // 2, WARN, advice))


def check_cgroup(limit: int | None, total: int) -> Check:
    """Check cgroups; `limit`: the smallest of this process, None without any; `total`: installed
    memory."""
    if limit is None or limit >= total:
        return Check("cgroup memory", PASS, f"no limit below {format_bytes(total)}")
    finding = f"limit {format_bytes(limit)} of {format_bytes(total)}"
    advice = "Page-locked memory counts too: raise the container's limit to use the rest."
    return Check("cgroup memory", WARN, finding, advice)


def check_cores(physical: int, logical: int, usable: int, threads: int, where: str) -> Check:
    """Check cores; `usable`: logical CPUs by affinity and quota; `where`: the reason for
    `threads`."""
    return _judged(
        "cores",
        f"{physical} physical, {logical} logical, {usable} usable; {threads} for Adam ({where})",
        (
            usable < physical,
            WARN,
            "CPU Adam could use all cores: widen the affinity, or the container's CPU quota.",
        ),
    )


def check_numa(
    nodes: Mapping[int, Collection[int]],
    cpus: Collection[int],
    memories: Collection[int],
    gpus: Sequence[int | None],
) -> Check:
    """Check whether this process may use cores and memory next to each GPU.

    Args:
        nodes: node → its CPUs.
        cpus, memories: CPUs and memory nodes that this process may use.
        gpus: node of each GPU, None if not reported.
    """
    if len(nodes) < 2:
        return Check("NUMA", PASS, "one node")
    if not gpus:
        return Check("NUMA", PASS, f"{len(nodes)} nodes, no GPU")
    locations = ", ".join(f"GPU {i} {'?' if n is None else n}" for i, n in enumerate(gpus))
    known = sorted({node for node in gpus if node is not None})
    far = [n for n in known if not set(nodes.get(n, ())) & set(cpus) or n not in memories]
    node, finding = next(iter(far), None), f"{len(nodes)} nodes; {locations}"
    if None not in gpus and far:
        finding += f"; this process may not use cores and memory of node {node}"
    return _judged(
        "NUMA",
        finding,
        (
            None in gpus,
            WARN,
            "The system does not report the node of a GPU: threads are not bound near it.",
        ),
        (far, WARN, f"Start it on that node: numactl --cpunodebind={node} --membind={node}."),
    )


def check_kernels(name: str, isa: str, why: str) -> Check:
    """Check the active CPU kernels."""
    return _judged(
        "CPU kernels",
        f"{name} {isa}".removesuffix(" -") + f": {why}",
        (name != "native", WARN, "Reinstall with a C++17 compiler."),
        (
            isa == "baseline",
            WARN,
            "This CPU has no AVX2 or NEON: its Adam is several times slower.",
        ),
    )


def check_disk(folder: str, free: int, drive: DriveRates | str | None) -> Check:
    """Check free space and speed of the folder for checkpoints.

    Args:
        drive: its rates, the error of a failed write, or None if not measured.
    """
    finding, write_gbps = f"{folder}: {format_bytes(free)} free", SLOW_DISK_GBPS
    if isinstance(drive, str):
        finding = f"{folder}: {drive}"
    elif drive is not None:
        write_gbps = drive.disk_gbps
        finding += f", written at {write_gbps:.2g} GB/s"
        if drive.disk_read_gbps:
            finding += (
                f"; state on it: read at {drive.disk_read_gbps:.2g}, written at "
                f"{drive.disk_write_gbps:.2g}, both at once at {drive.disk_both_gbps:.2g} GB/s"
            )
    else:
        finding += ", speed not measured"
    return _judged(
        "disk",
        finding,
        (
            free < LEAST_FREE_BYTES,
            FAIL,
            "It is full: free some, or give another --folder.",
        ),
        (
            isinstance(drive, str),
            FAIL,
            "Give a writable --folder, and set runs_dir to it.",
        ),
        (
            free < LITTLE_FREE_BYTES,
            WARN,
            "A checkpoint takes 12 bytes per parameter (fp32), twice while it is replaced.",
        ),
        (
            write_gbps < SLOW_DISK_GBPS,
            WARN,
            f"A checkpoint of 1B parameters (12 GB) takes {12 / max(write_gbps, 1e-3):.0f} s.",
        ),
    )


def check_speeds(machine: Machine, link_gbps: float | None, *, bf16: bool) -> list[Check]:
    """Return all checks of speeds.

    Args:
        link_gbps: limit of the GPU's link; None without a GPU, or if not reported.
        bf16: precision "auto" selects bf16.
    """
    return [
        check_bandwidth(machine.h2d_gbps, machine.d2h_gbps, machine.on_cpu, link_gbps),
        Check("DRAM", PASS, f"{machine.dram_gbps:.3g} GB/s, all kernel threads"),
        check_adam(machine),
        check_compute(machine, bf16),
    ]


def check_bandwidth(h2d: float, d2h: float, on_cpu: bool, link: float | None) -> Check:
    """Check the bandwidth of page-locked copies; on a CPU the bandwidth of copies in memory."""
    finding = f"{h2d:.3g} GB/s to the device, {d2h:.3g} back"
    if on_cpu:
        return Check("H2D, D2H", PASS, f"{finding} (copies in host memory: no GPU)")
    if link is not None and min(h2d, d2h) < LEAST_OF_LINK * link:
        advice = "Look for other traffic, another NUMA node, a switch, or an IOMMU in between."
        return Check("H2D, D2H", WARN, f"{finding}, and the link allows {link:.3g}", advice)
    return Check("H2D, D2H", PASS, f"{finding}, page-locked")


def check_adam(machine: Machine) -> Check:
    """Check nanoseconds per parameter of CPU Adam by format, and of the norm and sum of
    gradients."""
    rates = {kernel: getattr(machine, f"{kernel}_gparams") for kernel in KERNELS}
    times = [f"{kernel} {1 / rate:.3g}" for kernel, rate in rates.items() if rate]
    if not times:
        return Check("Adam", SKIP, "not measured: --quick leaves it out")
    reached = machine.fp32_gparams * FP32_TRAFFIC_BYTES / machine.dram_gbps
    copying = {state: getattr(machine, f"{state}_copying_gparams") for state in STATE_BYTES}
    slower = ", ".join(f"{state} {1 / rate:.3g}" for state, rate in copying.items() if rate)
    if slower:
        slower += f" ({machine.h2d_adam_gbps:.3g} GB/s up, {machine.d2h_adam_gbps:.3g} down)"
    return _judged(
        "Adam",
        ", ".join(times) + f" ns/param; fp32 at {reached:.0%} of the DRAM limit; while page-locked "
        f"copies run both ways: {slower or 'not measured'}",
        (
            reached < LEAST_OF_DRAM,
            WARN,
            "The cores or the kernels are the limit, not the memory: see CPU kernels, cores.",
        ),
    )


def check_compute(machine: Machine, bf16: bool) -> Check:
    """Check matrix products per precision; `bf16`: precision "auto" selects bf16."""
    kinds = (*machine.precisions, *(("fp8",) if machine.fp8_tflops else ()))
    rates = ", ".join(f"{kind} {getattr(machine, f'{kind}_tflops'):.3g}" for kind in kinds)
    return _judged(
        "compute",
        f"{rates} Tflop/s, half of it at width {machine.half_width:.0f}; device memory "
        f"{machine.hbm_gbps:.3g} GB/s",
        (
            bf16 and machine.bf16_tflops <= machine.fp32_tflops,
            WARN,
            'Training would take bf16, which is slower here: set offload.precision = "fp32".',
        ),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version such as "2.13.0+cpu"; (0,) if there are none."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (0,)
