"""What is measured, in order of value, and how long each may take.

Two lists. The first one ends within six minutes on an H100 or H200: it says whether a commit is
right, and how fast. The second one has what is asked more rarely. Every system trains in a process
of its own, since two of 3B do not fit the host; all are compared with the resident run of the same
model and tokens on the same card.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.spec import Spec
from offloadtrain.config.model_shape import flops_per_token, num_params
from offloadtrain.engine.promotion import CHECK_STEPS

GIB = 1 << 30
_RECOMPUTE = 4 / 3
_START_S = 5.0
"""Of a process that imports torch and takes a GPU; like the next three measured on an H200."""
_BUILD_S_PER_GPARAM = 2.5
_COMPILE_S = 20.0
_PEER_S = {"fsdp2": 55.0}
"""More for building a peer; FSDP2's run of 3B did not end in 48 s on an H100."""
_HOST_S_PER_GPARAM = 0.5
"""Of a step whose time is the host's."""
_EFFICIENCY = 0.3
"""Of the GPU's peak, in an estimate that is rather too long."""
_UNKNOWN_FLOPS = 100e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry of the suite.

    Attributes:
        group: what `--only` names.
        list: 1 or 2.
        seconds: it may take; it is left out where less of the budget is left.
        arguments: of Python after `-m`: a process that prints JSON. Empty: the tests.
        spec: the steps that it makes; None where it is about something else.
    """

    group: str
    list: int
    name: str
    seconds: float
    arguments: tuple[str, ...] = ()
    spec: Spec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The machine.

    Attributes:
        cap: bytes that stand in for a smaller card in everything that has no cap; 0: the whole.
        flops: per second at best in 16 bits; None: not known.
        precision: "bf16", or "fp16" where the GPU has no other of 16 bits.
    """

    cap: int = 0
    flops: float | None = None
    precision: str = "bf16"

    def seconds(self, spec: Spec) -> float:
        """For building it, and its steps with the one that is sampled."""
        gparams = num_params(spec.shape) / 1e9
        flops = spec.step_tokens * flops_per_token(spec.shape, spec.seq_len) * _RECOMPUTE
        compute_s = flops / (_EFFICIENCY * (self.flops or _UNKNOWN_FLOPS))
        step_s = max(compute_s, _HOST_S_PER_GPARAM * gparams)
        compile_s = _COMPILE_S if spec.options.get("compile_blocks") else 0.0
        compile_s += _PEER_S.get(spec.system, 0.0)
        steps = spec.warm + spec.steps + 1
        return _START_S + _BUILD_S_PER_GPARAM * gparams + compile_s + steps * step_s

    def has(self, spec: Spec) -> bool:
        """Whether the state format goes with the precision."""
        return spec.options.get("state") != "split16" or self.precision == "bf16"


def items(here: Here, *, toy: bool) -> list[Item]:
    """All of it; `toy`: the same at sizes for a CPU."""
    more = ("--toy",) if toy else ()
    tests_s = 80.0 if find_spec("xdist") else 240.0
    machine, job = ("benchmarks.gpu.machine", *more), ("benchmarks.gpu.job", *more)
    first = [_measured(1, *entry, here, toy=toy) for entry in _first()]
    second = [_measured(2, *entry, here, toy=toy) for entry in _second()]
    candidates = [
        Item(group="tests", list=1, name="tests", seconds=20 if toy else tests_s),
        Item(group="machine", list=1, name="machine", seconds=25, arguments=machine),
        *first,
        *second,
        Item(group="job", list=2, name="job", seconds=90, arguments=job),
        *(_stacked(group, *more) for group in ("losses", "packed")),
    ]
    unique: dict[str, Item] = {}  # at toy size some are the same
    for item in candidates:
        if item.spec is None or here.has(item.spec):
            unique.setdefault(item.name, item)
    return list(unique.values())


def _stacked(group: str, *more: str) -> Item:
    arguments = ("benchmarks.gpu.stack", group, *more)
    return Item(group=group, list=2, name=f"stack {group}", seconds=30, arguments=arguments)


def _measured(number: int, group: str, spec: Spec, here: Here, *, toy: bool) -> Item:
    cap = 0 if toy else spec.gpu_memory or here.cap
    chosen = replace(spec, precision=here.precision, gpu_memory=cap)
    if toy:
        chosen = replace(chosen, size="debug", seq_len=32, micro_batch=2)
    return Item(
        group=group,
        list=number,
        name=f"{chosen.name} again" if group == "repeats" else chosen.name,
        seconds=60 if toy else here.seconds(chosen),
        arguments=("benchmarks.gpu.step", chosen.dumps()),
        spec=chosen,
    )


def _three(**keys: Any) -> Spec:
    """3B, 8k tokens in a step: one microbatch."""
    return replace(Spec(size="llama-3b", seq_len=2048, micro_batch=4, warm=1, steps=3), **keys)


def _long(**keys: Any) -> Spec:
    """The same with 32k tokens."""
    return _three(micro_batch=16, steps=2, **keys)


def _first() -> Iterator[tuple[str, Spec]]:
    yield "resident", _three()
    yield "resident", _three(system="resident")
    yield "peers", _three(system="deepspeed")
    yield "peers", _three(system="torchao")
    yield "resident", _long()
    yield "resident", _long(system="resident")
    yield "compiled", _long(options={"state": "split16", "compile_blocks": True})
    yield "13b", _thirteen()


def _second() -> Iterator[tuple[str, Spec]]:
    yield "peers", _three(system="fsdp2", steps=2)
    split = {"state": "split16"}
    yield "modes", _three(options=split)
    guesses = split | {"update": "speculative"}
    yield "modes", _three(options=guesses | {"clip_norm": 1e9})  # it never clips: all are right
    yield "modes", _three(options=guesses)
    yield "compiled", _long(system="resident", options={"compile_blocks": True})
    selective = {"activation": "selective"}
    yield "selective", _long(options=split | selective)
    fused = selective | {"compile_blocks": True}
    yield "selective", _long(options=split | fused)
    # As much as fits beside the state of the resident run on 80 GB.
    small = fused | {"activation_budget": 0.15}
    yield "selective", _long(options=split | small)
    yield "selective", _long(system="resident", options=small)
    yield "fp8", _long(options=split | fused | {"fp8": "tensorwise", "activation_budget": 0.3})
    limited = split | {"state_on": "auto", "device_memory_limit": 24 * GIB}
    yield "state_on", _three(options=limited, warm=2)  # the second step compiles the update
    yield "state_on", _three(options={"state_on": {"device": 0.5}})
    yield "state_on", _three(options={"state_on": "auto"}, warm=2 * CHECK_STEPS + 1)
    eight = Spec(size="llama-8b", seq_len=1024, micro_batch=4, warm=1, steps=2)
    yield "8b", replace(eight, options={"state": "int8"}, gpu_memory=24 * GIB)
    streamed = {"state": "int8", "working": "host", "activation": "offload"}
    yield "streamed", _thirteen(micro_batch=32, options=streamed)
    for spec in (_three(), _three(system="resident"), _long(), _long(system="resident")):
        yield "repeats", spec


def _thirteen(**keys: Any) -> Spec:
    """13B as one trains it in 32 GB."""
    spec = Spec(size="gpt-13b", seq_len=1024, micro_batch=6, gpu_memory=32 * GIB, warm=1, steps=2)
    return replace(spec, **({"options": {"state": "int8"}} | keys))
