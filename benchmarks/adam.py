"""CPU Adam against the traffic limit and against torch, interleaved in one process.

    python -m benchmarks.adam [--n 16M] [--threads 1,2] [--rounds 11]

Memory bandwidth on a shared machine changes by a factor of two within the hour. Each round
therefore runs every case once, and a ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.traffic import Traffic
from offloadtrain import kernels
from offloadtrain.kernels import AdamScalars, Backend

SCALARS = AdamScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step=10, grad_scale=0.5)
STAGGER_BYTES = 4096 + 256  # streams a power of two apart run up to three times slower
# torch's threads spin for a while after their last loop, which would slow the next case.
SETTLE_S = 0.02
LIMIT, STEP, PATH = "traffic limit", "torch fused, step alone", "torch fused, whole path"
Case = Callable[[], object]


@dataclass(frozen=True)
class Buffers:
    """One bucket: fp32 state, bf16 gradients in, bf16 weights out, fp32 gradients for torch."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    working: Tensor
    grad_fp32: Tensor


def allocate(numel: int) -> Buffers:
    kinds = [torch.float32] * 3 + [torch.bfloat16] * 2 + [torch.float32]
    spans = [(numel * kind.itemsize + 63) // 64 * 64 + STAGGER_BYTES for kind in kinds]
    memory = torch.empty(sum(spans), dtype=torch.uint8)
    kernels.first_touch(memory)
    starts = [sum(spans[:i]) for i in range(len(spans))]
    pieces = [
        memory[start : start + numel * kind.itemsize].view(kind)
        for start, kind in zip(starts, kinds, strict=True)
    ]
    made = Buffers(*pieces)
    for tensor in (made.master, made.grad):
        tensor.normal_()
    made.exp_avg_sq.fill_(1.0)
    return made


def native_case(buffers: Buffers, backend: Backend) -> Case:
    b = buffers

    def run() -> None:
        with kernels.use(backend):
            kernels.adam(b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.working, SCALARS)

    return run


def torch_cases(buffers: Buffers) -> dict[str, Case]:
    b, step = buffers, torch.tensor(10.0)

    def fused() -> None:
        torch._fused_adamw_(
            [b.master],
            [b.grad_fp32],
            [b.exp_avg],
            [b.exp_avg_sq],
            [],
            [step],
            lr=SCALARS.lr,
            beta1=SCALARS.beta1,
            beta2=SCALARS.beta2,
            weight_decay=SCALARS.weight_decay,
            eps=SCALARS.eps,
            amsgrad=False,
            maximize=False,
        )

    def path() -> None:
        b.grad_fp32.copy_(b.grad)
        b.grad_fp32.mul_(SCALARS.grad_scale)
        fused()
        b.working.copy_(b.master)

    return {STEP: fused, PATH: path}


def cases(buffers: Buffers, threads: int) -> dict[str, Case]:
    """The limit, our backends, and torch. Plain-torch kernels are left out: they are the oracle."""
    halves = (buffers.grad.view(torch.uint16), buffers.working.view(torch.uint16))
    floats = (buffers.master, buffers.exp_avg, buffers.exp_avg_sq)
    arrays = tuple(tensor.numpy() for tensor in (*floats, *halves))
    found: dict[str, Case] = {LIMIT: Traffic(arrays, threads)}
    for backend in kernels.available():
        if backend.name != "torch" and backend.isa != "baseline":
            name = f"{backend.name} {backend.isa}".removesuffix(" -")
            found[name] = native_case(buffers, replace(backend, threads=threads))
    return found | torch_cases(buffers)


def measure(found: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Return seconds by case and round; a first round compiles and faults, and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for counted in [False] + [True] * rounds:
        for name, run in found.items():
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            run()
            if counted:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def table(seconds: dict[str, list[float]], numel: int, threads: int) -> None:
    for name, row in seconds.items():
        ns = statistics.median(row) / numel * 1e9
        times_limit, path = ratio(row, seconds[LIMIT]), ratio(seconds[PATH], row)
        print(f"{name:26} {threads:7} {ns:9.3f} {times_limit:8.2f} {path:13.2f}")


def dispatch_us(backend: Backend) -> float:
    """Return the time of a call on a bucket of 16 elements: checks, dispatch and little else."""
    small, calls = allocate(16), 5000
    b = small
    with kernels.use(backend):
        start = time.perf_counter()
        for _ in range(calls):
            kernels.adam(b.master, b.exp_avg, b.exp_avg_sq, b.grad, b.working, SCALARS)
        return (time.perf_counter() - start) / calls * 1e6


def count(text: str) -> int:
    """Read 16M as 16 * 2^20."""
    return int(text[:-1]) << 20 if text.endswith("M") else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adam")
    parser.add_argument("--n", type=count, default="16M")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    buffers = allocate(asked.n)
    print(f"{asked.n} parameters, {asked.rounds} rounds; torch {torch.__version__}")
    print(kernels.backend())
    print(f"{'case':26} threads  ns/param  x limit  x torch path")
    for threads in map(int, asked.threads.split(",")):
        torch.set_num_threads(threads)
        table(measure(cases(buffers, threads), asked.rounds), asked.n, threads)
    print(f"dispatch of one bucket: {dispatch_us(kernels.available()[0]):.1f} us")


if __name__ == "__main__":
    main()
