"""Blocks and buckets of the shipped transformer from its shape, or of another model from its parts,
as the engine partitions and pads them.

`tests/plan/test_memory.py` compares the resulting spec with the engine's spec of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod

from offloadtrain.config.hf_model import ParamShape, PartShape
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import PRECISIONS
from offloadtrain.step.formats import format_for
from offloadtrain.step.spec import BlockSpec, BucketSpec, padded


def blocks_of(config: Config, ranks: int = 1) -> tuple[BlockSpec, ...]:
    """Return all blocks in forward order."""
    found = (_block(part, config, ranks) for part in parts_of(config))
    return tuple(block for block in found if block.held)


def _block(part: PartShape, config: Config, ranks: int) -> BlockSpec:
    trained = [param for param in part.params if param.trained]
    frozen = [param for param in part.params if not param.trained]
    streamable = part.repeated and config.offload.streams_among(ranks)
    return BlockSpec(
        part.name,
        _buckets(part.name, trained, config, ranks),
        _buckets(f"{part.name} frozen", frozen, config, ranks) if streamable else (),
        part.repeated,
    )


def parts_of(config: Config) -> tuple[PartShape, ...]:
    """Return every parameter of the job's model, in registration order; a tied one once."""
    if config.hf is None:
        return tuple(_parts(config.model))
    assert config.hf.parts is not None, "integrations.hf_job.described comes first"
    return config.hf.parts


def num_tensors(config: Config) -> int:
    """Return the number of parameter tensors; a tied one counts once."""
    return sum(len(part.params) for part in parts_of(config))


def _parts(shape: ModelShape) -> Iterator[PartShape]:
    table = (shape.vocab_size, shape.d_model)
    yield PartShape("embedding", (ParamShape("embedding.weight", table),))
    if shape.positions == "learned":
        learned = (shape.max_seq_len, shape.d_model)
        yield PartShape("positions", (ParamShape("positions.weight", learned),))
    sizes_of = _layer(shape)
    for number in range(shape.num_layers):
        layer = {f"blocks.{number}.{name}": sizes for name, sizes in sizes_of.items()}
        modules = {name: _named(name, sizes) for name, sizes in layer.items()}
        if shape.num_layers == 1:  # no list of layers: every module is its own block
            yield from (PartShape(name, params) for name, params in modules.items())
        else:
            params = tuple(one for many in modules.values() for one in many)
            yield PartShape(f"blocks.{number}", params, repeated=True)
    yield PartShape("norm", _named("norm", _norm(shape)))
    if not shape.tie_embeddings:
        yield PartShape("head", (ParamShape("head.weight", table),))


def _named(module: str, sizes: Sequence[tuple[int, ...]]) -> tuple[ParamShape, ...]:
    """Return the weight and, if there is one, the bias."""
    names = (f"{module}.weight", f"{module}.bias")
    return tuple(ParamShape(name, one) for name, one in zip(names, sizes, strict=False))


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
    name: str, params: Sequence[ParamShape], config: Config, ranks: int
) -> tuple[BucketSpec, ...]:
    """Split parameters by weight decay and dtype, in order of appearance."""
    sorted_in: dict[tuple[bool, str], list[int]] = {}
    for param in params:
        decays = param.trained and (config.optim.decay == "all" or len(param.sizes) > 1)
        key = (decays, working_dtype(param, config))
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


def working_dtype(param: ParamShape, config: Config) -> str:
    """Dtype of the working weight."""
    kept = any(fnmatchcase(param.name, pattern) for pattern in config.offload.keep_fp32)
    return PRECISIONS["fp32" if kept else config.offload.precision]
