"""The data of memory displays: a bar per GPU and a bar of the host, by owner, and their history."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui.reading.columns import Live
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import milliseconds, owner_word
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import Area, Part, Tier

ACTIVATIONS, PROCESS = "activations and gradients", "Python, torch"
OLD_S = 15.0
"""Age, in seconds, from which a sample is shown with its age. Samples are logged every 5 s."""

_COLUMNS = 96
_BANDS = 5


# ---- the table


def rows(view: View) -> list[tuple[schema.MemoryRow, int | None]]:
    """Return pairs (owner's row, planned bytes or None), by tier, the largest first. Planned owners
    without memory yet are included."""
    plan = planned(view)
    owned = _owners(view.memory, view.live, _peak([view], "device"))
    known = {(row.tier, row.owner): row for row in owned}
    for tier, owner in plan:
        none_yet = schema.MemoryRow(owner=owner, tier=tier, num_bytes=0, peak_bytes=0)
        known.setdefault((tier, owner), none_yet)
    ordered = sorted(known.values(), key=lambda row: (row.tier, -row.num_bytes, row.owner))
    return [(row, plan.get((row.tier, row.owner))) for row in ordered]


def planned(view: View) -> dict[tuple[str, str], int]:
    """Return (tier, owner) → bytes in the run's initial plan."""
    memory: Any = view.plan.get("memory")
    sizes = {
        (tier, owner): size
        for tier, owners in (memory.items() if isinstance(memory, dict) else ())
        if isinstance(owners, dict)
        for owner, size in owners.items()
        if isinstance(size, int)
    }
    moving: Any = view.plan.get("activations")
    if sizes and isinstance(moving, dict) and not view.on_cpu:
        sizes["device", ACTIVATIONS] = sum(s for s in moving.values() if isinstance(s, int))
    return sizes


def _owners(
    rows_: Sequence[schema.MemoryRow], live: Live | None, peak_bytes: int = 0
) -> list[schema.MemoryRow]:
    """Return the ledger's rows. Activations on the device are replaced by the newest sample: the
    memory that torch has allocated in addition to the other rows."""
    allocated = live.now("allocated") if live else None
    if allocated is None:
        return list(rows_)
    fixed = [row for row in rows_ if (row.owner, row.tier) != (ACTIVATIONS, "device")]
    fixed_bytes = sum(row.num_bytes for row in fixed if row.tier == "device")
    moving = schema.MemoryRow(
        owner=ACTIVATIONS,
        tier="device",
        num_bytes=max(allocated - fixed_bytes, 0),
        peak_bytes=max(peak_bytes - fixed_bytes, 0),
    )
    return [*fixed, moving]


# ---- bars


def sample_if_run_is_here(shown: ViewState) -> schema.System | None:
    """Return the monitor's own sample of this machine if the run is on this machine and uses its
    GPUs, or if no run is shown; otherwise None."""
    machine = shown.machine if shown.is_live else None
    start = shown.view.start
    if machine is None or start is None:
        return machine
    uuids = {_uuid(view) for view in shown.views} - {""}
    there = {gpu.uuid for gpu in machine.gpus}
    return machine if shown.snapshot.lives_here and uuids <= there else None


def devices(shown: ViewState) -> list[Tier]:
    """Return a bar for the GPU of each rank; without a run, for each GPU of this machine. A run on
    CPUs has none, because the bar of the host includes its tensors."""
    start, local_system = shown.view.start, sample_if_run_is_here(shown)
    if start is None:
        return [
            Tier(
                *(f"GPU {gpu.index}", (), gpu.memory_total_bytes or 0),
                other=gpu.memory_used_bytes or 0,
                note=_load(gpu),
            )
            for gpu in (local_system.gpus if local_system else ())
        ]
    if shown.view.on_cpu:
        return []
    return [_of_rank(view, local_system, shown) for view in shown.views]


def bars(shown: ViewState) -> tuple[Tier, ...]:
    """Return the bars of all GPUs, then that of the host; an owner has the same color in all
    bars."""
    tiers = (*devices(shown), host(shown))
    owners = dict.fromkeys(part.owner for tier in tiers for part in tier.parts)
    colors = {owner: number for number, owner in enumerate(owners)}
    return tuple(
        replace(tier, parts=tuple(replace(part, color=colors[part.owner]) for part in tier.parts))
        for tier in tiers
    )


def _of_rank(view: View, local_system: schema.System | None, shown: ViewState) -> Tier:
    live = view.live
    gpu, age = _gpu(view, local_system), ""
    why_none = view.system.gpu_state if view.system else ""
    if local_system is None and gpu is not None:
        age = _age(view.system_time_s, shown)
    parts = _device_parts(view.memory, live)
    total = (gpu.memory_total_bytes if gpu else None) or 0
    cache, other_bytes = _cache_and_other_bytes(parts, live, gpu, total)
    return Tier(
        f"GPU {gpu.index}" if gpu else f"GPU of rank {view.history.rank}",
        parts,
        total,
        cache,
        other_bytes,
        note="  ".join(filter(None, (_load(gpu) if gpu else why_none, age))),
        peak=_peak([view], "device"),
        planned=sum(size for (tier, _), size in planned(view).items() if tier == "device"),
    )


def _device_parts(rows_: Sequence[schema.MemoryRow], live: Live | None) -> tuple[Part, ...]:
    return _parts(row for row in _owners(rows_, live) if row.tier == "device")


def _cache_and_other_bytes(
    parts: Sequence[Part], live: Live | None, gpu: schema.GpuSample | None, total: int
) -> tuple[int, int]:
    """Return the bytes of the allocator's cache, and those of other programs on the device."""
    used = sum(part.nbytes for part in parts)
    cache = max((live.now("reserved") or 0) - used, 0) if live else 0
    free = live.now("free") if live else None
    in_use = (gpu.memory_used_bytes if gpu else None) or 0
    in_use = total - free if free is not None and total else in_use
    return cache, max(in_use - used - cache, 0)


def host(shown: ViewState) -> Tier:
    """Return the bar of the host: the owners of all its ranks, other programs, free memory."""
    views, local_system = _neighbours(shown.views), sample_if_run_is_here(shown)
    system = shown.view.system or local_system
    lives = [view.live for view in views]
    rss = sum(_resident(view, live) for view, live in zip(views, lives, strict=True))
    parts = _host_parts(views, rss)
    if system is None:
        return Tier("HOST", parts)
    if shown.view.start is None and not parts:
        in_use = system.host_total_bytes - system.host_available_bytes
        return Tier("HOST", (Part("all programs", in_use),), system.host_total_bytes)
    used = sum(part.nbytes for part in parts)
    newest = max((live for live in lives if live), key=lambda live: live.time_s, default=None)
    available = newest.now("available") if newest else None
    available = system.host_available_bytes if available is None else available
    swap = (newest.now("swap") if newest else None) or system.swap_used_bytes
    ranks = f"{len(views)} ranks" if len(views) > 1 else ""
    from_swap = f"swap {units.format_bytes(swap)}" if swap else ""
    age = _age(newest.time_s if newest else shown.view.system_time_s, shown)
    return Tier(
        "HOST",
        parts,
        system.host_total_bytes,
        other=max(system.host_total_bytes - available - used, 0),
        note="  ".join(filter(None, (ranks, from_swap, age))),
        peak=_peak(views, "host"),
        planned=_planned_host(views),
    )


def _host_parts(views: Sequence[View], rss: int) -> tuple[Part, ...]:
    """Return the owners of all ranks, and the remainder of their resident memory."""
    tiers = ("host", "device") if views and views[0].on_cpu else ("host",)
    parts = _parts(row for view in views for row in view.memory if row.tier in tiers)
    rest = max(rss - sum(part.nbytes for part in parts), 0)
    name = f"{PROCESS}, activations" if "device" in tiers else PROCESS
    all_parts = (*parts, Part(name, rest)) if rest else parts
    return tuple(sorted(all_parts, key=lambda part: -part.nbytes))


def _planned_host(views: Sequence[View]) -> int:
    """Return the planned bytes of these ranks and of their processes."""
    tiers = ("host", "device") if views and views[0].on_cpu else ("host",)
    sizes = [size for view in views for (tier, _), size in planned(view).items() if tier in tiers]
    process_sizes = [view.plan.get("process_bytes") for view in views]
    return sum(sizes) + sum(size for size in process_sizes if isinstance(size, int)) if sizes else 0


def _neighbours(views: Sequence[View]) -> list[View]:
    """Return the ranks on the same host as the first rank."""
    hosts = [view.start.machine.get("host") if view.start else None for view in views]
    return [view for view, host in zip(views, hosts, strict=True) if host == hosts[0]]


def _resident(view: View, live: Live | None) -> int:
    rss = live.now("rss") if live else None
    system = view.system if rss is None else None
    return rss if rss is not None else system.rss_bytes if system else 0


def _peak(views: Sequence[View], tier: str) -> int:
    """Return the sum of these ranks' peaks in all steps so far; 0 if unknown."""
    logged = [v.history.series[f"{tier}_peak_bytes"].extent(0, v.length)[1] for v in views]
    newest = [
        (view.live.most("allocated" if tier == "device" else "rss") or 0) if view.live else 0
        for view in views
    ]
    most = (max(a if math.isfinite(a) else 0.0, b) for a, b in zip(logged, newest, strict=True))
    return round(sum(most))


def _gpu(view: View, local_system: schema.System | None) -> schema.GpuSample | None:
    """Return the newest sample of the rank's GPU. Without UUIDs, a single GPU is assumed to be
    it."""
    system = local_system or view.system
    gpus = system.gpus if system else ()
    named = [gpu for gpu in gpus if gpu.uuid == _uuid(view)]
    return named[0] if named else gpus[0] if len(gpus) == 1 else None


def rounded(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _load(gpu: schema.GpuSample) -> str:
    known = (gpu.utilization_percent, "% busy"), (gpu.temperature_c, " °C"), (gpu.power_w, " W")
    figures = (f"{value:.0f}{unit}" for value, unit in known if value is not None)
    return "  ".join(filter(None, (*figures, gpu.throttle, gpu.name)))


def _age(time_s: float | None, shown: ViewState) -> str:
    """Return the age of a logged sample as text; "" if it is recent, or the run is not live."""
    if time_s is None or not shown.is_live or shown.snapshot.ending is not None:
        return ""
    age_s = shown.now_s - time_s
    return f"as of {units.format_duration(age_s)} ago" if age_s > OLD_S else ""


def _uuid(view: View) -> str:
    return str(view.plan.get("gpu_uuid", ""))


def _parts(owned: Iterable[schema.MemoryRow]) -> tuple[Part, ...]:
    """Return the sum of bytes of each owner, the largest first."""
    sizes: dict[str, int] = {}
    for row in owned:
        sizes[row.owner] = sizes.get(row.owner, 0) + row.num_bytes
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Part(owner_word(owner), size) for owner, size in ordered if size)


# ---- history

_Stretch = tuple[tuple[Part, ...], int, int]
"""(parts, bytes of the allocator's cache, bytes of other programs) in an interval of time."""


def device_history(view: View, tier: Tier) -> Area:
    """Return a GPU's memory over time: owners, peak of activations, other programs, and the
    limit."""

    def stretch_of(live: Live) -> _Stretch:
        peak = live.at_peak("allocated", "reserved")
        parts = _device_parts(View.at(view.history, live.time_s).memory or view.memory, peak)
        return (parts, *_cache_and_other_bytes(parts, peak, None, tier.total))

    return _area(stretch_of, view, tier)


def host_history(views: Sequence[View], tier: Tier) -> Area:
    """Return the host's memory over time, at the times of the first rank's records."""
    there = _neighbours(views)

    def stretch_of(live: Live) -> _Stretch:
        then = [View.at(view.history, live.time_s) for view in there]
        rss_bytes = [(view.live or live).most("rss") or 0 for view in then[1:]]
        parts = _host_parts(then, sum(rss_bytes, live.most("rss") or 0))
        available, used = live.now("available"), sum(part.nbytes for part in parts)
        return parts, 0, 0 if available is None else max(tier.total - available - used, 0)

    return _area(stretch_of, there[0], tier)


def _area(stretch_of: Callable[[Live], _Stretch], view: View, tier: Tier) -> Area:
    """Return bands in the order of the bar: the largest owners, other owners, cache, other
    programs."""
    names = [part.owner for part in tier.parts]
    columns: list[tuple[int, ...] | None] = []
    for live in view.history.live.stretches(view.time_s, _COLUMNS):
        if live is None:
            columns.append(None)
            continue
        parts, *rest = stretch_of(live)
        by_owner = {part.owner: part.nbytes for part in parts}
        main = [by_owner.pop(name, 0) for name in names[:_BANDS]]
        columns.append((*main, sum(by_owner.values()), *rest))
    extent = view.history.live.extent_s(view.time_s)
    before = f"{units.format_duration(extent[1] - extent[0])} before" if extent else ""
    return Area(
        *(tier.title, tuple(columns), tier.total, tier.planned),
        axis=(before, "last sample"),
        colors=tuple(part.color for part in tier.parts[:_BANDS]),
    )


def within_step(view: View, start_ms: float, end_ms: float) -> Area:
    """Return memory between two times of the newest sampled step, relative to the step's
    minimum."""
    curve = view.newest(schema.StepMemory)
    if curve is None or not curve.kib or len(curve.kib) != len(curve.at_ms) or end_ms <= start_ms:
        return Area("memory within the step: no samples")
    sizes = [1024 * kib for kib in curve.kib]
    least, most = min(sizes), max(sizes)
    where = "torch on the GPU" if curve.tier == "device" else "the process"
    low, high = units.format_bytes(least), units.format_bytes(most)
    title = f"memory of {where} within step {curve.step}: {low}"
    if low == high:
        return Area(f"{title}, unchanged")
    columns = []
    for number in range(_COLUMNS):
        at_ms = start_ms + (end_ms - start_ms) * (number + 0.5) / _COLUMNS
        index = min(bisect_left(curve.at_ms, at_ms), len(sizes) - 1)
        columns.append((sizes[index] - least, 0, 0))
    axis = milliseconds(start_ms), milliseconds(end_ms)
    return Area(f"{title} to {high}", tuple(columns), axis=axis, base=least)
