"""Partitions and pads the model of a job into blocks as the engine does, without memory.

The engine's functions run on parameters on the meta device: those of the shipped transformer, or
those in the description of another model (`config.hf_model.PartShape`).
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from offloadtrain.config.hf_model import ParamShape, PartShape
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.offload import PRECISIONS, OffloadConfig
from offloadtrain.config.ranks_options import Stage
from offloadtrain.config.sections import OptimConfig
from offloadtrain.engine.build import make_blocks
from offloadtrain.engine.checks import keeps_fp32
from offloadtrain.engine.division import Division
from offloadtrain.engine.param_groups import hidden_matrices
from offloadtrain.engine.partition import Part, partition
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim import MatrixRule, rule_of
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.runtime.lanes import SequentialLanes
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import AS_LARGE_AS_EXPERTS
from offloadtrain.step.layout.block_spec import BlockSpec


def parts_of_module(
    model: nn.Module, divided: Mapping[str, int] | None = None, expert_parts: int = 1
) -> tuple[PartShape, ...]:
    """Return the parts of a model that become blocks; a shared parameter is in the first of them.

    Args:
        model: on any device, including meta.
        divided: name of a parameter → the dimension that tensor parallel divides.
        expert_parts: number of ranks that hold different experts of the shipped transformer.
    """
    dims = divided or {}
    shapes: list[PartShape] = []
    listed: set[nn.Parameter] = set()
    hidden, fp32 = hidden_matrices(model), keeps_fp32(model)
    for part in partition(model):
        new = [(name, param) for name, param in part.parameters if param not in listed]
        listed.update(param for _, param in new)
        params = (
            ParamShape(
                name,
                tuple(param.shape),
                param.requires_grad,
                param in hidden,
                param in fp32,
                expert_parts if ".mlp.experts." in name else 1,
                dims.get(name),
            )
            for name, param in new
        )
        tied = tuple(name or "root" for name in part.tied)
        shapes.append(PartShape(part.name or "root", tuple(params), part.repeated, part.leaf, tied))
    return tuple(shapes)


def parts_of(config: Config) -> tuple[PartShape, ...]:
    """Return every parameter of the job's model, in registration order; a tied one once."""
    if config.hf is None:
        return _parts_of_shape(config.rank_shape, config.stage, config.ranks.expert)
    assert config.hf.parts is not None, "integrations.hf_job.described comes first"
    if (parts := config.ranks.tensor) == 1:
        return config.hf.parts
    return tuple(
        replace(part, params=tuple(param.of_part(parts) for param in part.params))
        for part in config.hf.parts
    )


def num_tensors(config: Config) -> int:
    """Return the number of parameter tensors; a tied one counts once. For a pipeline stage, earlier
    stages are included: norms are indexed by the position in the complete model."""
    parts = parts_of(config)
    tensors = sum(len(part.params) for part in parts)
    if config.hf is not None:
        return config.hf.tensors_before + tensors
    if config.stage is None or config.stage.is_first:
        return tensors
    tables = 2 if config.model.positions == "learned" else 1
    in_layers = sum(len(part.params) for part in parts if part.name.startswith("blocks."))
    return tensors + tables + config.stage.first_layer * in_layers // config.stage.layers


def empty_transformer(shape: ModelShape, stage: Stage | None = None) -> Transformer:
    """Return the shipped transformer on the meta device, or a stage of it.

    Args:
        shape: the shape of the rank's part, with the layers of the stage.
    """
    with torch.device("meta"):
        model = Transformer(shape)
    if stage is not None and not stage.is_first:
        model.register_module("embedding", None)
        if shape.positions == "learned":
            model.register_module("positions", None)
    if stage is not None and not stage.is_last:
        model.register_module("norm", None)
        model.register_module("head", None)
    return model


@lru_cache(maxsize=64)
def _parts_of_shape(
    shape: ModelShape, stage: Stage | None, expert_parts: int
) -> tuple[PartShape, ...]:
    """Cached, since a search needs the same shape in many placements."""
    model = empty_transformer(shape, stage)
    if stage is not None:  # name layers by their index in the complete model
        layers = enumerate(list(model.blocks), stage.first_layer)
        model.blocks._modules = {str(number): layer for number, layer in layers}
    return parts_of_module(model, expert_parts=expert_parts)


def working_dtype(param: ParamShape, config: OffloadConfig) -> str:
    """Return the dtype of the working weight."""
    named = any(fnmatchcase(param.name, pattern) for pattern in config.weights.keep_fp32)
    return PRECISIONS["fp32" if param.fp32 or named else config.precision]


def blocks_of(config: Config, ranks: int = 1) -> tuple[BlockSpec, ...]:
    """Return all blocks in forward order."""
    offload = config.offload
    needed = OffloadConfig(
        precision=offload.precision,
        working=offload.weights.tier,
        zero_stage=offload.sharding.zero_stage,
        state=offload.state.format,
        activation=offload.activations.mode,
        recompute_blocks=offload.activations.recompute_blocks,
        keep_fp32=offload.weights.keep_fp32,
        skip_unused=offload.skip_unused,
    )
    return _blocks(parts_of(config), config.optim, needed, ranks, config.ranks.expert)


class _Parameters(nn.Module):
    """A module with these named parameters, in place of the modules that own them."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named.items())


@lru_cache(maxsize=64)
def _blocks(
    shapes: Sequence[PartShape],
    optim: OptimConfig,
    config: OffloadConfig,
    ranks: int,
    expert_parts: int,
) -> tuple[BlockSpec, ...]:
    """Cached, since the candidates of a search differ in few of the options that blocks need."""
    named = {param.name: _parameter(param) for shape in shapes for param in shape.params}
    parts = [
        Part(
            shape.name,
            nn.Module(),
            tuple((param.name, named[param.name]) for param in shape.params),
            shape.repeated,
            shape.leaf,
            shape.tied,
        )
        for shape in shapes
    ]
    params = [param for shape in shapes for param in shape.params]
    fp32 = [p.name for p in params if working_dtype(p, config) == PRECISIONS["fp32"]]
    rule = update_rule(optim)
    groups = _groups([param for param in params if param.trained], named, rule, optim)
    blocks, _ = make_blocks(
        parts,
        _Parameters(named),
        groups,
        [rule_of(rule, group) for group in groups],
        config.replace(keep_fp32=tuple(map(glob.escape, fp32))),
        Division(replicas=Ranks.fake(ranks, expert_parts=expert_parts)),
        SequentialLanes(),
    )
    return tuple(block.spec for block in blocks)


def _parameter(shape: ParamShape) -> nn.Parameter:
    param = nn.Parameter(torch.empty(shape.sizes, device="meta"), requires_grad=shape.trained)
    if shape.expert_parts > 1:
        setattr(param, AS_LARGE_AS_EXPERTS, True)
    return param


def _groups(
    trained: Sequence[ParamShape],
    named: Mapping[str, nn.Parameter],
    rule: Any,
    optim: OptimConfig,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a job: by weight decay and, for a matrix rule, by its key."""
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    key = rule.group_key if isinstance(rule, MatrixRule) else "hidden"
    for param in trained:
        hidden = isinstance(rule, MatrixRule) and param.hidden
        decays = optim.decay == "all" or len(param.sizes) > 1
        group = groups.setdefault((hidden, decays), {"params": [], key: hidden})
        group["params"].append(named[param.name])
    return list(groups.values())
