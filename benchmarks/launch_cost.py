"""Instructions of a step over the lanes of a GPU, where no GPU is.

    python -m benchmarks.launch_cost [--layers 24]
    python -m benchmarks.launch_cost --time [--layers 24]

The real CUDA lanes run over streams and events that do nothing. valgrind counts what two runs of
different length execute, on all threads; the difference is a step's. A machine that is busy with
other work changes nothing in it. "plain" is forward and backward of the model without the engine.
With `--time` all cases take steps in turn in one process, and the training thread's CPU time beyond
that of the plain step of the same round is printed, in milliseconds per layer. "torch's checkpoint"
is the plain step with each layer under `torch.utils.checkpoint`: what recompute takes at least.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

WARM, ROUNDS = 8, 25
SHORT, LONG = 3, 9
"""Steps of the two runs, after as many that are not counted as `WARM` says."""
OPTIONS: dict[str, dict[str, Any]] = {
    "device": {},
    "streamed": {"working": "host"},
    "streamed, recompute": {"working": "host", "activation": "recompute"},
}
CHECKPOINT = "torch's checkpoint"
COUNT = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


class Event:
    """Happens at once."""

    cuda_event = 1 << 32
    """An address whose low half is 0: see `_runs`."""

    def __init__(self, **_: bool) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 0.0


class Stream:
    """Does nothing, also as the current one."""

    def __init__(self, device: object = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


CURRENT = Stream()
"""The stream of whoever asks."""


class _Current:
    """`torch.cuda.stream` without its calls to the driver."""

    def __init__(self, stream: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _runs(case: str, layers: int) -> Callable[[], object]:
    """Make a step of this case; CUDA's names do nothing from here on."""
    import torch
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            added: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
            return x + added

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(Half(), Half()) for _ in range(layers)))
    if case in ("plain", CHECKPOINT):

        def plain() -> None:
            x = torch.ones(8, 64)
            for layer in model:
                if case == "plain":
                    x = layer(x)
                else:
                    x = checkpoint(layer, x, use_reentrant=False)
            x.mean().backward()
            model.zero_grad()

        return plain
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": _Current,
        "current_stream": lambda _=None: CURRENT,
        "set_device": lambda _: None,
        "set_stream": lambda _: None,
    }.items():
        patch.object(torch.cuda, name, value).start()
    from offloadtrain import offload
    from offloadtrain.optim import AdamW
    from offloadtrain.runtime import cuda_driver
    from offloadtrain.runtime.lanes import on_lanes
    from offloadtrain.runtime.lanes.cuda import CudaLanes

    # The host thread calls it without Python: C's abs() of the address, 0 as CUDA's success is.
    success = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
    patch.object(cuda_driver, "event_synchronize", lambda: success).start()
    with on_lanes(CudaLanes(torch.device("cpu"))):
        optimizer = offload(
            model, AdamW(), device="cpu", precision="fp32", clip_norm=1.0, **OPTIONS[case]
        )

    def step() -> None:
        optimizer.backward(model(torch.ones(8, 64)).mean())
        optimizer.step()

    return step


def _count(case: str, layers: int) -> float:
    """Return millions of instructions per layer and step."""
    found = []
    for steps in (SHORT, LONG):
        own = [sys.executable, __file__, "--run", case, "--steps", str(steps)]
        done = subprocess.run(
            [*COUNT, *own, "--layers", str(layers)],
            # The order of hashes moves the count by some percent.
            env=os.environ | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        match = re.search(r"I +refs: +([\d,]+)", done.stderr)
        assert match is not None, done.stderr
        found.append(int(match[1].replace(",", "")))
    return (found[1] - found[0]) / (LONG - SHORT) / layers / 1e6


def _time(layers: int) -> None:
    plain = _runs("plain", layers)
    cases = {case: _runs(case, layers) for case in (CHECKPOINT, *OPTIONS)}
    plain_s: list[float] = []
    beyond_s: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(WARM + ROUNDS):
        spent = _timed(plain)
        beyond = {case: _timed(step) - spent for case, step in cases.items()}
        if number >= WARM:
            plain_s.append(spent)
            for case, seconds in beyond.items():
                beyond_s[case].append(seconds)
    print(f"{'case':20} {'ms/layer':>12} {'least':>12}")
    for case, spent_s in {"plain": plain_s, **beyond_s}.items():
        each = [1e3 * one / layers for one in spent_s]
        print(f"{case:20} {statistics.median(each):12.3f} {min(each):12.3f}")


def _timed(step: Callable[[], object]) -> float:
    begun = time.thread_time()
    step()
    return time.thread_time() - begun


def main() -> None:
    """Print a line for each case, or run one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--time", action="store_true", help="CPU time, not instructions")
    parser.add_argument("--run", choices=("plain", *OPTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        step = _runs(asked.run, asked.layers)
        for _ in range(WARM + asked.steps):
            step()
        # Without the interpreter's end, which is not a step's.
        sys.stdout.flush()
        os._exit(0)
    if asked.time:
        _time(asked.layers)
        return
    plain = _count("plain", asked.layers)
    print(f"{'case':20} {'Minstr/layer':>12} {'beyond plain':>12}")
    print(f"{'plain':20} {plain:12.3f}")
    for case in OPTIONS:
        counted = _count(case, asked.layers)
        print(f"{case:20} {counted:12.3f} {counted - plain:12.3f}", flush=True)


if __name__ == "__main__":
    main()
