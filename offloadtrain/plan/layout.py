"""Blocks and buckets of the shipped transformer, as the engine cuts and pads them, from its shape.

`tests/plan/test_memory.py` holds every number to what an engine books.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from offloadtrain.config import Config
from offloadtrain.shapes import ModelShape

ALIGN = 128
"""Elements: where parameters start, and of what every rank's shard is a multiple."""

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one block with the same hyperparameters.

    Attributes:
        numel: with padding, on all ranks together.
        params: without padding.
        ranks: who shares it.
    """

    name: str
    numel: int
    params: int
    ranks: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters that move together. `repeated`: one of the layers."""

    name: str
    buckets: tuple[Bucket, ...]
    repeated: bool

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)


def blocks_of(config: Config, ranks: int = 1) -> tuple[Block, ...]:
    """All blocks in forward order; layers share one tuple of buckets but for their names."""
    return tuple(
        Block(name, _buckets(name, sizes, config.optim.decay, ranks), repeated)
        for name, sizes, repeated in _parts(config.model)
    )


def num_tensors(shape: ModelShape) -> int:
    """How many parameters the model has as tensors; a tied one counts once."""
    return sum(len(sizes) for _, sizes, _ in _parts(shape))


def _parts(shape: ModelShape) -> Iterator[tuple[str, list[Sizes], bool]]:
    """(name, sizes of its parameters, repeated) in the order of registration."""
    table = (shape.vocab_size, shape.d_model)
    yield "embedding", [table], False
    if shape.positions == "learned":
        yield "positions", [(shape.max_seq_len, shape.d_model)], False
    layer = _layer(shape)
    if shape.num_layers == 1:  # no list of like ones: every module is a block of its own
        yield from ((f"blocks.0.{name}", sizes, False) for name, sizes in layer.items())
    else:
        whole = [one for sizes in layer.values() for one in sizes]
        yield from ((f"blocks.{number}", whole, True) for number in range(shape.num_layers))
    yield "norm", _norm(shape), False
    if not shape.tie_embeddings:
        yield "head", [table], False


def _layer(shape: ModelShape) -> dict[str, list[Sizes]]:
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


def _norm(shape: ModelShape) -> list[Sizes]:
    with_bias = shape.norm == "layernorm" and shape.bias
    return [(shape.d_model,)] * (2 if with_bias else 1)


def _linear(shape: ModelShape, width: int, out: int) -> list[Sizes]:
    return [(out, width), (out,)] if shape.bias else [(out, width)]


def _buckets(name: str, sizes: Sequence[Sizes], decay: str, ranks: int) -> tuple[Bucket, ...]:
    """One for what decays and one for what does not, in the order in which they come."""
    sorted_in: dict[bool, list[int]] = {}
    for one in sizes:
        sorted_in.setdefault(decay == "all" or len(one) > 1, []).append(prod(one))
    several = len(sorted_in) > 1
    return tuple(
        _bucket(f"{name}/{number}" if several else name, numels, ranks)
        for number, numels in enumerate(sorted_in.values())
    )


def _bucket(name: str, numels: Sequence[int], ranks: int) -> Bucket:
    aligned = sum(_up(numel, ALIGN) for numel in numels)
    return Bucket(name, _up(aligned, ALIGN * ranks), sum(numels), ranks)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
