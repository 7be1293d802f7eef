"""Logs of runs, made from a seed, for the tests of the monitor."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from offloadtrain_tui.reading.log_reader import RunReader, Snapshot
from offloadtrain_tui.reading.runs import open_run

from offloadtrain.events import log_lines, schema
from offloadtrain.events.schema import Event

BEGIN_S = 1_795_000_000.0
GIB = 1 << 30

Timed = tuple[float, Event]
"""Unix seconds, and the event of that time."""


@dataclass
class StoppedClock:
    """A monitor's clock that stands still."""

    at_s: float

    def now_s(self) -> float:
        return self.at_s


def start(name: str = "demo", *, steps: int = 100, **changed: object) -> schema.RunStarted:
    plan = {
        "device": "cuda:0",
        "precision": "bf16",
        "gpu_uuid": "GPU-1",
        "calibrated_gbps": {"h2d": 55.0, "d2h": 54.0},
        "adam_bytes_per_step": 28 * 13_000_000_000,
        "memory": {
            "device": {"working weights": 24 * GIB},
            "host": {"master weights": 48 * GIB, "exp_avg": 48 * GIB, "exp_avg_sq": 48 * GIB},
        },
    }
    values: dict[str, object] = {
        "run_id": f"20261121-080000-{name}",
        "name": name,
        "pid": 4711,
        "num_params": 13_000_000_000,
        "config": {"train": {"steps": steps}, "model": {"d_model": 5120}},
        "plan": plan,
        "backend": {"name": "native", "isa": "avx512", "threads": 15},
        "machine": {"host": "box", "gpus": [{"name": "V100", "memory_bytes": 32 * GIB}]},
    }
    return schema.RunStarted(**{**values, **changed})  # type: ignore[arg-type]


def step(number: int, draw: random.Random, *, scale: float = 1.0) -> schema.Step:
    step_ms = 1000.0 * scale * draw.uniform(0.95, 1.05)
    return schema.Step(
        step=number,
        loss=2.0 + 3.0 * math.exp(-number / 40) + draw.gauss(0, 0.02),
        lr=3e-4 * min(number / 20, 1.0),
        tokens=number * 65536,
        grad_norm=1.0 + draw.random(),
        loss_scale=65536.0,
        tokens_per_s=65.536e6 / step_ms,
        step_ms=step_ms,
        data_ms=2.0,
        forward_ms=0.3 * step_ms,
        backward_ms=0.6 * step_ms,
        optimizer_ms=0.05 * step_ms,
        exposed_ms=0.04 * step_ms,
        busy_ms={
            "compute": 0.9 * step_ms,
            "d2h": 0.5 * step_ms,
            "host": 0.6 * step_ms,
            "h2d": 0.5 * step_ms,
            "load": 0.0,
        },
        d2h_bytes=24 * GIB,
        h2d_bytes=24 * GIB,
        mfu=0.41,
    )


def spans(number: int) -> Iterator[schema.LaneSpan]:
    """A sampled step: four blocks forward, backward, down, Adam, up."""
    for block in range(4):
        yield _span(number, "compute", f"forward {block}", 70.0 * block, 68.0)
        back = 300.0 + 140.0 * (3 - block)
        yield _span(number, "compute", f"backward {block}", back, 130.0)
        yield _span(number, "d2h", f"d2h {block}", back + 130.0, 60.0)
        yield _span(number, "host", f"adam {block}", 40.0 + 100.0 * block, 95.0)
        yield _span(number, "h2d", f"h2d {block}", 135.0 + 100.0 * block, 50.0)


def _span(number: int, lane: str, name: str, start_ms: float, spent_ms: float) -> schema.LaneSpan:
    return schema.LaneSpan(
        step=number, lane=lane, name=name, start_ms=start_ms, duration_ms=spent_ms
    )


def memory(number: int) -> schema.Memory:
    rows = [
        ("working weights", "device", 24 * GIB),
        ("gradient staging", "device", GIB // 8),
        ("activations and gradients", "device", 5 * GIB),
        ("master weights", "host", 48 * GIB),
        ("exp_avg", "host", 48 * GIB),
        ("exp_avg_sq", "host", 48 * GIB),
    ]
    table = tuple(
        schema.MemoryRow(owner=owner, tier=tier, num_bytes=size, peak_bytes=size)
        for owner, tier, size in rows
    )
    return schema.Memory(step=number, rows=table)


def system(draw: random.Random, *, gpus: int = 1) -> schema.System:
    return schema.System(
        cpu_percent=1400.0,
        rss_bytes=150 * GIB,
        host_available_bytes=round(60 * GIB + draw.random() * GIB),
        host_total_bytes=256 * GIB,
        swap_used_bytes=0,
        gpus=tuple(_gpu(number) for number in range(gpus)),
    )


def _gpu(index: int) -> schema.GpuSample:
    return schema.GpuSample(
        index=index,
        name="Tesla V100-SXM3-32GB",
        uuid=f"GPU-{index + 1}",
        memory_used_bytes=30 * GIB,
        memory_total_bytes=32 * GIB,
        utilization_percent=97.0,
        power_w=280.0,
        temperature_c=61.0,
        pcie_generation=3,
        pcie_generation_max=3,
        pcie_width=16,
        pcie_width_max=16,
        pcie_rx_bytes_per_s=11.2e9,
        pcie_tx_bytes_per_s=10.9e9,
    )


def plain(steps: int = 100, *, seed: int = 0, name: str = "demo") -> list[Timed]:
    """A run from its start to its end, with evaluations, checkpoints and sampled steps."""
    draw = random.Random(seed)
    now_s = BEGIN_S
    parts_s = {"reading weights": 40.0, "page-locking host memory": 22.0}
    set_up = schema.SetUp(duration_s=92.0, parts_s=parts_s)
    events: list[Timed] = [(now_s, start(name, steps=steps)), (now_s, set_up), (now_s, memory(0))]
    for number in range(1, steps + 1):
        event = step(number, draw)
        now_s += event.step_ms / 1e3
        events.append((now_s, event))
        if number % 20 == 2:
            events += [(now_s, span) for span in spans(number)]
        if number % 5 == 0:
            events.append((now_s, system(draw)))
        if number % 25 == 0:
            events.append((now_s, schema.Eval(step=number, val_loss=2.1 + 10 / number)))
            saved = schema.Checkpoint(step=number, path=f"checkpoints/step-{number}", num_bytes=GIB)
            events.append((now_s, saved))
    ended = schema.RunEnded(status="done", step=steps, val_loss=2.2, duration_s=now_s - BEGIN_S)
    return [*events, (now_s + 1.0, ended)]


def unlucky(steps: int = 60) -> list[Timed]:
    """NaN, skips, an alert, a stop, a note, a resume, an alert again, and no end: it was killed."""
    events = plain(steps)[:-1]
    changed: list[Timed] = []
    later_s = 0.0
    for at_s, event in events:
        time_s = at_s + later_s
        number = event.step if isinstance(event, schema.Step) else 0
        if isinstance(event, schema.Step) and number == 12:
            event = replace(event, loss=math.nan, grad_norm=math.nan, skipped=True)
        if isinstance(event, schema.Step) and number in (30, 31, 44, 45):
            event = replace(event, skipped=True, grad_norm=math.inf)
        changed.append((time_s, event))
        if number == 31:
            text = "tokens/s fell by a fifth"
            changed.append((time_s, schema.Alert(code="slow", state="raised", message=text)))
        if number == 40:
            later_s = 60.0
            changed.append((time_s, schema.RunEnded(status="stopped", step=40)))
            changed.append((time_s + 60, start(steps=steps, start_step=40, pid=4712)))
            changed.append((time_s + 60, schema.Control(
                id="1", action="note", state="done", message="disk \x1b[31mchanged\x07"
            )))  # fmt: skip
        if number == 45:
            text = "2 steps in a row were skipped"
            changed.append((time_s, schema.Alert(code="skips", state="raised", message=text)))
    return changed


def ranks(count: int = 8, steps: int = 50) -> list[list[Timed]]:
    """One log per rank; rank 3 is slow, and the last one is two steps behind."""
    logs = []
    for rank in range(count):
        draw = random.Random(rank)
        now_s = BEGIN_S
        events: list[Timed] = [(now_s, start("gpt-13b", steps=1000, world_size=count))]
        events.append((now_s, memory(0)))
        for number in range(1, steps + 1 - (2 if rank == count - 1 else 0)):
            event = step(number, draw, scale=1.2)  # all wait for rank 3
            now_s += event.step_ms / 1e3
            waited_ms = 0.0 if rank == 3 else event.step_ms / 6
            busy = event.busy_ms | {"comm": 60.0 + waited_ms}
            own_ms = event.step_ms - waited_ms
            events.append((now_s, replace(event, busy_ms=busy, comm_bytes=3 * GIB, own_ms=own_ms)))
        events.append((now_s, system(draw, gpus=count)))
        logs.append(events)
    return logs


def divided() -> list[list[Timed]]:
    """Four ranks: two stages of two parts of matrices, in groups that share the state."""
    logs = []
    for rank, log in enumerate(ranks(4, steps=30)):
        stage = ("stage 1 of 2 (layers 0 to 1)", "stage 2 of 2 (layers 2 to 3)")[rank // 2]
        role = {"stage": stage, "part": f"part {rank % 2 + 1} of 2", "group": f"group {rank % 2}"}
        (time_s, _), *rest = log
        logs.append([(time_s, start("gpt-13b", plan=start().plan | role)), *rest])
    return logs


def lines(events: Iterable[Timed], rank: int = 0) -> list[bytes]:
    return [log_lines.to_line(event, rank, time_s) for time_s, event in events]


def write(folder: Path, *logs: Iterable[Timed], host: str = "elsewhere") -> Path:
    """Write a run folder; by default of another host, so that its locks have no meaning."""
    (folder / "events").mkdir(parents=True)
    for rank, events in enumerate(logs):
        (folder / "events" / f"rank{rank:03d}.jsonl").write_bytes(b"".join(lines(events, rank)))
    facts = {"run_id": folder.name, "host": host, "pid": 4711, "pid_start_ticks": 1}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "lock").touch()
    return folder


def append(folder: Path, *events: Timed) -> None:
    """Add events to the log of rank 0."""
    with (folder / "events/rank000.jsonl").open("ab") as log:
        log.writelines(lines(events))


def snapshot_of(folder: Path, now_s: float) -> Snapshot:
    """Read all logs of a run to their ends, as the monitor does at this time."""
    with closing(RunReader(open_run(folder))) as reader:
        return reader.read_to_end(now_s)
