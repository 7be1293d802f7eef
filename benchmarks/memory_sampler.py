"""What the memory sampler costs, in CPU time of its own thread.

    python -m benchmarks.memory_sampler [--seconds 20]

Prints the share of a core at the trainer's rate, inside sampled steps and outside, and the bytes
that an hour of it adds to the log. On a GPU the allocator and the driver are read too.
"""

from __future__ import annotations

import argparse
import threading
import time
from functools import partial

import torch

from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.memory_sampler import MemorySampler
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.runtime.device_memory import AllocatorCounters
from offloadtrain.train.log.run_memory import gpu_uuid


def thread_cpu_s(thread: int) -> float:
    """CPU time of a thread of this process."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def measure(seconds: float, *, follow: bool) -> tuple[float, int]:
    """Percent of a core, and bytes of an hour's records."""
    records: list[schema.Event] = []
    counters = None
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        torch.zeros(1 << 20, device=device)
        counters = AllocatorCounters(device, partial(Nvml().memory_free, gpu_uuid(device)))
    sampler = MemorySampler(records.append)
    sampler.begin(read_device=counters.read if counters else None, pinned=lambda: 0)
    sampler.step_begins(1, follow=follow)
    (thread,) = [t.ident for t in threading.enumerate() if t.name == "memory-sampler"]
    assert thread is not None
    time.sleep(1.0)
    spent, began = thread_cpu_s(thread), time.perf_counter()
    time.sleep(seconds)
    share = 100 * (thread_cpu_s(thread) - spent) / (time.perf_counter() - began)
    sampler.close()
    size = sum(len(log_lines.to_line(one, 0, time.time(), time.monotonic_ns())) for one in records)
    return share, round(size / len(records) * 1800)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    for name, follow in (("between", False), ("inside a sampled step", True)):
        share, size = measure(seconds, follow=follow)
        print(f"{name:<22} {share:5.2f} % of a core, {size / 1e6:.2f} MB of log per hour")


if __name__ == "__main__":
    main()
