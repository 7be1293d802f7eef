"""Blocks and buckets of the shipped transformer from its shape, as the engine partitions and pads
them.

`tests/plan/test_memory.py` compares the resulting spec with the engine's spec of the module.
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
    """Return all blocks in forward order."""
    return tuple(
        BlockSpec(name, _buckets(name, params, config, ranks), repeated=repeated)
        for name, params, repeated in _parts(config.model)
    )


def num_tensors(shape: ModelShape) -> int:
    """Return the number of parameter tensors; a tied one counts once."""
    return sum(len(params) for _, params, _ in _parts(shape))


def _parts(shape: ModelShape) -> Iterator[tuple[str, list[Param], bool]]:
    """Yield (name, parameters, repeated) in registration order."""
    table = (shape.vocab_size, shape.d_model)
    yield "embedding", [Param("embedding.weight", table)], False
    if shape.positions == "learned":
        learned = (shape.max_seq_len, shape.d_model)
        yield "positions", [Param("positions.weight", learned)], False
    for number in range(shape.num_layers):
        layer = {f"blocks.{number}.{name}": sizes for name, sizes in _layer(shape).items()}
        modules = {name: _named(name, sizes) for name, sizes in layer.items()}
        if shape.num_layers == 1:  # no list of layers: every module is its own block
            yield from ((name, params, False) for name, params in modules.items())
        else:
            yield f"blocks.{number}", [one for many in modules.values() for one in many], True
    yield "norm", _named("norm", _norm(shape)), False
    if not shape.tie_embeddings:
        yield "head", [Param("head.weight", table)], False


def _named(module: str, sizes: Sequence[tuple[int, ...]]) -> list[Param]:
    """Return the weight and, if there is one, the bias."""
    names = (f"{module}.weight", f"{module}.bias")
    return [Param(name, one) for name, one in zip(names, sizes, strict=False)]


def _layer(shape: ModelShape) -> dict[str, list[tuple[int, ...]]]:
    """Return module of a layer → sizes of its parameters."""
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
    """Split parameters by weight decay and dtype, in order of appearance."""
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
    """Dtype of the working weight."""
    kept = any(fnmatchcase(param.name, pattern) for pattern in config.offload.keep_fp32)
    return PRECISIONS["fp32" if kept else config.offload.precision]
