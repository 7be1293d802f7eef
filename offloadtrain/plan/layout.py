"""Blocks and buckets of the shipped transformer, as the engine cuts and pads them, from its shape.

`tests/plan/test_memory.py` holds the spec that is made of them to the one that an engine makes of
the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import PRECISIONS
from offloadtrain.step.formats import format_for
from offloadtrain.step.spec import BlockSpec, BucketSpec, padded


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter by its qualified name."""

    name: str
    sizes: tuple[int, ...]


def blocks_of(config: Config, ranks: int = 1) -> tuple[BlockSpec, ...]:
    """All blocks in forward order."""
    return tuple(
        BlockSpec(name, _buckets(name, params, config, ranks), repeated=repeated)
        for name, params, repeated in _parts(config.model)
    )


def num_tensors(shape: ModelShape) -> int:
    """How many parameters the model has as tensors; a tied one counts once."""
    return sum(len(params) for _, params, _ in _parts(shape))


def _parts(shape: ModelShape) -> Iterator[tuple[str, list[Param], bool]]:
    """(name, its parameters, repeated) in the order of registration."""
    table = (shape.vocab_size, shape.d_model)
    yield "embedding", [Param("embedding.weight", table)], False
    if shape.positions == "learned":
        learned = (shape.max_seq_len, shape.d_model)
        yield "positions", [Param("positions.weight", learned)], False
    for number in range(shape.num_layers):
        layer = {f"blocks.{number}.{name}": sizes for name, sizes in _layer(shape).items()}
        modules = {name: _named(name, sizes) for name, sizes in layer.items()}
        if shape.num_layers == 1:  # no list of like ones: every module is a block of its own
            yield from ((name, params, False) for name, params in modules.items())
        else:
            yield f"blocks.{number}", [one for many in modules.values() for one in many], True
    yield "norm", _named("norm", _norm(shape)), False
    if not shape.tie_embeddings:
        yield "head", [Param("head.weight", table)], False


def _named(module: str, sizes: Sequence[tuple[int, ...]]) -> list[Param]:
    """The weight, and where there are two, the bias."""
    names = (f"{module}.weight", f"{module}.bias")
    return [Param(name, one) for name, one in zip(names, sizes, strict=False)]


def _layer(shape: ModelShape) -> dict[str, list[tuple[int, ...]]]:
    """Module of a layer → sizes of its parameters."""
    heads = (shape.num_heads + 2 * shape.kv_heads) * shape.head_dim
    up = shape.ff_width * (2 if shape.mlp == "swiglu" else 1)
    return {
        "attention_norm": _norm(shape),
        "attention.qkv": _linear(shape, shape.d_model, heads),
        "attention.out": _linear(shape, shape.d_model, shape.d_model),
        "mlp_norm": _norm(shape),
        "mlp.up": _linear(shape, shape.d_model, up),
        "mlp.down": _linear(shape, shape.ff_width, shape.d_model),
    }


def _norm(shape: ModelShape) -> list[tuple[int, ...]]:
    with_bias = shape.norm == "layernorm" and shape.bias
    return [(shape.d_model,)] * (2 if with_bias else 1)


def _linear(shape: ModelShape, width: int, out: int) -> list[tuple[int, ...]]:
    return [(out, width), (out,)] if shape.bias else [(out, width)]


def _buckets(
    name: str, params: Sequence[Param], config: Config, ranks: int
) -> tuple[BucketSpec, ...]:
    """One for what decays and one for what does not, each in one dtype, in the order in which they
    come."""
    sorted_in: dict[tuple[bool, str], list[int]] = {}
    for param in params:
        key = (config.optim.decay == "all" or len(param.sizes) > 1, _dtype(param, config))
        sorted_in.setdefault(key, []).append(prod(param.sizes))
    several = len(sorted_in) > 1
    return tuple(
        BucketSpec(
            f"{name}/{number}" if several else name,
            padded(numels, ranks),
            sum(numels),
            dtype,
            format_for(config.offload.state, dtype),
            ranks,
        )
        for number, ((_, dtype), numels) in enumerate(sorted_in.items())
    )


def _dtype(param: Param, config: Config) -> str:
    """Of its working weights."""
    kept = any(fnmatchcase(param.name, pattern) for pattern in config.offload.keep_fp32)
    return PRECISIONS["fp32" if kept else config.offload.precision]
