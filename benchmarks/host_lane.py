"""What lies between two buckets of Adam on the host lane, while the training thread does its work.

    python -m benchmarks.host_lane

Prints, for layers of several widths, the median and the 90th percentile of the time from the end of
one update to the begin of the next, both queued, and its share of the lane's time: for the native
queue and for a thread of Python, alternated; while the training thread launches the next forward,
and while it runs Python (as a loop that prepares a batch does).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.runtime.lanes import Interval, Lane, on_lanes, threads
from offloadtrain.runtime.lanes.queues import Failure, LaneQueue, PythonQueue, make_host_queue
from offloadtrain.runtime.lanes.threads import ThreadLanes

WIDTHS = (256, 512, 768)
DEPTH, STEPS, ROUNDS = 12, 4, 3
KINDS: dict[str, Callable[[Failure], LaneQueue]] = {
    "native queue": make_host_queue,
    "thread of Python": lambda failure: PythonQueue(failure, None),
}


class Layer(nn.Module):
    """Four matrices, as many operations to launch as in a small transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.out(self.qkv(self.norm(x))))))
        return found


@dataclass(slots=True)
class Seen:
    """Milliseconds."""

    gaps: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def add(self, timeline: Sequence[Interval]) -> None:
        """The updates of one step, all queued when its norm was known."""
        updates = sorted(
            (i for i in timeline if i.lane == Lane.HOST and i.name.startswith("adam")),
            key=lambda i: i.start_ms,
        )
        for before, after in itertools.pairwise(updates):
            self.gaps.append(after.start_ms - before.start_ms - before.duration_ms)
            self.busy.append(before.duration_ms)

    def row(self) -> str:
        share = sum(self.gaps) / (sum(self.gaps) + sum(self.busy))
        high = sorted(self.gaps)[int(0.9 * len(self.gaps))]
        middle = statistics.median(self.gaps)
        update = statistics.median(self.busy)
        return f"{update:>9.2f} {1e3 * middle:>8.0f} {1e3 * high:>8.0f} {100 * share:>8.1f}"


def run_python(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def measure(width: int, kind: str, python: bool, seen: Seen) -> None:
    """A few steps; the updates of one are timed while the training thread goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(DEPTH)))
    with patch.object(threads, "make_host_queue", KINDS[kind]):
        lanes = ThreadLanes()
    with on_lanes(lanes):
        optimizer = ot.offload(model, device="cpu", precision="bf16", clip_norm=1.0)
    x = torch.randn(4, width, dtype=torch.bfloat16)
    loss = model(x).float().square().mean()
    for step in range(STEPS):
        optimizer.backward(loss)
        lanes.start_timeline()
        optimizer.step()
        if python:
            run_python(0.2)
        loss = model(x).float().square().mean()
        timeline = lanes.end_timeline().intervals
        if step > 0:
            seen.add(timeline)
    optimizer.close()


def main() -> None:
    torch.set_num_threads(1)
    print("microseconds between two updates on the host lane\n")
    head = f"{'training':<8} {'width':>5} {'host lane':<17}"
    print(f"{head} {'update ms':>9} {'median':>8} {'p90':>8} {'% lost':>8}")
    for python, width in itertools.product((False, True), WIDTHS):
        seen = {kind: Seen() for kind in KINDS}
        for _, kind in itertools.product(range(ROUNDS), KINDS):
            measure(width, kind, python, seen[kind])
        for kind in KINDS:
            what = "Python" if python else "forward"
            print(f"{what:<8} {width:>5} {kind:<17} {seen[kind].row()}")


if __name__ == "__main__":
    main()
