"""The largest published model that trains on a machine, by placement and state format.

`config.model_shape.SIZES` has the models that a job can name and build. The other models here are
only planned, from the figures of their config.json that a plan needs. Biases of queries, keys and
values, norms of heads and the MLP's activation are left out: they take less than 0.1 % of the
parameters. Models whose combined heads are wider or narrower than the model (Gemma 7B, Qwen3-32B,
Mistral Nemo) cannot be described here: `plan --hf` plans them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import SIZES, ModelShape, num_params
from offloadtrain.config.offload import STATE_PRECISIONS
from offloadtrain.config.units import format_bytes, format_count
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.question import STEP_TOKENS, job_of
from offloadtrain.plan.search.suggest import applied
from offloadtrain.step.layout.formats import ADAM_MOMENTS, FORMATS


def _model(
    vocab_size: int,
    num_layers: int,
    d_model: int,
    heads: tuple[int, int],
    d_ff: int,
    max_seq_len: int = 32768,
    *,
    tied: bool = False,
) -> ModelShape:
    """`heads`: numbers of (query heads, key and value heads)."""
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        d_ff=d_ff,
        max_seq_len=max_seq_len,
        tie_embeddings=tied,
    )


def _gpt3(num_layers: int, d_model: int, heads: int) -> ModelShape:
    """Return a row of GPT-3's table 2.1 (arXiv:2005.14165); its sequences have 2048 tokens."""
    return ModelShape(
        vocab_size=50257,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads,
        max_seq_len=2048,
        positions="learned",
        norm="layernorm",
        mlp="gelu",
        tie_embeddings=True,
        bias=True,
    )


_MODELS = {
    **{name: shape for name, shape in SIZES.items() if name.startswith("gpt2-")},
    "GPT-3 2.7B": _gpt3(32, 2560, 32),
    "GPT-3 6.7B": _gpt3(32, 4096, 32),
    "GPT-3 13B": _gpt3(40, 5120, 40),
    "GPT-3 175B": _gpt3(96, 12288, 96),
    "SmolLM2-135M": _model(49152, 30, 576, (9, 3), 1536, 8192, tied=True),
    "SmolLM2-360M": _model(49152, 32, 960, (15, 5), 2560, 8192, tied=True),
    "SmolLM2-1.7B": _model(49152, 24, 2048, (32, 32), 8192, 8192, tied=True),
    "TinyLlama-1.1B": _model(32000, 22, 2048, (32, 4), 5632, 2048),
    "Llama-2-7B": SIZES["llama-7b"],
    "Llama-2-13B": SIZES["llama-13b"],
    "Llama-2-70B": _model(32000, 80, 8192, (64, 8), 28672, 4096),
    "Llama-3.2-1B": _model(128256, 16, 2048, (32, 8), 8192, 131072, tied=True),
    "Llama-3.2-3B": _model(128256, 28, 3072, (24, 8), 8192, 131072, tied=True),
    "Llama-3.1-8B": SIZES["llama-8b"],
    "Llama-3.1-70B": _model(128256, 80, 8192, (64, 8), 28672, 131072),
    "Llama-3.1-405B": _model(128256, 126, 16384, (128, 8), 53248, 131072),
    "Mistral-7B": _model(32768, 32, 4096, (32, 8), 14336),
    "Mistral-Large-123B": _model(32768, 88, 12288, (96, 8), 28672),
    "Gemma-2B": _model(256000, 18, 2048, (8, 1), 16384, 8192, tied=True),
    "Phi-3-mini-3.8B": _model(32064, 32, 3072, (32, 32), 8192, 4096),
    "Yi-34B": _model(64000, 60, 7168, (56, 8), 20480, 4096),
    "Qwen2.5-0.5B": _model(151936, 24, 896, (14, 2), 4864, tied=True),
    "Qwen2.5-1.5B": _model(151936, 28, 1536, (12, 2), 8960, tied=True),
    "Qwen2.5-3B": _model(151936, 36, 2048, (16, 2), 11008, tied=True),
    "Qwen2.5-7B": _model(152064, 28, 3584, (28, 4), 18944),
    "Qwen2.5-14B": _model(152064, 48, 5120, (40, 8), 13824),
    "Qwen2.5-32B": _model(152064, 64, 5120, (40, 8), 27648),
    "Qwen2.5-72B": _model(152064, 80, 8192, (64, 8), 29568),
    "Qwen3-1.7B": _model(151936, 28, 2048, (16, 8), 6144, tied=True),
    "Qwen3-8B": _model(151936, 36, 4096, (32, 8), 12288),
    "Qwen3-14B": _model(151936, 40, 5120, (40, 8), 17408),
}

MODELS: Mapping[str, ModelShape] = MappingProxyType(
    dict(sorted(_MODELS.items(), key=lambda item: -num_params(item[1])))
)
"""Name → shape, largest first."""


WEIGHT_BYTES = 2
"""Bytes of a 16-bit working weight, the narrowest."""


@dataclass(frozen=True, slots=True)
class Row:
    """A placement and a state format; `plan` is None if not even a small model fits.

    Attributes:
        model: published name of the largest model that fits.
    """

    working: str
    activation: str
    state: str
    model: str = ""
    plan: Plan | None = None

    @property
    def params(self) -> int:
        return num_params(self.plan.job.model) if self.plan else 0


def largest(name: str, machine: Machine, ranks: int = 1) -> Iterator[Row]:
    """Yield one row per placement and state format, each when found: weights on the device or
    streamed, layer inputs on the device or the host."""
    precision = machine.auto_precision
    for working, activation in (("device", "recompute"), ("host", "offload")):
        for state, precisions in STATE_PRECISIONS.items():
            if precision in precisions:
                yield _largest(Row(working, activation, state), name, machine, ranks)


def table(rows: Iterable[Row], machine: Machine, ranks: int) -> Iterator[str]:
    """Yield the lines of a text table, each as soon as its row is known."""
    yield (
        f"{'weights':8} {'state':8} {'model':19} {'parameters':>10} {'microbatch':>10} "
        f"{'device':>10} {'host':>10} {'tokens/s':>9}"
    )
    yield from map(_line, rows)
    yield (
        f"The largest of {len(MODELS)} published models: {machine.auto_precision}, AdamW, "
        f"{STEP_TOKENS} tokens per step in the largest microbatch that fits, activations "
        "recomputed (streamed: their inputs on the host)"
        + (f"; {ranks} GPUs: device of each, host of all on it" if ranks > 1 else "")
    )


def _line(row: Row) -> str:
    weights = "streamed" if row.working == "host" else "device"
    if row.plan is None:
        return f"{weights:8} {row.state:8} {'-':19}"
    plan, train = row.plan, row.plan.placed.config.train
    device, host = sum(plan.device.values()), max(plan.host_peaks.values())
    return (
        f"{weights:8} {row.state:8} {row.model:19} {format_count(row.params):>10} "
        f"{train.micro_batch:10} {format_bytes(device):>10} {format_bytes(host):>10} "
        f"{format_count(plan.prediction.tokens_per_s):>9}"
    )


def _largest(row: Row, name: str, machine: Machine, ranks: int) -> Row:
    places = {
        "offload.working": row.working,
        "offload.activation": row.activation,
        "offload.state": row.state,
    }
    for model, shape in MODELS.items():
        if _may_fit(row, shape, machine, ranks):
            job = applied(job_of(model, shape, ranks), places)
            if (plan := _fitting(job, name, machine, ranks)) is not None:
                return replace(row, model=model, plan=plan)
    return row


def _may_fit(row: Row, shape: ModelShape, machine: Machine, ranks: int) -> bool:
    """Return True if state and working weights alone fit; a cheap test before a plan."""
    params, hosts = num_params(shape), -(-ranks // machine.gpus)
    state = params * FORMATS[row.state].bytes_per_param(ADAM_MOMENTS, WEIGHT_BYTES) / hosts
    weights = params * WEIGHT_BYTES if row.working == "device" else 0
    return state <= machine.host_memory_bytes and weights <= machine.gpu_memory_bytes


def _fitting(job: Config, name: str, machine: Machine, ranks: int) -> Plan | None:
    """Return the plan with the largest microbatch that fits: the complete step, which needs no
    sums, or halves of it. If single sequences do not fit, no other size is tried."""
    sequences = job.train.micro_batch
    full, *smaller = _halves(sequences // ranks)

    def planned(size: int) -> Plan:
        train = replace(job.train, micro_batch=size, grad_accum_steps=sequences // size)
        return make(replace(job, train=train), name, machine, ranks)

    # one microbatch of the step, divided among all ranks
    if (plan := planned(full * ranks)).fits:
        return plan
    if not smaller or not planned(smaller[-1]).fits:
        return None
    return next(plan for plan in map(planned, smaller) if plan.fits)


def _halves(size: int) -> list[int]:
    """Return the size, and its halves as long as they are integers."""
    return [size, *_halves(size // 2)] if size % 2 == 0 else [size]
