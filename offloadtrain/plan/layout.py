"""Blocks and buckets of the shipped transformer from its shape, or of another model from its parts,
as the engine partitions and pads them.

`tests/plan/test_memory.py` compares the resulting spec with the engine's spec of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod

from offloadtrain.config.hf_model import ParamShape, PartShape
from offloadtrain.config.job import Config, OptimConfig
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import PRECISIONS
from offloadtrain.config.ranks_options import Stage
from offloadtrain.step.layout.block_spec import BlockSpec, BucketSpec, MatrixSpec, padded, placed
from offloadtrain.step.layout.formats import ADAM_MOMENTS, format_for
from offloadtrain.step.layout.skipping import experts_in, skips


@dataclass(frozen=True, slots=True)
class RuleNeeds:
    """What an update rule asks of the layout; the engine asks the rule itself.

    Attributes:
        moments: its state.
        whole: no parameter is cut between ranks (`optim.keeps_whole`).
        rest: of a rule of matrices, the state of all other parameters; else None.
    """

    moments: tuple[str, ...]
    whole: bool = False
    rest: tuple[str, ...] | None = None

    @property
    def of_matrices(self) -> bool:
        return self.rest is not None

    def of_bucket(self, *, matrices: bool) -> RuleNeeds:
        """Return those of a bucket, of matrices or of the rest."""
        return self if self.rest is None or matrices else RuleNeeds(self.rest)


_NEEDS = {
    "adamw": RuleNeeds(ADAM_MOMENTS),
    "adam": RuleNeeds(ADAM_MOMENTS),
    "lion": RuleNeeds(("exp_avg",)),
    "sgd": RuleNeeds(("momentum_buffer",)),
    "adagrad": RuleNeeds(("sum",)),
    "lamb": RuleNeeds(ADAM_MOMENTS, whole=True),
    "muon": RuleNeeds(("momentum_buffer",), whole=True, rest=ADAM_MOMENTS),
}
_STATELESS = RuleNeeds(())


def needs_of(optim: OptimConfig) -> RuleNeeds:
    """Return what the rule that a job names asks; `train.update_rules.update_rule` makes it."""
    return _STATELESS if optim.name == "sgd" and not optim.momentum else _NEEDS[optim.name]


def blocks_of(config: Config, ranks: int = 1) -> tuple[BlockSpec, ...]:
    """Return all blocks in forward order."""
    parts = parts_of(config)
    again = config.offload.activations.recomputed_of([part.name for part in parts if part.repeated])
    blocks: list[BlockSpec] = []
    for part in parts:
        block = _block(part, config, ranks, recomputed=part.name in again)
        blocks += [block] if block.all_buckets else []
        if part.tied and blocks:
            blocks[-1] = replace(blocks[-1], then=blocks[-1].then + part.tied)
    return tuple(blocks)


def _block(part: PartShape, config: Config, ranks: int, *, recomputed: bool) -> BlockSpec:
    trained = [param for param in part.params if param.trained]
    frozen = [param for param in part.params if not param.trained]
    offload = config.offload
    streamable = part.repeated and offload.streams_among(ranks)
    streamable = streamable or (part.leaf and offload.zero_stage_among(ranks) == 3)
    return BlockSpec(
        part.name,
        _buckets(part.name, trained, config, ranks),
        _buckets(f"{part.name} frozen", frozen, config, ranks) if streamable else (),
        part.repeated,
        part.leaf,
        recomputed,
    )


def parts_of(config: Config) -> tuple[PartShape, ...]:
    """Return every parameter of the job's model, in registration order; a tied one once."""
    if config.hf is None:
        return _parts_of_shape(config.rank_shape, config.stage)
    assert config.hf.parts is not None, "integrations.hf_job.described comes first"
    if (parts := config.ranks.tensor) == 1:
        return config.hf.parts
    return tuple(
        replace(part, params=tuple(param.of_part(parts) for param in part.params))
        for part in config.hf.parts
    )


def num_tensors(config: Config) -> int:
    """Return the number of parameter tensors; a tied one counts once. Of a stage of a pipeline
    those of earlier stages count, too: norms have their place in the whole model."""
    tensors = sum(len(part.params) for part in parts_of(config))
    if config.hf is not None:
        return config.hf.tensors_before + tensors
    if config.stage is None or config.stage.is_first:
        return tensors
    tables = 2 if config.model.positions == "learned" else 1
    of_layer = sum(map(len, _layer(config.model).values())) + (2 if config.model.num_experts else 0)
    return tensors + tables + config.stage.first_layer * of_layer


@lru_cache(maxsize=16)
def _parts_of_shape(shape: ModelShape, stage: Stage | None) -> tuple[PartShape, ...]:
    """Kept, as a search asks for the same shape in many placements."""
    first = 0 if stage is None else stage.first_layer
    parts = [*_layers(shape, range(first, first + shape.num_layers))]
    if stage is None or stage.is_first:
        parts = [*_tables(shape), *parts]
    return tuple([*parts, *_end(shape)] if stage is None or stage.is_last else parts)


def _tables(shape: ModelShape) -> Iterator[PartShape]:
    table = (shape.vocab_size, shape.d_model)
    yield PartShape("embedding", (ParamShape("embedding.weight", table),), leaf=True)
    if shape.positions == "learned":
        learned = (shape.max_seq_len, shape.d_model)
        yield PartShape("positions", (ParamShape("positions.weight", learned),), leaf=True)


def _layers(shape: ModelShape, numbers: Sequence[int]) -> Iterator[PartShape]:
    sizes_of = _layer(shape)
    for number in numbers:
        layer = {f"blocks.{number}.{name}": sizes for name, sizes in sizes_of.items()}
        listed = shape.num_layers > 1
        modules = {name: _named(name, sizes, listed=listed) for name, sizes in layer.items()}
        if shape.num_experts:
            experts = f"blocks.{number}.mlp.experts"
            modules[experts] = _experts(experts, shape)
        if not listed:  # every module is its own block
            yield from (PartShape(name, params, leaf=True) for name, params in modules.items())
        else:
            params = tuple(param for many in modules.values() for param in many)
            yield PartShape(f"blocks.{number}", params, repeated=True)


def _end(shape: ModelShape) -> Iterator[PartShape]:
    yield PartShape("norm", _named("norm", _norm(shape)), leaf=True)
    if shape.tie_embeddings:
        yield PartShape("head", (), leaf=True, tied=("embedding",))
    else:
        weight = ParamShape("head.weight", (shape.vocab_size, shape.d_model))
        yield PartShape("head", (weight,), leaf=True)


def _named(
    module: str, sizes: Sequence[tuple[int, ...]], *, listed: bool = False
) -> tuple[ParamShape, ...]:
    """Return the weight and, if there is one, the bias. `listed`: of a layer in a list."""
    names = (f"{module}.weight", f"{module}.bias")
    return tuple(
        ParamShape(name, size, hidden=listed and len(size) == 2)
        for name, size in zip(names, sizes, strict=False)
    )


def _layer(shape: ModelShape) -> dict[str, list[tuple[int, ...]]]:
    """Return module of a layer → sizes of its parameters."""
    heads = (shape.num_heads + 2 * shape.kv_heads) * shape.head_dim
    modules = {
        "attention_norm": _norm(shape),
        "attention.qkv": _linear(shape, shape.d_model, heads),
        "attention.out": _linear(shape, shape.num_heads * shape.head_dim, shape.d_model),
        "mlp_norm": _norm(shape),
    }
    if shape.num_experts:
        return modules | {"mlp.router": [(shape.num_experts, shape.d_model)]}
    return modules | {
        "mlp.up": _linear(shape, shape.d_model, _up_width(shape)),
        "mlp.down": _linear(shape, shape.ff_width, shape.d_model),
    }


def _up_width(shape: ModelShape) -> int:
    return shape.ff_width * (2 if shape.mlp == "swiglu" else 1)


def _experts(module: str, shape: ModelShape) -> tuple[ParamShape, ...]:
    """The matrices of the experts of a layer that a rank holds, which lie behind its router."""
    parts = shape.num_experts // shape.held_experts
    sizes = {
        "up": (shape.held_experts, _up_width(shape), shape.d_model),
        "down": (shape.held_experts, shape.d_model, shape.ff_width),
    }
    return tuple(
        ParamShape(f"{module}.{name}", size, expert_parts=parts) for name, size in sizes.items()
    )


def _norm(shape: ModelShape) -> list[tuple[int, ...]]:
    with_bias = shape.norm == "layernorm" and shape.bias
    return [(shape.d_model,)] * (2 if with_bias else 1)


def _linear(shape: ModelShape, width: int, out: int) -> list[tuple[int, ...]]:
    return [(out, width), (out,)] if shape.bias else [(out, width)]


def _buckets(
    name: str, params: Sequence[ParamShape], config: Config, ranks: int
) -> tuple[BucketSpec, ...]:
    """Split parameters by update rule, weight decay, dtype and the ranks that share them, in order
    of appearance."""
    sorted_in: dict[tuple[bool, bool, str, int, bool], list[ParamShape]] = {}
    needs, named = needs_of(config.optim), config.offload.skip_unused
    skipped = {p.name: p.sizes for p in params if p.trained and skips(p.name, named)}
    experts = experts_in(skipped)
    for param in params:
        matrix = needs.of_matrices and param.hidden and param.trained
        decays = param.trained and (config.optim.decay == "all" or len(param.sizes) > 1)
        sharers = ranks // param.expert_parts
        key = (matrix, decays, working_dtype(param, config), sharers, param.name in experts)
        sorted_in.setdefault(key, []).append(param)
    several = len(sorted_in) > 1
    return tuple(
        _bucket(
            f"{name}/{number}" if several else name,
            some,
            dtype,
            config,
            sharers,
            matrices=matrix,
            experts=sum(experts.get(param.name, 0) for param in some),
        )
        for number, ((matrix, _, dtype, sharers, _), some) in enumerate(sorted_in.items())
    )


def _bucket(
    name: str,
    params: Sequence[ParamShape],
    dtype: str,
    config: Config,
    ranks: int,
    *,
    matrices: bool,
    experts: int,
) -> BucketSpec:
    """`matrices`: they are updated as such. `experts`: as in `BucketSpec`."""
    trained = params[0].trained
    needs = needs_of(config.optim).of_bucket(matrices=matrices) if trained else _STATELESS
    numels = [prod(param.sizes) for param in params]
    numel, matrix_specs = padded(numels, ranks), []
    if needs.whole:
        offsets, numel = placed(numels, ranks)
    if matrices:
        matrix_specs = [
            MatrixSpec(at, *param.sizes) for at, param in zip(offsets, params, strict=True)
        ]
    return BucketSpec(
        name,
        numel,
        sum(numels),
        dtype,
        format_for(config.offload.state.format, dtype),
        ranks,
        needs.moments,
        tuple(sorted(matrix_specs)),
        needs.whole and not matrices,
        experts=experts,
    )


def working_dtype(param: ParamShape, config: Config) -> str:
    """Dtype of the working weight."""
    named = any(fnmatchcase(param.name, pattern) for pattern in config.offload.weights.keep_fp32)
    in_fp32 = param.fp32 or named
    return PRECISIONS["fp32" if in_fp32 else config.offload.precision]
