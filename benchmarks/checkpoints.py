"""The speed of checkpoints beside the disk's own, and what a save costs a run.

    python -m benchmarks.checkpoints
    python -m benchmarks.checkpoints --folder /data/runs --mib 4096 --rounds 9

Writing is compared with `dd oflag=direct`, loading (which verifies) with `dd iflag=direct`, of
files of the same size in the same folder, in turn: the median of the ratios of neighbours. The
stall of a save is the time of some steps with it, less that of as many without, on lanes of
threads; the goal is 1.1 times what a write takes longer than a step and the spill's own writing. A
busy machine shows in all, and where there is no GPU the processor time of writing does, which steps
then lack.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.hardware import atomic_io
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.checkpoint.save import Save, save

DD_BYTES = 8 << 20


class Model(nn.Module):
    """As many square layers as the state needs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


class Rates(NamedTuple):
    """Bytes per second of one round, and processor seconds per byte of its reading and writing."""

    write: float
    dd_write: float
    read: float
    dd_read: float
    read_cpu: float
    write_cpu: float


def made(mib: int, spill_mib: int = 0) -> tuple[nn.Module, ot.OffloadOptimizer]:
    width = 1024
    model = Model(width, max(1, (mib << 20) // (12 * width * width)))
    rule, spill = ot.AdamW(lr=1e-4), spill_mib << 20
    return model, ot.offload(model, rule, device="cpu", checkpoint_spill=spill)


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def dd(*arguments: str) -> None:
    subprocess.run(["dd", f"bs={DD_BYTES}", *arguments], check=True, capture_output=True)


def one_round(folder: Path, model: nn.Module, optimizer: ot.OffloadOptimizer) -> Rates:
    plain, empty = folder / "dd.bin", "/dev/zero"
    cpu_s = time.process_time()
    wrote_s = timed(lambda: save(folder, 1, model, optimizer, {}))
    write_cpu_s = time.process_time() - cpu_s
    (path,) = checkpoint.find(folder)
    found = checkpoint.open_checkpoint(path)
    num_bytes = found.manifest.num_bytes
    count = f"count={num_bytes // DD_BYTES}"
    dd_wrote_s = timed(
        lambda: dd(f"if={empty}", f"of={plain}", count, "oflag=direct", "conv=fsync")
    )
    cpu_s = time.process_time()
    read_s = timed(lambda: restore(found, model, optimizer))
    read_cpu_s = time.process_time() - cpu_s
    dd_read_s = timed(lambda: dd(f"if={plain}", "of=/dev/null", count, "iflag=direct"))
    plain.unlink()
    atomic_io.remove_folder(path)
    whole = num_bytes // DD_BYTES * DD_BYTES
    wrote, dd_wrote, dd_read = num_bytes / wrote_s, whole / dd_wrote_s, whole / dd_read_s
    cpu = read_cpu_s / num_bytes, write_cpu_s / num_bytes
    return Rates(wrote, dd_wrote, num_bytes / read_s, dd_read, *cpu)


def stall(
    folder: Path, mib: int, rounds: int, batch: int, spill_mib: int
) -> tuple[float, float, float]:
    """Return the median seconds of (stall per save, a write alone, a step)."""
    x, steps = torch.randn(batch, 1024), 3
    with on_lanes(ThreadLanes()):
        model, optimizer = made(mib, spill_mib)

    def step() -> None:
        optimizer.backward(model(x))
        optimizer.step()

    def cycle(number: int) -> None:
        saving = Save(folder, number, model, optimizer, {}) if number else None
        for _ in range(steps):
            step()
        if saving is not None:
            saving.commit()
            atomic_io.remove_folder(folder / f"step-{number:08d}")
        optimizer.synchronize()

    def alone(number: int) -> None:
        save(folder, number, model, optimizer, {})
        atomic_io.remove_folder(folder / f"step-{number:08d}")

    cycle(0)
    plain, with_save, written = [], [], []
    for number in range(1, rounds + 1):
        plain.append(timed(lambda: cycle(0)))
        with_save.append(timed(lambda n=number: cycle(n)))  # type: ignore[misc]
        written.append(timed(lambda n=number: alone(n)))  # type: ignore[misc]
    optimizer.close()
    stalls = [a - b for a, b in zip(with_save, plain, strict=True)]
    return median(stalls), median(written), median(plain) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=768, help="state of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="makes the steps longer")
    parser.add_argument("--spill", type=int, default=64, help="MiB of checkpoint_spill")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as made_folder:
        folder = Path(made_folder)
        model, optimizer = made(args.mib)
        rates = [one_round(folder, model, optimizer) for _ in range(args.rounds)]
        optimizer.close()
        stalled_s, write_s, step_s = stall(folder, args.mib, args.rounds, args.batch, args.spill)
        rate = median(r.write for r in rates)
    _print("write", "oflag", [r.write for r in rates], [r.dd_write for r in rates])
    _print("load and verify", "iflag", [r.read for r in rates], [r.dd_read for r in rates])
    reads, writes = (1e9 * median(r[i] for r in rates) for i in (-2, -1))
    print(f"{'':16}{reads:6.2f} s of processor time per GB read, {writes:.2f} per GB written")
    allowed_s = 1.1 * max(0.0, write_s - step_s - (args.spill << 20) / rate)
    print(f"{'stall per save':16}{1e3 * stalled_s:6.0f} ms; goal {1e3 * allowed_s:.0f} ms")
    print(f"{'a write alone':16}{1e3 * write_s:6.0f} ms; a step {1e3 * step_s:.0f} ms")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")


def _print(what: str, flag: str, rates: list[float], of_dd: list[float]) -> None:
    ratio = median(a / b for a, b in zip(rates, of_dd, strict=True))
    print(f"{what:16}{median(rates) / 1e6:6.0f} MB/s, {ratio:.2f} of dd {flag}=direct")


if __name__ == "__main__":
    main()
