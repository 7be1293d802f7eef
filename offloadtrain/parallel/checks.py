"""Checks of models whose matrices or experts are divided among ranks.

[Note: Held whole]
Every rank of a divided model holds some parameters in full: norms, a router, parameters that no
plan names. Their gradients are not summed, because all parts compute the same ones from the same
batch. If they do not, the copies drift apart, which no loss shows, and the norm is wrong, because
it counts the first part's gradient. So all parts begin with the same values, and every step
compares sums of squares before its update. On a GPU the order of atomic additions changes some
bits, so relative differences up to 1 % are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from offloadtrain.config.errors import ModelError
from offloadtrain.optim import AnyRule, keeps_whole
from offloadtrain.runtime.process_group import RankError, Ranks
from offloadtrain.runtime.tensor_parts import holds_experts, is_distributed, is_divided

_ALIKE = 1e-2
"""Largest accepted relative difference between the sums of squares of equal gradients."""

_NOTHING = 1e-9
"""Fraction of the sum of all squares; gradients below it are noise, such as that of a key's
bias."""


def check_parts(
    model: nn.Module, rule: AnyRule, parts: Ranks, ranks: Ranks, *, is_stage: bool
) -> None:
    """Raise ModelError for DTensors whose other parts the norm would not include or whose rule
    needs undivided matrices, and for mesh axes along which nothing is divided.

    Args:
        parts: ranks of tensor parallelism.
        ranks: ranks that share the state; with expert parallelism some hold different experts.
        is_stage: the model is a pipeline stage; the divided parameters may be in other stages.
    """
    _check_axes(model, parts, ranks, is_stage=is_stage)
    _check_tie(model)
    for name, param in model.named_parameters():
        if not is_distributed(param):
            continue
        if holds_experts(param):
            _check_experts(name, param, ranks)
        else:
            _check_part(name, param, parts)
        if keeps_whole(rule):
            raise ModelError(
                f"parameter '{name}' is a part of a tensor, and {type(rule).__name__} updates "
                "whole ones: use ot.AdamW"
            )


def _check_axes(model: nn.Module, parts: Ranks, ranks: Ranks, *, is_stage: bool) -> None:
    divided = ranks.size // ranks.of_experts.size
    if divided > 1 and not any(map(holds_experts, model.parameters())):
        raise ModelError(
            f"the mesh has an axis 'ep' of {divided} ranks, and no experts of the model are "
            "divided along it: call ot.expert_parallel(model, mesh) before offload(), or name the "
            "axis 'dp'"
        )
    if not (parts.is_single or is_stage or any(map(is_divided, model.parameters()))):
        raise ModelError(
            f"the mesh has an axis 'tp' of {parts.size} ranks, and no parameter of the model is "
            "divided along it: call parallelize_module(…, mesh['tp'], plan) before offload(), or "
            "name the axis 'dp' if each of its ranks has batches of its own. Matrices that are "
            "divided otherwise have to be DTensors, or their norm would be that of one part"
        )


def _check_tie(model: Any) -> None:
    """Refuse a transformers model whose head and embedding were tied before one was divided."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if not (tied and getattr(model, "_tied_weights_keys", None)):
        return
    pair = model.get_input_embeddings(), model.get_output_embeddings()
    first, last = (getattr(module, "weight", None) for module in pair)
    # Skipped for a pipeline stage, which has only one of them.
    if first is not None and last is not None and first is not last:
        if is_distributed(first) or is_distributed(last):
            raise ModelError(
                "the head and the embedding of the model are two parameters, and its config ties "
                "them: parallelize_module makes new ones. Divide both alike and tie them behind "
                "it (model.lm_head.weight = model.get_input_embeddings().weight), or leave both "
                "whole"
            )


def _check_experts(name: str, param: Any, ranks: Ranks) -> None:
    on, divided = _ranks_of(param), ranks.size // ranks.of_experts.size
    if len(on) != divided:
        raise ModelError(
            f"the experts of '{name}' are divided among {len(on)} ranks, and "
            f"offload() knows of {divided}: pass it the mesh of expert_parallel, "
            "offload(model, mesh=mesh), with the axes 'dp' and 'ep'"
        )
    if not set(on) <= set(ranks.members) or len(set(on) & set(ranks.of_experts.members)) > 1:
        raise ModelError(
            f"the experts of '{name}' are divided among the ranks {on}, which are not those of "
            "the axis 'ep' of offload's mesh: pass it the mesh of expert_parallel"
        )


def _check_part(name: str, param: Any, parts: Ranks) -> None:
    on = _ranks_of(param)
    if len(on) != parts.size:
        raise ModelError(
            f"parameter '{name}' is a DTensor on {len(on)} ranks, and "
            f"{parts.size} hold parts of the model: pass the mesh, offload(model, mesh=mesh), "
            "whose axis 'tp' is that of parallelize_module. Shards of data parallelism are the "
            "engine's own (zero_stage): do not wrap the model in FSDP"
        )
    if on != sorted(parts.members):
        raise ModelError(
            f"parameter '{name}' is a DTensor on the ranks {on}, and the axis 'tp' of offload's "
            f"mesh has {sorted(parts.members)}: give parallelize_module mesh['tp'] of the mesh "
            "that offload gets"
        )
    if any(placed.is_partial() for placed in param.placements):
        raise ModelError(
            f"parameter '{name}' is a DTensor whose values are still to be summed (Partial): "
            "redistribute it to Replicate() or Shard(dim) before offload()"
        )


def _ranks_of(param: Any) -> list[int]:
    ranks: list[int] = sorted(param.device_mesh.mesh.flatten().tolist())
    return ranks


def check_same_weights(names: Sequence[str], checksums: Sequence[float], parts: Ranks) -> None:
    """Compare initial values of parameters that all parts hold in full, see [Note: Held whole]; a
    collective.

    Args:
        checksums: checksum of each parameter's values.

    Raises:
        RankError: the values of a parameter differ; the message names the first one.
    """
    if parts.is_single or not names:
        return
    rows = parts.all_gather_host(checksums)
    for name, values in zip(names, rows.T.tolist(), strict=True):
        if other := next((at for at, value in enumerate(values) if value != values[0]), 0):
            raise RankError(
                f"parts {other} and 0 of the model differ in the values of '{name}', which each "
                "holds whole: make the model from the same seed on all ranks "
                "(torch.manual_seed), or load the same weights before offload(). Parts of a "
                "matrix are DTensors, as parallelize_module makes them"
            )


def check_same_gradients(
    names: Sequence[str], squares: Tensor, divided: Collection[int], step_count: int
) -> None:
    """Compare the gradients of parameters that all parts hold in full, see [Note: Held whole].

    Args:
        squares: (parts, parameters) fp64 on the host. If some are not finite, nothing is
            compared: the step is skipped.
        divided: indices of the parameters that are divided among the parts.

    Raises:
        RankError: gradients differ; the message names the first parameter.
    """
    low, high = squares.aminmax(dim=0)
    differs = (high - low > _ALIKE * high) & (high > _NOTHING * high.sum())
    differs[[*divided]] = False
    if not bool(differs.any()):
        return
    index = int(differs.nonzero()[0, 0])
    of_parts = squares[:, index].tolist()
    other = max(range(len(of_parts)), key=lambda at: abs(of_parts[at] - of_parts[0]))
    norms = f"{math.sqrt(of_parts[other]):.4g}, on part 0 {math.sqrt(of_parts[0]):.4g}"
    raise RankError(
        f"parts disagree in step {step_count + 1}: the gradient of '{names[index]}', which all "
        f"{len(of_parts)} ranks of 'tp' hold whole, has another norm on part {other} ({norms}), "
        "and their copies would drift apart. All parts need the same batch, the same weights and "
        "buffers, and the same dropout of what they all compute (torch.manual_seed). If each part "
        "has some of this gradient only, as of a norm of its heads or of its part of the "
        "sequence, give its module SequenceParallel() in the plan of parallelize_module, which "
        "sums it"
    )
