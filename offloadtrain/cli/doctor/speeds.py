"""Checks of the measurements."""

from __future__ import annotations

from offloadtrain.cli.doctor.checks import Check, Status
from offloadtrain.hardware.machine import Machine

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe generation → 10^9 bytes per second of one lane, one way, before protocol."""

LEAST_OF_LINK, LEAST_OF_DRAM = 0.6, 0.5
FP32_TRAFFIC_BYTES = 28
"""Bytes per parameter of fp32 Adam: gradient, master weight and moments read; all but the first
written, and the working weight."""


def check_speeds(machine: Machine, link_gbps: float | None, *, bf16: bool) -> list[Check]:
    """Return all checks of speeds.

    Args:
        link_gbps: limit of the GPU's link; None: no GPU, or not reported.
        bf16: training selects it by default.
    """
    return [
        check_bandwidth(machine.h2d_gbps, machine.d2h_gbps, machine.on_cpu, link_gbps),
        Check("DRAM", Status.PASS, f"{machine.dram_gbps:.3g} GB/s, all kernel threads"),
        check_adam(machine),
        check_compute(machine, bf16),
    ]


def link_gbps(generation: int | None, width: int | None) -> float | None:
    """Return the bandwidth of a PCIe link; None if not reported."""
    if generation is None or width is None or generation not in LANE_GBPS:
        return None
    return LANE_GBPS[generation] * width


def check_bandwidth(h2d: float, d2h: float, on_cpu: bool, link: float | None) -> Check:
    """Check the bandwidth of page-locked copies; on a CPU the bandwidth of copies in memory."""
    finding = f"{h2d:.3g} GB/s to the device, {d2h:.3g} back"
    if on_cpu:
        return Check("H2D, D2H", Status.PASS, f"{finding} (copies in host memory: no GPU)")
    if link is not None and min(h2d, d2h) < LEAST_OF_LINK * link:
        advice = "Look for other traffic, another NUMA node, a switch, or an IOMMU in between."
        finding += f", and the link allows {link:.3g}"
        return Check("H2D, D2H", Status.WARN, finding, advice)
    return Check("H2D, D2H", Status.PASS, f"{finding}, page-locked")


KERNELS = ("fp32", "split16", "int8", "norm", "accumulate")


def check_adam(machine: Machine) -> Check:
    """Check the time per parameter of CPU Adam, per format, and of norm and sum of gradients."""
    rates = {kernel: getattr(machine, f"{kernel}_gparams") for kernel in KERNELS}
    times = [f"{kernel} {1 / rate:.3g}" for kernel, rate in rates.items() if rate]
    if not times:
        return Check("Adam", Status.PASS, "not measured with --quick")
    reached = machine.fp32_gparams * FP32_TRAFFIC_BYTES / machine.dram_gbps
    finding = ", ".join(times) + f" ns/param; fp32 at {reached:.0%} of the DRAM limit"
    if reached < LEAST_OF_DRAM:
        advice = "The cores or the kernels are the limit, not the memory: see CPU kernels, cores."
        return Check("Adam", Status.WARN, finding, advice)
    return Check("Adam", Status.PASS, finding)


def check_compute(machine: Machine, bf16: bool) -> Check:
    """Check matrix multiplications per precision; `bf16`: training selects it by default."""
    rates = ", ".join(f"{p} {getattr(machine, f'{p}_tflops'):.3g}" for p in machine.precisions)
    finding = f"{rates} Tflop/s, half of it at width {machine.half_width:.0f}"
    finding += f"; device memory {machine.hbm_gbps:.3g} GB/s"
    if bf16 and machine.bf16_tflops <= machine.fp32_tflops:
        advice = 'Training would take bf16, which is slower here: set offload.precision = "fp32".'
        return Check("compute", Status.WARN, finding, advice)
    return Check("compute", Status.PASS, finding)
