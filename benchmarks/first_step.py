"""From a Hugging Face folder to the first step: seconds and host memory, beside their floors.

    python -m benchmarks.first_step
    python -m benchmarks.first_step --layers 4 --states split16 split16    # each as often as named

Writes a model like Llama (1.1B parameters at 22 layers; fewer where memory is short) with random
weights into a temporary folder, as bf16 shards, and loads it in a process of its own for each state
format. A row has the seconds from the call of `ot.from_pretrained` to the end of the first step,
and the floor: reading the files once, touching as many bytes as the engine holds for the first
time, and a later step, each measured in that process, before and after. About as much memory is
touched to measure that: a small part of it, just given back, would be new at a fraction of the
price. `ratio` is (load + first step - a later step) / (reading + touching), in seconds and in
seconds of all its threads' CPU time, which other processes disturb less; "of the load" leaves both
steps out. `peak` is the most anonymous host memory while it loads, above that of the imports, over
what the engine holds. Files are read from the page cache, where the writer has left them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import offloadtrain as ot
from benchmarks.resident_memory import Watch, resident
from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.hardware.telemetry import probe
from offloadtrain.integrations.export import write_configuration, write_weights
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.step.layout.buffers import BufferSpec
from offloadtrain.step.layout.tiers import Tier

STATES = ("int8", "split16")
LAYERS, WIDTH, INNER, VOCABULARY = 22, 2048, 5632, 32000
BYTES_PER_PARAMETER = 13  # of the widest state, gradients, and the files in the page cache
TOKENS = 32
READ_BYTES = 1 << 24
TOUCHED_OF_FILES = 7  # times the files' bytes: what the engine and the first backward hold
PHASES = {
    "_deferred": "model without weights",
    "map_memory": "memory: mapped and touched",
    "adopt_weights": "weights: read and encoded",
    "step_once": "first step",
}


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds, and CPU seconds of all threads."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, work: Callable[[], object]) -> Spent:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - wall, time.process_time() - cpu)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def times(self, factor: float) -> Spent:
        return Spent(self.wall_s * factor, self.cpu_s * factor)

    def over(self, other: Spent) -> Spent:
        return Spent(self.wall_s / other.wall_s, self.cpu_s / other.cpu_s)


@dataclass(slots=True, kw_only=True)
class Row:
    """What one state format took. `shares`: of the seconds from the call to the first step."""

    state: str
    parameters: int
    load: Spent
    first_step: Spent
    step: Spent
    read: Spent
    touch: Spent
    held_bytes: int
    peak_bytes: int
    shares: dict[str, float]

    def ratios(self) -> tuple[Spent, Spent]:
        """Over the floor: what comes before the end of the first step, and the load alone."""
        floor = self.read + self.touch
        whole = self.load + self.first_step + self.step.times(-1)
        return whole.over(floor), self.load.over(floor)


def layers_that_fit() -> int:
    """As many as half of the memory takes, so that others keep theirs."""
    of_layer = BYTES_PER_PARAMETER * (2 * WIDTH * (WIDTH + 256) + 3 * WIDTH * INNER)
    rest = BYTES_PER_PARAMETER * 2 * VOCABULARY * WIDTH
    return max(1, min(LAYERS, (available_bytes() // 2 - rest) // of_layer))


def write_model(folder: Path, layers: int) -> None:
    """Write config.json and shards of at most 500 MB; holds one of them."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    pool = 0.02 * torch.randn(VOCABULARY * WIDTH)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, param in model.named_parameters():
            yield name, pool[: param.numel()].reshape(param.shape).bfloat16()

    buffers = dict(model.named_buffers())
    write_weights(model, folder, weights(), buffers, torch.bfloat16, "500MB")
    write_configuration(model, folder, torch.bfloat16)


def read(folder: Path) -> None:
    """Read all shards, once, into one small buffer."""
    buffer = bytearray(READ_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def touch(num_bytes: int) -> None:
    """Touch new memory as the engine's arena does."""
    arena = Arena(Ledger(), pin=False)
    arena.map([BufferSpec("touched", num_bytes, "uint8")])
    arena.close()


def step_once(model: Any, optimizer: ot.OffloadOptimizer) -> None:
    tokens = torch.arange(TOKENS)[None]
    optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.synchronize()


def measured(folder: Path, state: str) -> Row:
    """Load and train in this process, which has done nothing else."""
    import transformers
    from transformers import LlamaForCausalLM  # noqa: F401  # an import, and no part of loading

    from offloadtrain.engine import offload  # noqa: F401  # this too

    transformers.logging.disable_progress_bar()
    before = resident()[0]
    touched = TOUCHED_OF_FILES * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    floors = [floor(folder, touched) for _ in range(2)]
    made: list[Any] = []

    def load() -> None:
        rule = ot.AdamW(lr=1e-5)
        made.extend(ot.from_pretrained(folder, rule, device="cpu", working="host", state=state))

    with Watch(PHASES) as watch:
        load_spent, peak_bytes = Spent.of(load), watch.peak_bytes
        model, optimizer = made
        model.train()
        first_step = Spent.of(partial(step_once, model, optimizer))
    held_bytes = sum(optimizer.ledger.total(tier) for tier in (Tier.HOST, Tier.DEVICE))
    step = Spent.of(partial(step_once, model, optimizer))
    parameters = sum(param.numel() for param in model.parameters())
    optimizer.close()
    made.clear()
    del model, optimizer
    gc.collect()  # the engine's memory goes with the last view of it
    floors += [floor(folder, touched) for _ in range(2)]
    return Row(
        state=state,
        parameters=parameters,
        load=load_spent,
        first_step=first_step,
        step=step,
        read=median([reading for reading, _ in floors]),
        touch=median([touching for _, touching in floors]).times(held_bytes / touched),
        held_bytes=held_bytes,
        peak_bytes=peak_bytes - before,
        shares=watch.shares,
    )


def floor(folder: Path, touched_bytes: int) -> tuple[Spent, Spent]:
    return Spent.of(partial(read, folder)), Spent.of(partial(touch, touched_bytes))


def median(spent: Sequence[Spent]) -> Spent:
    walls, cpus = ([getattr(one, name) for one in spent] for name in ("wall_s", "cpu_s"))
    return Spent(statistics.median(walls), statistics.median(cpus))


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| state | load | first step | a later one | reading | touching | ratio | of the load "
        "| peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spent = (row.load, row.first_step, row.step, row.read, row.touch)
        cells = [f"{one.wall_s:.1f} s (CPU {one.cpu_s:.1f})" for one in spent]
        cells += [f"{one.wall_s:.2f} (CPU {one.cpu_s:.2f})" for one in row.ratios()]
        held = format_bytes(row.held_bytes)
        cells.append(f"{row.peak_bytes / row.held_bytes:.3f} x {held}")
        lines.append(f"| `{row.state}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def where(row: Row) -> str:
    total = row.load.wall_s + row.first_step.wall_s
    ratio, _ = row.ratios()
    parts = [f"{name or 'rest'} {share * total:.1f} s" for name, share in row.shares.items()]
    return f"{row.state}: {ratio.wall_s:.2f} x the floor; {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step")
    parser.add_argument("--layers", type=int, default=layers_that_fit(), help=f"1.1B: {LAYERS}")
    parser.add_argument("--states", nargs="+", default=STATES, metavar="STATE")
    parser.add_argument("--out", type=Path, help="file for the result, JSON")
    asked = parser.parse_args()
    # A process for each: memory that one gives back is no longer new to it.
    processes = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)
    with TemporaryDirectory() as named, processes:
        write_model(Path(named), asked.layers)
        rows: list[Row] = []
        for state in asked.states:
            rows.append(processes.submit(measured, Path(named), state).result())
            print(where(rows[-1]), flush=True)
            if asked.out:
                found = {"machine": asdict(probe()), "rows": [asdict(row) for row in rows]}
                asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{probe().cpu}, {format_count(rows[0].parameters)} parameters\n\n{table(rows)}")


if __name__ == "__main__":
    main()
