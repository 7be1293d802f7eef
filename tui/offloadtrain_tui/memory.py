"""The Ledger's rows as bars: owners by tier, with the plan and the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offloadtrain.events import schema
from offloadtrain_tui.history import View
from offloadtrain_tui.widgets.bars import Part, Tier

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Row:
    """One owner in one tier; `planned` is None without a plan."""

    tier: str
    owner: str
    nbytes: int
    peak: int
    planned: int | None


def rows(view: View) -> list[Row]:
    """Return owners by tier, the largest first, including planned ones without memory yet."""
    plan = planned(view)
    found = [
        Row(row.tier, row.owner, row.num_bytes, row.peak_bytes, plan.get((row.tier, row.owner)))
        for row in view.memory
    ]
    there = {(row.tier, row.owner) for row in found}
    found += [Row(*key, 0, 0, size) for key, size in plan.items() if key not in there]
    return sorted(found, key=lambda row: (row.tier, -row.nbytes, row.owner))


def planned(view: View) -> dict[tuple[str, str], int]:
    """Return (tier, owner) → bytes of the run's initial plan."""
    memory: Any = view.start.plan.get("memory") if view.start else None
    if not isinstance(memory, dict):
        return {}
    return {
        (tier, owner): size
        for tier, owners in memory.items()
        if isinstance(owners, dict)
        for owner, size in owners.items()
        if isinstance(size, int)
    }


def host(view: View, machine: schema.System | None) -> Tier:
    """Return the bar of host memory: this run's, others', free.

    `machine`: this one, shown if the run has no samples.
    """
    parts = _parts(view, "host")
    system = view.system or machine
    if system is None:
        return Tier("HOST", parts)
    used = sum(part.nbytes for part in parts)
    rest = max(system.rss_bytes - used, 0)
    if rest:
        parts = (*parts, Part(UNATTRIBUTED, rest))
    taken = max(system.host_total_bytes - system.host_available_bytes - used - rest, 0)
    from_swap = f"swap {system.swap_used_bytes >> 20} MiB" if system.swap_used_bytes else ""
    return Tier("HOST", parts, system.host_total_bytes, taken, from_swap)


def devices(view: View, machine: schema.System | None) -> list[Tier]:
    """Return one bar per known GPU, the run's first, with the run's own parts."""
    parts = _parts(view, "device")
    system = machine or view.system
    gpus = system.gpus if system else ()
    if not gpus:
        if parts and _is_on_cpu(view):  # the GPU's state does not matter here
            return [Tier("DEVICE (CPU)", parts)]
        return [Tier("DEVICE", parts, note=system.gpu_state if system else "")]
    bars, uuid = [], view.start.plan.get("gpu_uuid") if view.start else None
    owner = next((gpu.index for gpu in gpus if gpu.uuid == uuid), gpus[0].index)
    for gpu in gpus:
        own = parts if gpu.index == owner and not _is_on_cpu(view) else ()
        held = sum(part.nbytes for part in own)
        other = max((gpu.memory_used_bytes or 0) - held, 0)
        load = "" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} % busy"
        heat = "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"
        power = "" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
        note = "  ".join(filter(None, (gpu.name, load, heat, power)))
        bars.append(Tier(f"GPU {gpu.index}", own, gpu.memory_total_bytes or 0, other, note))
    bars.sort(key=lambda bar: not bar.parts)
    if _is_on_cpu(view) and parts:
        bars.insert(0, Tier("DEVICE (CPU)", parts))
    return bars


def _is_on_cpu(view: View) -> bool:
    return view.start is not None and view.start.plan.get("device") == "cpu"


def _parts(view: View, tier: str) -> tuple[Part, ...]:
    held = [row for row in view.memory if row.tier == tier and row.num_bytes]
    ordered = sorted(held, key=lambda row: (-row.num_bytes, row.owner))
    return tuple(Part(row.owner, row.num_bytes) for row in ordered)
