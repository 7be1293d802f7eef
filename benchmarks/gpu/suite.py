"""What is measured, in order of value, and how long each may take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.gpu.convergence import CASES, STEPS
from benchmarks.gpu.convergence import SPEC as CURVE
from benchmarks.gpu.pair import ROUNDS
from benchmarks.gpu.spec import Spec
from offloadtrain.config.model_shape import flops_per_token, num_params

GIB = 1 << 30
PEERS = ("deepspeed", "torchao", "fsdp2")
MODES = ("exact", "speculative", "delayed")
STATES = ("split16", "int8", "fp32")
SIZES = ("llama-3b", "llama-1.3b", "llama-7b", "gpt-13b")
BERT = {
    "num_layers": 24,
    "d_model": 1024,
    "num_heads": 16,
    "vocab_size": 30528,
    "mlp": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "bias": True,
    "tie_embeddings": True,
    "max_seq_len": 512,
    "objective": "mlm",
}
"""BERT-large as our encoder. DeepSpeed announced 64.4 and 52.7 Tflop/s on a V100, with kernels of
its own, at these lengths and sequences (`benchmarks/calibration.json`)."""
TOY_BERT = BERT | {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 257}
BERT_SEQUENCES = {128: 140, 512: 20}
_RECOMPUTE = 4 / 3
_START_S = 30.0
"""Of a process that imports torch, takes a GPU and pins memory."""
_BUILD_S_PER_GPARAM = 12.0
_EFFICIENCY = 0.2
"""Of the GPU's peak, in an estimate that is rather too long."""
_UNKNOWN_FLOPS = 100e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One entry of the suite.

    Attributes:
        group: what `--only` names.
        seconds: it may take; it is left out where less of the budget is left.
        arguments: of Python after `-m`: a process that prints JSON. Empty: the tests.
        specs: the steps that it makes, ours first; empty where it is about something else.
    """

    group: str
    name: str
    seconds: float
    arguments: tuple[str, ...] = ()
    specs: tuple[Spec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The machine.

    Attributes:
        card: bytes of the GPU; 0: none.
        cap: bytes that stand in for a smaller card in everything that is not about another one; 0:
            the whole.
        flops: per second at best in 16 bits; None: not known.
        precision: "bf16", or "fp16" where the GPU has no other of 16 bits.
    """

    card: int
    cap: int = 0
    flops: float | None = None
    precision: str = "bf16"

    def seconds(self, spec: Spec, steps: int) -> float:
        """For building it and so many steps."""
        params = num_params(spec.shape)
        flops = steps * spec.step_tokens * flops_per_token(spec.shape, spec.seq_len) * _RECOMPUTE
        rate = _EFFICIENCY * (self.flops or _UNKNOWN_FLOPS)
        return _START_S + _BUILD_S_PER_GPARAM * params / 1e9 + flops / rate

    def has(self, state: str) -> bool:
        """Whether the state format goes with the precision."""
        return state != "split16" or self.precision == "bf16"


def items(here: Here, *, toy: bool) -> list[Item]:
    """All of it; `toy`: the same at sizes for a CPU."""
    found = [
        Item(group="tests", name="tests", seconds=20 if toy else 240),
        _plain("machine", "machine", 60 if toy else 45, "benchmarks.gpu.machine", toy=toy),
    ]
    for group, specs in _toy_steps() if toy else _steps():
        item = _measured(group, specs, here)
        is_new = item.name not in {other.name for other in found}
        if is_new and all(here.has(spec.options.get("state", "fp32")) for spec in specs):
            found.append(item)
    first_of_grid = [item.group for item in found].index("grid")
    return [*found[:first_of_grid], *_about(here, toy=toy), *found[first_of_grid:]]


def _about(here: Here, *, toy: bool) -> Iterator[Item]:
    """What is not about steps."""
    for cap in (1,) if toy else tuple(cap for cap in (32, 24, 16, 80) if cap * GIB <= here.card):
        module = ("benchmarks.gpu.largest", str(cap * GIB))
        yield _plain("largest", f"largest {cap} GiB", 150, *module, toy=toy)
    for case in filter(here.has, CASES):
        seconds = 60 if toy else here.seconds(CURVE, STEPS)
        module = ("benchmarks.gpu.convergence", case)
        yield _plain("convergence", f"convergence {case}", seconds, *module, toy=toy)


def _plain(group: str, name: str, seconds: float, *arguments: str, toy: bool) -> Item:
    all_of_them = (*arguments, "--toy") if toy else arguments
    return Item(group=group, name=name, seconds=seconds, arguments=all_of_them)


def _measured(group: str, specs: tuple[Spec, ...], here: Here) -> Item:
    """One spec: its steps; two: both in turn."""
    capped = tuple(
        replace(spec, gpu_memory=spec.gpu_memory or here.cap, precision=here.precision)
        for spec in specs
    )
    module = "benchmarks.gpu.step" if len(specs) == 1 else "benchmarks.gpu.pair"
    rounds = 1 if len(specs) == 1 else ROUNDS
    return Item(
        group=group,
        name=" / ".join(spec.name for spec in capped),
        seconds=sum(here.seconds(s, s.warm + rounds * (1 + s.steps)) for s in capped),
        arguments=(module, *(spec.dumps() for spec in capped)),
        specs=capped,
    )


def _steps() -> Iterator[tuple[str, tuple[Spec, ...]]]:
    """Of the goals first: 3B against resident and peers, 13B under 32 GB, modes, then the rest."""
    base = Spec(size="llama-3b", seq_len=2048, micro_batch=4, warm=1, steps=2)
    wide = replace(base, micro_batch=16)
    split = replace(base, options={"state": "split16"})
    yield "resident", (wide, replace(wide, system="resident"))
    yield "peers", (base, replace(base, system="deepspeed"))
    yield "13b", (_thirteen(grad_accum_steps=16),)
    yield "resident", (split, replace(base, system="resident"))
    twice = {"state": "split16", "update": "speculative"}
    yield "modes", (replace(base, options=twice), split)
    for system in PEERS[1:]:
        yield "peers", (base, replace(base, system=system))
    yield "resident", (replace(wide, options={"state_on": "device"}), _resident(wide))
    for state in STATES[1:]:
        exact = replace(base, options={"state": state})
        twice = {"state": state, "update": "speculative"}
        yield "modes", (replace(base, options=twice), exact)
    yield "13b", (_thirteen(),)
    streamed = {"state": "int8", "working": "host", "activation": "offload"}
    yield "13b", (_thirteen(micro_batch=16, options=streamed),)
    for seq_len, micro_batch in BERT_SEQUENCES.items():
        yield "bert", (_bert(seq_len=seq_len, micro_batch=micro_batch),)
    for spec in _grid():
        yield "grid", (spec,)


def _bert(**keys: int) -> Spec:
    return Spec(size="bert-large", custom=BERT, recompute=False, warm=2, steps=5, **keys)  # type: ignore[arg-type]


def _resident(spec: Spec) -> Spec:
    return replace(spec, system="resident", options={})


def _thirteen(**keys: object) -> Spec:
    """13B as one trains it in 32 GB."""
    spec = Spec(size="gpt-13b", seq_len=1024, micro_batch=4, gpu_memory=32 * GIB, warm=1, steps=2)
    return replace(spec, **({"options": {"state": "int8"}} | keys))  # type: ignore[arg-type]


def _grid() -> list[Spec]:
    """Every size, mode, format, accumulation and length under 32 GB: first what differs from the
    first of each in one of them, then in two, and so on."""
    shapes = [(size, seq_len) for size in SIZES for seq_len in (2048, 1024, 4096)]
    first = (SIZES[0], 2048, MODES[0], STATES[0], 1)
    cells = [
        (size, seq_len, update, state, accum)
        for (size, seq_len), update, state, accum in product(shapes, MODES, STATES, (1, 4, 16))
    ]
    cells.sort(key=lambda cell: sum(one != other for one, other in zip(cell, first, strict=True)))
    return [
        Spec(
            size=size,
            seq_len=seq_len,
            micro_batch=(4096 if size == "gpt-13b" else 8192) // seq_len,
            grad_accum_steps=accum,
            options={"state": state, "update": update},
            gpu_memory=32 * GIB,
            warm=1,
            steps=2,
        )
        for size, seq_len, update, state, accum in cells
    ]


def _toy_steps() -> Iterator[tuple[str, tuple[Spec, ...]]]:
    base = Spec(size="debug", seq_len=32, micro_batch=2, warm=1, steps=2)
    yield "resident", (base, replace(base, system="resident"))
    yield "resident", (replace(base, options={"state_on": "device"}), _resident(base))
    for system in PEERS:
        yield "peers", (base, replace(base, system=system))
    speculative = {"state": "split16", "update": "speculative"}
    exact = replace(base, options={"state": "split16"})
    yield "modes", (replace(base, options=speculative), exact)
    yield "13b", (replace(base, grad_accum_steps=2, options={"state": "int8"}),)
    yield "bert", (replace(_bert(seq_len=32, micro_batch=2), custom=TOY_BERT),)
    for spec in [spec for spec in _grid() if spec.size == SIZES[0]][:3]:
        yield "grid", (replace(spec, size="debug", seq_len=32, micro_batch=2, gpu_memory=0),)
