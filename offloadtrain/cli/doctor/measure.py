"""Measures this machine's rates in seconds, as a `Machine` for `offloadtrain plan`.

[Note: What a rate is]
A rate is the median of a few repeats after a warm-up, since a plan is for the usual case. Buffers
are far larger than the caches. If the CPU computes, it stands for the device: "device
memory" and the copies "to the device" are then copies in host memory.
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offloadtrain.cli.bench.adam import SCALARS, allocate
from offloadtrain.cli.bench.disk import BOTH, READ, WRITE, drive_cases
from offloadtrain.cli.bench.rounds import Case
from offloadtrain.cli.bench.rounds import measure as measure_rounds
from offloadtrain.cli.doctor.checks import FP32_TRAFFIC_BYTES, DriveRates
from offloadtrain.hardware.cpus import cache_bytes
from offloadtrain.hardware.direct_io import THREADS, DirectFile
from offloadtrain.hardware.file_system import IN_MEMORY, kind_of
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.peak_flops import has_fp8, peak_flops
from offloadtrain.plan.costs.device_time import FLASH_BACKWARD, half_width
from offloadtrain.runtime import kernels
from offloadtrain.runtime.device_memory import bandwidth

WIDTHS = {"cuda": (2048, 8192), "cpu": (128, 1024)}
TOKENS = {"cuda": 2048, "cpu": 256}
HEAD_WIDTH = 64
HEADS = {"cuda": 32, "cpu": 4}
LENGTHS = {"cuda": 4096, "cpu": 512}
HALF_LENGTHS = {"cuda": 1000.0, "cpu": 0.0}
"""`Machine.flash_half_length`; on a CPU short sequences are not slower."""

PARAMS = {"cuda": 64 << 20, "cpu": 16 << 20}
QUICK_PARAMS, LEAST_PARAMS = 8 << 20, 1 << 20
MOST_PARAMS = 256 << 20
"""Upper limit, even if caches are larger: touching 16 GiB takes seconds."""
BYTES_PER_PARAM = 64
"""Host memory of the Adam buffers per parameter, with some margin."""
INT8_BYTES, CACHES = 7, 4
"""Bytes per parameter that Adam of the narrowest state touches, and how many times the caches'
size a case must touch, so that repeats read from memory."""

ACCUMULATE_BYTES = 10
"""Bytes per parameter of adding a 16-bit gradient to an fp32 sum."""

STATES = ("fp32", "split16", "int8")
COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
FRAGMENT_BYTES = 512 << 20
"""Device memory that the caching allocator loses to fragmentation, in bytes."""

ROUNDS, QUICK_ROUNDS = 5, 2
BATCHES, BATCH_S, QUICK_BATCH_S = 3, 0.15, 0.03

CHECKPOINT_BYTES, PIECE_BYTES = 256 << 20, 8 << 20
STATE_BYTES, DRIVE_ROUNDS = 128 << 20, 3

Say = Callable[[str], None]


def measure(
    device: torch.device,
    *,
    bf16: bool,
    host_memory: int,
    cores: int,
    drive: DriveRates | None,
    quick: bool,
    say: Say,
) -> Machine:
    """Measure all rates.

    Args:
        device: the CPU, or the first GPU, which represents all.
        bf16: the device computes in bf16 without emulation.
        drive: rates of the folder for checkpoints; None if unknown.
        quick: fewer repeats, smaller buffers, and no Adam; each measurement takes at most a second.
    """
    say("products and attention")
    computed = compute(device, bf16, QUICK_BATCH_S if quick else BATCH_S)
    say("memory and kernels")
    dram, adam = host_rates(PARAMS[device.type], quick)
    hbm = device_memory_gbps(device)
    memory = _device_memory(device) if device.type == "cuda" else {}
    say("the bus")  # last, so that the PCIe link's state is read while it is warm
    rates = _bus(device) | adam | {"dram_gbps": dram, "shared_dram_gbps": dram, "hbm_gbps": hbm}
    if device.type == "cuda" and not quick:
        say("Adam and copies at once")
        slowest = max(rates["h2d_gbps"], rates["d2h_gbps"])
        rates |= rates_at_once(PinnedCopies(device, slowest), PARAMS[device.type])
    rates |= computed | ({} if drive is None else asdict(drive))
    if device.type == "cuda":
        fastest = max(rates.get("bf16_tflops", 0.0), rates["fp16_tflops"])
        rates["half_width"] = max(rates["half_width"], half_width(fastest, hbm))
    # Rounded to three digits, since further digits are noise.
    known: dict[str, Any] = {name: float(f"{rate:.3g}") for name, rate in rates.items()} | memory
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    return Machine(gpus=gpus, host_memory=_gib(host_memory), cores=cores, **known)


def compute(device: torch.device, bf16: bool, seconds: float) -> dict[str, float]:
    """Measure products, attention and launches: the rates of `plan.costs.device_time`.

    The half-width and attention's share are measured in the training precision and used for all.
    """
    on_gpu = device.type == "cuda"
    kinds = {"bf16": torch.bfloat16} if bf16 or not on_gpu else {}
    kinds |= {"fp16": torch.float16} if on_gpu else {}
    kinds["fp32"] = torch.float32
    narrow, wide = WIDTHS[device.type]
    # Emulated bf16 would take seconds with wide matrices.
    widths = {name: narrow if name == "bf16" and not bf16 else wide for name in kinds}
    rates = {name: product_flops(device, kinds[name], widths[name], seconds) for name in kinds}
    main = next(name for name in kinds if widths[name] == wide)
    slower = product_flops(device, kinds[main], narrow, seconds)
    measured_half = fit(narrow, slower, wide, rates[main])
    limits = {name: rates[name] * (1 + measured_half / widths[name]) for name in kinds}
    tflops = {f"{name}_tflops": limit / 1e12 for name, limit in limits.items()}
    if on_gpu and has_fp8(torch.cuda.get_device_name(device)):
        # As in `Machine.flops`: besides its FLOPs a product takes as long as in 16 bits.
        beside_s = measured_half / wide / limits[main]
        tflops["fp8_tflops"] = 1 / (1 / fp8_flops(device, wide, seconds) - beside_s) / 1e12
    length = HALF_LENGTHS[device.type]
    return tflops | {
        "half_width": measured_half,
        "flash_half_length": length,
        "flash_share": flash_flops(device, kinds[main], length, seconds) / limits[main],
        "launch_us": launch_us(device, seconds),
    }


def fit(narrow: int, slower: float, wide: int, faster: float) -> float:
    """Return the half-width of the curve limit * w / (w + half_width) through two points.

    If noise rules out such a curve, the nearest extreme is used: no gain with width, or half of the
    limit at the wide one.
    """
    if slower >= faster:
        return 0.0
    slope = (wide / faster - narrow / slower) / (wide - narrow)
    half_width = wide * (1 / slope / faster - 1) if slope > 0 else wide
    return min(half_width, float(wide))


def product_flops(device: torch.device, dtype: torch.dtype, width: int, seconds: float) -> float:
    """Measure the FLOP/s of products with a square weight, for about `seconds`."""
    tokens = TOKENS[device.type]
    x_TD = torch.randn(tokens, width, device=device, dtype=dtype)
    weight_DD = torch.randn(width, width, device=device, dtype=dtype)
    out_TD = torch.empty_like(x_TD)
    took = _seconds(device, lambda: torch.mm(x_TD, weight_DD, out=out_TD), seconds)
    return 2.0 * tokens * width * width / took


def fp8_flops(device: torch.device, width: int, seconds: float) -> float:
    """Measure the FLOP/s of FP8 products with a square weight and a scale per tensor, in torchao's
    mix: forward with fast sums, and twice as many backward products without. Casts are not
    included."""
    tokens, scale = TOKENS[device.type], torch.ones((), device=device)
    x_TD = torch.randn(tokens, width, device=device).to(torch.float8_e4m3fn)
    weight_DD = torch.randn(width, width, device=device).to(torch.float8_e4m3fn).t()

    def took(fast: bool) -> float:
        def product() -> object:
            return torch._scaled_mm(
                x_TD, weight_DD, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return _seconds(device, product, seconds)

    return 3 * 2.0 * tokens * width * width / (took(True) + 2 * took(False))


def flash_flops(
    device: torch.device, dtype: torch.dtype, half_length: float, seconds: float
) -> float:
    """Measure the FLOP/s of causal attention, forward and backward, in long sequences."""
    heads, length = HEADS[device.type], LENGTHS[device.type]
    q_BNTH, k_BNTH, v_BNTH = (
        torch.randn(1, heads, length, HEAD_WIDTH, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    ones_BNTH = torch.ones_like(q_BNTH)

    def run() -> None:
        mixed_BNTH = torch.nn.functional.scaled_dot_product_attention(
            q_BNTH, k_BNTH, v_BNTH, is_causal=True
        )
        mixed_BNTH.backward(ones_BNTH)

    flops = (1 + FLASH_BACKWARD) * 2.0 * heads * HEAD_WIDTH * length * length
    return flops / _seconds(device, run, seconds) * (length + half_length) / length


def launch_us(device: torch.device, seconds: float) -> float:
    """Measure the microseconds in which the host launches an operation on one element."""
    element = torch.zeros(1, device=device)
    return 1e6 * _seconds(device, lambda: element.add_(1.0), seconds)


def device_memory_gbps(device: torch.device) -> float:
    """Measure the bandwidth of a copy within the device's memory."""
    nbytes = COPY_BYTES[device.type]
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(device, partial(target.copy_, source), 0.0) / 1e9


def host_rates(numel: int, quick: bool) -> tuple[float, dict[str, float]]:
    """Measure (GB/s of DRAM, Gparam/s of each kernel) with all kernel threads, alternating."""
    backend = kernels.backend().name
    least_bytes = FP32_TRAFFIC_BYTES if quick else INT8_BYTES
    numel = fitting(QUICK_PARAMS if quick else numel, available_bytes(), cache_bytes(), least_bytes)
    native = backend == "native"
    # Only the native kernels run int8 at a useful speed.
    b = allocate(numel, STATES[:1] if quick else STATES if native else STATES[:2])
    accumulate = partial(kernels.accumulate, b.wide, b.grad, False)
    # A loop at the memory limit, in place like Adam: a copy would also read the overwritten
    # memory, which is not counted.
    traffic = partial(kernels.traffic, b.fp32, b.grad, b.working)
    cases: dict[str, Case] = {"limit": traffic if native else accumulate}
    if not quick:
        step = partial(kernels.update, scalars=SCALARS, layout=b.layout)
        cases |= {
            name: partial(step, state, b.grad, working=b.working if name == "fp32" else None)
            for name, state in b.states.items()
        }
        cases["norm"] = partial(kernels.sum_squares_many, b.grad, b.layout, b.squares)
        cases["accumulate"] = accumulate
    measured = measure_rounds(cases, QUICK_ROUNDS if quick else ROUNDS, _silent)
    medians = {name: statistics.median(times) for name, times in measured.items()}
    nbytes = FP32_TRAFFIC_BYTES if native else ACCUMULATE_BYTES
    dram = nbytes * numel / medians.pop("limit") / 1e9
    return dram, {f"{kernel}_gparams": numel / took / 1e9 for kernel, took in medians.items()}


class PinnedCopies:
    """Page-locked copies up and down at the same time, each direction on its own stream."""

    def __init__(self, device: torch.device, gbps: float) -> None:
        """`gbps`: bandwidth of one direction alone."""
        self._gbps, host, there = gbps, [], []
        for _ in range(2):
            host.append(torch.zeros(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))
            there.append(torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device))
        self._pairs = ((host[0], there[0]), (there[1], host[1]))
        self._streams = [torch.cuda.Stream(device) for _ in self._pairs]
        self._ends: list[list[torch.cuda.Event]] = []

    def start(self, seconds: float) -> None:
        """Launch copies that last at least this long."""
        count = math.ceil(seconds * self._gbps * 1e9 / PIECE_BYTES)
        self._ends = [[], []]
        for _ in range(count):
            for stream, pair, ends in zip(self._streams, self._pairs, self._ends, strict=True):
                with torch.cuda.stream(stream):
                    pair[1].copy_(pair[0], non_blocking=True)
                ends.append(stream.record_event())

    def finished_bytes(self) -> tuple[int, int]:
        """Return the bytes copied (up, down) since `start`."""
        up, down = (sum(end.query() for end in ends) for ends in self._ends)
        return up * PIECE_BYTES, down * PIECE_BYTES

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def rates_at_once(copies: PinnedCopies, numel: int) -> dict[str, float]:
    """Measure Adam with all kernel threads while copies run both ways, and these copies: medians
    over the rounds; for copies, over all formats."""
    states = STATES if kernels.backend().name == "native" else STATES[:1]
    b = allocate(fitting(numel, available_bytes(), cache_bytes()), states)
    rates, ways = {}, (list[float](), list[float]())
    for name in states:
        working = b.working if name == "fp32" else None
        step = partial(kernels.update, b.states[name], b.grad, SCALARS, layout=b.layout)
        update = partial(step, working=working)
        alone_s = _seconds(torch.device("cpu"), update, 0.0)
        seconds = []
        for _ in range(ROUNDS):
            copies.start(2 * alone_s)
            # Some copies have already finished while others were launched.
            before, began = copies.finished_bytes(), time.perf_counter()
            update()
            seconds.append(time.perf_counter() - began)
            for way, earlier, later in zip(ways, before, copies.finished_bytes(), strict=True):
                way.append((later - earlier) / seconds[-1] / 1e9)
            copies.wait()
        rates[f"{name}_copying_gparams"] = b.grad.numel() / statistics.median(seconds) / 1e9
    up, down = map(statistics.median, ways)
    return rates | {"h2d_adam_gbps": up, "d2h_adam_gbps": down}


def fitting(numel: int, available: int, cache: int, least_bytes: int = INT8_BYTES) -> int:
    """Return the number of parameters to measure: `numel`, or more if the caches would hold them;
    halved until the buffers take at most a quarter of the available memory.

    Args:
        cache: total bytes of the caches.
        least_bytes: bytes per parameter of the case that touches least.
    """
    beyond_caches = -(-CACHES * cache // least_bytes // LEAST_PARAMS) * LEAST_PARAMS
    numel = max(numel, min(beyond_caches, MOST_PARAMS))
    while numel > LEAST_PARAMS and numel * BYTES_PER_PARAM > available // 4:
        numel = max(numel // 2, LEAST_PARAMS)
    return numel


def drive_rates(folder: Path) -> DriveRates:
    """Measure durable writes and, unless the folder is in host memory, transfers of state.

    Raises:
        OSError: the folder cannot be written, or is full.
        DiskError: the same, for files of state.
    """
    checkpoints = checkpoint_gbps(folder)
    if kind_of(folder) in IN_MEMORY:
        return DriveRates(disk_gbps=checkpoints)
    with drive_cases(str(folder), STATE_BYTES) as cases:
        seconds = measure_rounds(cases, DRIVE_ROUNDS, _silent)
    read, write, both = (
        ways * STATE_BYTES / statistics.median(seconds[case]) / 1e9
        for case, ways in ((READ, 1), (WRITE, 1), (BOTH, 2))
    )
    return DriveRates(
        disk_gbps=checkpoints, disk_read_gbps=read, disk_write_gbps=write, disk_both_gbps=both
    )


def checkpoint_gbps(folder: Path) -> float:
    """Measure durable writes as a checkpoint makes them: O_DIRECT, several at once.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))
    piece[:] = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as made:
        file = DirectFile.create(Path(made) / "written", CHECKPOINT_BYTES)
        try:
            began = time.perf_counter()
            with ThreadPoolExecutor(THREADS) as pool:
                starts = range(0, CHECKPOINT_BYTES, PIECE_BYTES)
                list(pool.map(lambda start: file.write(piece, start), starts))
            file.sync()
            return CHECKPOINT_BYTES / (time.perf_counter() - began) / 1e9
        finally:
            file.close()


def _device_memory(device: torch.device) -> dict[str, Any]:
    """Return the GPU's name, memory and reserved memory, after context and libraries are loaded."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use = total - free - torch.cuda.memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    return {
        "gpu": name,
        "gpu_memory": _gib(total),
        "gpu_reserved": _gib(in_use + FRAGMENT_BYTES),
        "peak_tflops": (peak_flops(name, "fp16") or 0.0) / 1e12,
    }


def _bus(device: torch.device) -> dict[str, float]:
    """Measure the links of one GPU, of all together, and between two; with a single GPU, a
    GPU-to-GPU link is assumed to go through the host."""
    copies = bandwidth(device)
    rates = {
        "h2d_gbps": copies.h2d_gbps,
        "d2h_gbps": copies.d2h_gbps,
        "host_link_gbps": copies.h2d_gbps,
        "gpu_link_gbps": min(copies.h2d_gbps, copies.d2h_gbps),
    }
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count < 2:
        return rates
    nbytes, devices = COPY_BYTES["cpu"], [torch.device("cuda", i) for i in range(count)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for device in devices]
    here = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in devices]

    def up() -> None:
        for source, target in zip(here, there, strict=True):
            target.copy_(source, non_blocking=True)

    across = partial(there[1].copy_, there[0], non_blocking=True)
    return rates | {
        "host_link_gbps": nbytes * count / _seconds(device, up, 0.0) / 1e9,
        "gpu_link_gbps": nbytes / _seconds(device, across, 0.0) / 1e9,
    }


def _seconds(device: torch.device, run: Callable[[], object], batch_s: float) -> float:
    """Return the median seconds of one run, in batches of about `batch_s`, after a warm-up."""
    _batch(device, run, 1)
    once = _batch(device, run, 1)
    count = max(int(batch_s / once), 1)
    return statistics.median(_batch(device, run, count) for _ in range(BATCHES))


def _batch(device: torch.device, run: Callable[[], object], count: int) -> float:
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return (time.perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _silent(number: int) -> None:
    """Ignore the progress of rounds."""
