"""Two systems in one process, in turn: `python -m benchmarks.gpu.pair OURS THEIRS` prints JSON.

Clocks, neighbours and memory bandwidth of a machine change within minutes. So each round has some
steps of both, the order changes from round to round, and what is compared are ratios within rounds.
Before its timed steps a system makes one that is not timed, so that what one step leaves to the
next is in all of them; afterwards it comes to rest.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.running import Running
from benchmarks.gpu.spec import Spec
from benchmarks.gpu.systems import MissingError, cap, here
from offloadtrain.cli.bench.rounds import SETTLE_S, ratio
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import format_bytes

ROUNDS = 3


def compare(ours: Spec, theirs: Spec) -> dict[str, Any]:
    """`ratio`: the median over rounds of their step over ours; what `step.measure` finds, by name.

    {"missing": why} where the other is not installed, or one does not fit beside the other or into
    the card that it was given.
    """
    device = here()
    cap(ours.gpu_memory + theirs.gpu_memory, device)
    try:
        other, held_by_other = _begin(theirs, device)
    except MissingError as missing:
        return {"missing": str(missing)}
    except torch.OutOfMemoryError as error:
        return {"missing": f"{theirs.system} does not fit: {str(error).splitlines()[0]}"}
    try:
        mine, held_by_mine = _begin(ours, device)
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        return {"missing": f"both do not fit at once: {str(error).splitlines()[0]}"}
    found = _in_turn([mine, other], [held_by_other, held_by_mine], device)
    mine.system.close()
    other.system.close()
    return _over_its_card(found) or found


def _over_its_card(found: dict[str, Any]) -> dict[str, str] | None:
    """The process is held to both cards together; neither may have used some of the other's."""
    for name, one in found["systems"].items():
        peak, card = one["figures"]["device_peak_bytes"], one["spec"]["gpu_memory"]
        if card and peak and peak > card:
            return {"missing": f"{name} does not fit: it took {format_bytes(peak)}"}
    return None


def _begin(spec: Spec, device: torch.device) -> tuple[Running, int]:
    """The system after its first steps, and the device memory that it holds at rest."""
    before = _allocated(device)
    running = Running(spec, device)
    running.steps(spec.warm)
    running.rest()
    return running, _allocated(device) - before


def _in_turn(
    pair: Sequence[Running], beside: Sequence[int], device: torch.device
) -> dict[str, Any]:
    """`beside`: bytes of the device that the other one holds meanwhile."""
    samples: tuple[list[float], list[float]] = ([], [])
    medians: tuple[list[float], list[float]] = ([], [])
    peaks = [0, 0]
    for number in range(ROUNDS):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            seconds, peak = _round(pair[index], device)
            samples[index].extend(seconds)
            medians[index].append(statistics.median(seconds))
            peaks[index] = max(peaks[index], peak - beside[index])
    for one in pair:
        one.sample()
    on_gpu = device.type == "cuda"
    systems = {
        one.spec.name: one.found(seconds, peak if on_gpu else None)
        for one, seconds, peak in zip(pair, samples, peaks, strict=True)
    }
    ratios = [theirs / ours for ours, theirs in zip(*medians, strict=True)]
    return {"ratio": ratio(medians[1], medians[0]), "ratios": ratios, "systems": systems}


def _round(running: Running, device: torch.device) -> tuple[list[float], int]:
    """Seconds of its steps, and the most device memory meanwhile."""
    time.sleep(SETTLE_S)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    running.steps(1)
    seconds = running.measured(running.spec.steps)
    running.rest()
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    print(json.dumps(compare(Spec.loads(sys.argv[1]), Spec.loads(sys.argv[2]))))
