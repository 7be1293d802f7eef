"""The machine of a plan: a few constants, measured by `offloadtrain doctor` or shipped.

A machine file is TOML with one key per field of `Machine`. Shipped files are in
`offloadtrain/hardware/machines`; their first line is a title.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offloadtrain.config import toml
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.offload import Precision
from offloadtrain.config.units import parse_bytes

_FOLDER = Path(__file__).parent / "machines"
_LEAST, _MOST = 1e-6, 1e9
"""Range of the numbers of a machine, except 0: it keeps the times of a plan finite."""


class MachineError(ConfigError):
    """The machine is unknown, or its file breaks a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One or more equal hosts, each with `gpus` GPUs. Rates are sustained, not peak.

    A rate of 0 means unsupported: bf16 on a V100, or links between hosts on a single host.

    Attributes:
        gpu: torch's name of the device; empty: the CPU computes.
        gpus: GPUs per host; if the CPU computes, the largest number of ranks.
        gpu_memory: memory of one GPU, such as "32 GiB"; empty if the CPU computes.
        gpu_reserved: GPU memory unavailable to tensors: context, libraries, fragments.
        host_memory: memory of one host.
        host_reserved: memory of a host that other programs use, for example a desktop.
        peak_tflops: dense 16-bit rate of the data sheet, the base of MFU. 0: no MFU.
        bf16_tflops, fp16_tflops, fp32_tflops: sustained rates of products of large matrices.
        fp8_tflops: the same in FP8, without the casts to FP8; 0: unsupported or not measured.
        half_width: geometric mean of a weight's sides at which a library's products reach half of
            these rates: the rate is `tflops * w / (w + half_width)`.
        flash_share: rate of flash attention in long sequences, as a share of the rate of products.
        flash_half_length: sequence length with half of this rate. The defaults of both are an
            A100's (FlashAttention-2, arXiv:2307.08691, figures 4 to 6, causal).
        launch_us: microseconds that the host needs to launch an operation of the device.
        power_w: power limit of one GPU, in watts; 0: no limit below `full_power_w`.
        full_power_w: power at which the rates above hold. Below it they fall with the square root
            of the power, which grows with the clock and the square of the voltage, and the voltage
            falls with the clock. The memory's clock and the extra time of narrow products stay.
        hbm_gbps: bandwidth of the device's own memory, 10^9 bytes per second, as all rates below.
        h2d_gbps, d2h_gbps: page-locked copies, while no other GPU of the host copies.
        host_link_gbps: copies of all GPUs of a host together, one way.
        gpu_link_gbps: bandwidth of one GPU in a collective among GPUs of its host.
        node_link_gbps: bandwidth of one host in a collective among hosts.
        dram_gbps: memory bandwidth of all cores together.
        shared_dram_gbps: the same if several ranks divide the cores.
        numa_nodes: nodes of one host, with GPUs on each. The kernels of a rank are bound to its
            GPU's node, so a single rank has the cores and the memory of one node.
        cores: physical cores of one host.
        fp32_gparams, split16_gparams, int8_gparams: measured CPU Adam of all cores, 10^9
            parameters per second; 0: derived from `dram_gbps`.
        fp32_copying_gparams, split16_copying_gparams, int8_copying_gparams: the same while
            page-locked copies run both ways; 0: not measured, and copies do not slow Adam.
        h2d_adam_gbps, d2h_adam_gbps: rates of these copies; 0: not measured, and Adam does not slow
            them.
        norm_gparams, accumulate_gparams: measured on all cores, 10^9 parameters per second: squares
            of 16-bit gradients, and their sum in fp32; 0: not measured, memory is the bound.
        disk_gbps: write speed of a checkpoint; 0: unknown.
        disk_read_gbps, disk_write_gbps: rates of the drive for state on the disk, each alone,
            without the page cache; 0: unknown.
        disk_both_gbps: sum of both rates at the same time; 0: the rates do not affect each other.
        disk_tbw: rating of this drive, in 10^12 bytes written; 0: unknown.
    """

    gpu: str = ""
    gpus: int = 1
    gpu_memory: str = ""
    gpu_reserved: str = ""
    host_memory: str
    host_reserved: str = ""
    peak_tflops: float = 0.0
    bf16_tflops: float = 0.0
    fp16_tflops: float = 0.0
    fp32_tflops: float
    fp8_tflops: float = 0.0
    half_width: float = 0.0
    flash_share: float = 0.8
    flash_half_length: float = 1000.0
    launch_us: float = 0.0
    power_w: float = 0.0
    full_power_w: float = 0.0
    hbm_gbps: float
    h2d_gbps: float
    d2h_gbps: float
    host_link_gbps: float
    gpu_link_gbps: float
    node_link_gbps: float = 0.0
    dram_gbps: float
    shared_dram_gbps: float
    numa_nodes: int = 1
    cores: int
    fp32_gparams: float = 0.0
    split16_gparams: float = 0.0
    int8_gparams: float = 0.0
    fp32_copying_gparams: float = 0.0
    split16_copying_gparams: float = 0.0
    int8_copying_gparams: float = 0.0
    h2d_adam_gbps: float = 0.0
    d2h_adam_gbps: float = 0.0
    norm_gparams: float = 0.0
    accumulate_gparams: float = 0.0
    disk_gbps: float = 0.0
    disk_read_gbps: float = 0.0
    disk_write_gbps: float = 0.0
    disk_both_gbps: float = 0.0
    disk_tbw: float = 0.0

    @property
    def gpu_memory_bytes(self) -> int:
        return parse_bytes(self.gpu_memory or self.host_memory)

    @property
    def gpu_reserved_bytes(self) -> int:
        return parse_bytes(self.gpu_reserved) if self.gpu_reserved else 0

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of a host without the reserved bytes."""
        return max(parse_bytes(self.host_memory) - self.host_reserved_bytes, 0)

    @property
    def host_reserved_bytes(self) -> int:
        return parse_bytes(self.host_reserved) if self.host_reserved else 0

    @property
    def on_cpu(self) -> bool:
        return not self.gpu

    def flops(self, precision: str, width: float) -> float:
        """Return FLOPs per second of a product with a weight of this width (`half_width`). The
        extra time of narrow products does not shrink in FP8.

        Raises:
            MachineError: if the machine does not compute in this precision.
        """
        best: float = getattr(self, f"{precision}_tflops")
        if not best:
            raise MachineError(
                f"{self.gpu or 'this CPU'} does not compute in {precision}: set "
                f"offload.precision = {' or '.join(self.precisions)}"
            )
        half_width = self.half_width * (best / self.bf16_tflops if precision == "fp8" else 1.0)
        return 1e12 * best * width / (width / self._power_share + half_width)

    def check_has(self, gpus: int) -> None:
        """Raise MachineError if the machine has fewer GPUs and no link to other hosts."""
        if gpus > self.gpus and not self.node_link_gbps:
            raise MachineError(
                f"{gpus} GPUs were requested, but the machine has {self.gpus} on its only host: "
                "use fewer, or a --machine file with more GPUs or with node_link_gbps"
            )

    @property
    def _power_share(self) -> float:
        if not self.power_w or self.power_w >= self.full_power_w:
            return 1.0
        return float((self.power_w / self.full_power_w) ** 0.5)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The supported precisions, by key."""
        known: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
        return tuple(p for p in known if getattr(self, f"{p}_tflops"))

    @property
    def auto_precision(self) -> Precision:
        """The precision selected by "auto"; a CPU with slow bf16 uses fp32."""
        if self.on_cpu and self.bf16_tflops <= self.fp32_tflops:
            return "fp32"
        return self.precisions[0]


def shipped() -> dict[str, Path]:
    """Return the shipped machine files by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def find(name: str) -> tuple[str, Machine]:
    """Return (name, machine) of a shipped machine by name, or of a machine file by path.

    Raises:
        MachineError: if there is neither, or the file breaks a rule.
    """
    path, files = Path(name), shipped()
    if name in files:
        path = files[name]
    elif path.suffix != ".toml" and not os.path.exists(path):  # Path.exists raises for some names
        raise MachineError(
            f"{name}: no such file, and no machine of this name{toml.nearest(name, files) or '.'} "
            f"Known: {', '.join(files)}; or measure this one: offloadtrain doctor"
        )
    try:
        text = toml.read(path)
    except ConfigError as error:
        raise MachineError(*error.problems) from None
    return path.stem, loads(text, str(path))


def loads(text: str, origin: str) -> Machine:
    """Read a machine from TOML.

    Raises:
        MachineError: with every broken rule.
    """
    try:
        kinds = toml.field_kinds(Machine)
        job = toml.parse(text, origin, list(kinds))
        values = toml.read_table(job, kinds, job.tables)
        job.problems += [f"{key} is missing" for key in toml.missing_fields(Machine, job.tables)]
        job.problems += _problems(values)
        job.raise_problems()
        return Machine(**values)
    except ConfigError as error:
        raise MachineError(*error.problems) from None


def dump(machine: Machine, title: str) -> str:
    """Return TOML that `loads` reads back to an equal machine; `title` becomes its first line."""
    values = {f.name: getattr(machine, f.name) for f in fields(Machine)}
    return f"# {title}\n{toml.emit(values)}"


def _problems(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        least = 1 if key in ("gpus", "numa_nodes", "cores") else 0
        if isinstance(value, str) and key != "gpu":
            yield from _size_problems(key, value)
        elif not isinstance(value, str) and value < least:
            yield f"{key} = {value} is too small"
        elif not isinstance(value, str) and value and not _LEAST <= value <= _MOST:
            yield f"{key} = {value} is not from {_LEAST:g} to {_MOST:g}: check its unit"
    if values.get("gpu") and not values.get("gpu_memory"):
        yield "gpu_memory is missing: state the memory of the GPU"
    if values.get("gpu_memory") and not values.get("gpu"):
        yield "gpu is missing: name the GPU, or leave out gpu_memory, and the CPU computes"
    needed = (
        "fp32_tflops",
        "flash_share",
        "hbm_gbps",
        "h2d_gbps",
        "d2h_gbps",
        "host_link_gbps",
        "gpu_link_gbps",
    )
    for key in (*needed, "dram_gbps", "shared_dram_gbps"):
        if values.get(key) == 0:
            yield f"{key} = 0 must be above 0"


def _size_problems(key: str, value: str) -> Iterator[str]:
    if not value and key != "host_memory":
        return
    try:
        if not parse_bytes(value):
            raise ValueError(f"'{value}' is nothing")
    except ValueError as error:
        yield f"{key}: {error}"
