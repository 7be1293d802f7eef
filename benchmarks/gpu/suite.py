"""What is measured, in order of value, and how long each may take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.convergence import CASES
from benchmarks.gpu.spec import Spec

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry of the suite.

    Attributes:
        group: what `--only` names.
        seconds: it may take; it is left out where less of the budget is left.
        spec: of a step; None for "machine", "tests", "largest" and "convergence".
    """

    group: str
    name: str
    seconds: float
    spec: Spec | None = None
    detail: dict[str, Any] | None = None


def items(*, toy: bool, gpu_memory: int, host_memory: int, card: int) -> list[Item]:
    """All of it.

    Args:
        toy: the same at sizes for a CPU.
        gpu_memory: bytes that stand in for a smaller card in everything that is not about another
            one; 0: the whole.
        card: bytes of the one that is there.
    """
    found = [
        Item(group="tests", name="tests", seconds=20 if toy else 240),
        Item(group="machine", name="machine", seconds=60 if toy else 45),
    ]
    steps = _toy_steps() if toy else _steps(host_memory)
    for group, seconds, spec in steps:
        capped = replace(spec, gpu_memory=spec.gpu_memory or gpu_memory)
        found.append(Item(group=group, name=capped.name, seconds=seconds, spec=capped))
    caps = (1,) if toy else tuple(cap for cap in (32, 24, 16, 80) if cap * GIB <= card)
    for cap in caps:
        detail = {"gpu_memory": cap * GIB, "toy": toy}
        found.append(Item(group="largest", name=f"largest {cap} GiB", seconds=150, detail=detail))
    for case in CASES:
        detail = {"case": case}
        name, seconds = f"convergence {case}", 60 if toy else 200
        found.append(Item(group="convergence", name=name, seconds=seconds, detail=detail))
    return found


def _steps(host_memory: int) -> Iterator[tuple[str, float, Spec]]:
    """Of the goals first: 3B against resident and peers, 13B under 32 GB, modes, then the rest."""
    base = Spec(size="llama-3b", seq_len=2048, micro_batch=4)
    wide = replace(base, micro_batch=16)
    yield "resident", 60, replace(wide, system="resident")
    yield "resident", 60, wide
    yield "resident", 60, replace(wide, options={"state_on": "device"})
    yield "resident", 60, replace(base, system="resident")
    yield "resident", 60, replace(base, options={"state": "split16"})
    yield "resident", 60, base
    for system in ("deepspeed", "torchao", "fsdp2"):
        yield "peers", 120, replace(base, system=system)
    for state in ("int8", "split16"):
        for update in ("speculative", "exact", "delayed"):
            options = {"state": state, "update": update}
            yield "modes", 60, replace(base, options=options)
    large = Spec(size="gpt-13b", seq_len=1024, micro_batch=4, gpu_memory=32 * GIB, steps=2, warm=1)
    if host_memory >= 120 * GIB:
        yield "13b", 200, replace(large, grad_accum_steps=16, options={"state": "int8"})
    yield "13b", 150, replace(large, options={"state": "int8"})
    streamed = {"state": "int8", "working": "host", "activation": "offload"}
    yield "13b", 150, replace(large, micro_batch=16, options=streamed)
    for accum in (4, 16):
        yield "grid", 90, replace(base, grad_accum_steps=accum, steps=3)
    for size in ("llama-1.3b", "llama-7b"):
        for seq_len in (1024, 4096):
            shaped = replace(base, size=size, seq_len=seq_len, micro_batch=8192 // seq_len)
            yield "grid", 90, replace(shaped, options={"state": "split16"}, steps=3)


def _toy_steps() -> Iterator[tuple[str, float, Spec]]:
    base = Spec(size="debug", seq_len=32, micro_batch=2, warm=1, steps=2)
    yield "resident", 60, replace(base, system="resident")
    yield "resident", 60, base
    yield "resident", 60, replace(base, options={"state_on": "device"})
    for system in ("deepspeed", "torchao", "fsdp2"):
        yield "peers", 60, replace(base, system=system)
    yield "modes", 60, replace(base, options={"state": "split16", "update": "speculative"})
    yield "13b", 60, replace(base, grad_accum_steps=2, options={"state": "int8"})
