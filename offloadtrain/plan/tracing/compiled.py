"""Computes what a compiled layer saves for backward.

[Note: What compiled layers save]
torch's partitioner decides it ([Note: Compiled recompute] in `engine.autograd.compiled`), from a
graph of forward and backward after the compiler's passes over that graph. A plan runs the same
partitioner on a graph of one layer over fake tensors, for which no code is generated. The first
layer of the model stands for all. The operations are those that a GPU would record: there fused
attention pads heads to a multiple of 8 channels, and the partitioner weighs its FLOPs.

Weights and inputs of the layer are not counted. Inputs are outputs of the previous layer, which
`activation = "recompute"` stores as well.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.autograd.casting import attach_casts
from offloadtrain.engine.autograd.compiled import BudgetedBackend
from offloadtrain.engine.autograd.float8 import Float8Layers
from offloadtrain.engine.partition import partition
from offloadtrain.model.loss import cpu_stands_for
from offloadtrain.plan.tracing.alike import fake_model, runs_of
from offloadtrain.plan.tracing.patches import masks_as_in_training, operations_of_device
from offloadtrain.runtime.dtypes import PRECISIONS

_log = logging.getLogger(__name__)

_HEAD_MULTIPLE = 8
"""Flash attention on a GPU needs channels per head in multiples of this; torch pads others."""


class _LayerReachedError(Exception):
    """Raised when a forward reaches the first layer of a model, with the layer's arguments."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.args_of_layer, self.kwargs = layer, args, kwargs


def saved_share(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    config: OffloadConfig,
    *,
    on_cpu: bool,
    packed: bool = False,
) -> float:
    """Return the ratio of the bytes that a layer saves compiled to those that it saves eager.

    Args:
        model: real or on the meta device. Unchanged.
        loss_of: runs the forward of the model.
        config: uses precision, fp8, cast_inputs and activation_budget.
        on_cpu, packed: see `trace_step`.
    """
    budget, dtype = config.activations.compiled_budget or 0.0, PRECISIONS[config.precision]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = fake_model(model, mode, runs_of(model))
    with mode, cpu_stands_for(on_cpu=on_cpu), masks_as_in_training(packed=packed):
        _cast_weights(copied, dtype)
        layers = [part.module for part in partition(copied) if part.repeated]
        # Hooks stay attached while this list is alive.
        hooks: list[object] = [
            *attach_casts(copied, layers, dtype, cast_inputs=config.activations.cast_inputs)
        ]
        hooks += [layer.register_forward_pre_hook(_reach, with_kwargs=True) for layer in layers]
        try:
            loss_of(copied)
        except _LayerReachedError as reached:
            layer, args, kwargs = reached.layer, reached.args_of_layer, reached.kwargs
        else:
            return budget  # no layer ran
        try:
            with operations_of_device(on_cpu=on_cpu):
                eager = _saved_by_eager(layer, args, kwargs)
            if config.compute.fp8 != "off" and find_spec("torchao") is not None:
                device = torch.device("cpu" if on_cpu else "meta")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torchao's imports warn of torch
                    Float8Layers(copied, config.compute.fp8, device, is_compiled=True)
            with _graphs_of_device(on_cpu=on_cpu), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's compiler warns of torch
                return _saved_by_compiled(layer, args, kwargs, budget, mode) / max(eager, 1)
        except Exception as error:
            _log.warning(
                "compile_blocks: what a compiled %s saves is not known (%s: %s). It is planned "
                "as %g times what it saves if it is not compiled",
                *(type(layer).__name__, type(error).__name__, error, budget),
            )
            return budget


def _reach(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _LayerReachedError(layer, args, kwargs)


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_floating_point():
                data = torch.empty_like(param.detach(), dtype=dtype)
                module._parameters[name] = nn.Parameter(data, param.requires_grad)


@contextmanager
def _graphs_of_device(*, on_cpu: bool) -> Iterator[None]:
    """Record attention as on a GPU, unless `on_cpu`."""
    if on_cpu:
        yield
        return

    def attended(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        channels = query.shape[-1]
        scale = channels**-0.5 if scale is None else scale
        if attn_mask is None:
            padding = 0, -channels % _HEAD_MULTIPLE
            padded = [F.pad(x, padding) if padding[1] else x for x in (query, key, value)]
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out = flash(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return cast(Tensor, out[..., : value.shape[-1]])
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return cast(Tensor, out)

    with patch.object(F, "scaled_dot_product_attention", attended):
        yield


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return storage → bytes. The keys are valid while the tensors are alive."""
    storages = (leaf.untyped_storage() for leaf in tensors if isinstance(leaf, Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _bytes_beyond(saved: Iterable[Any], others: Iterable[Any]) -> int:
    """Return the bytes of saved tensors that share no memory with `others`."""
    shared = _storages(others).keys()
    return sum(size for key, size in _storages(saved).items() if key not in shared)


def _saved_by_eager(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    # Copy non-tensors: a forward may write to caches among its arguments.
    args, kwargs = tree_map(lambda x: x if isinstance(x, Tensor) else deepcopy(x), (args, kwargs))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer.forward(*args, **kwargs)
    return _bytes_beyond(saved, [*tree_leaves((args, kwargs, out)), *layer.parameters()])


def _saved_by_compiled(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    budget: float,
    mode: FakeTensorMode,
) -> int:
    # Imported here, since the compiler takes seconds to import.
    from torch._functorch import partitioners
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    weights: dict[str, Tensor] = dict(layer.named_parameters())
    sizes: list[int] = []
    leaves, structure = tree_flatten((args, kwargs))
    tensors = {
        at: leaf.detach().requires_grad_(leaf.requires_grad)
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    }

    def run(weights: dict[str, Tensor], tensors: dict[int, Tensor]) -> Any:
        inputs = [tensors[at] if at in tensors else deepcopy(x) for at, x in enumerate(leaves)]
        args, kwargs = tree_unflatten(inputs, structure)
        with _reparametrize_module(layer, weights):
            return layer.forward(*args, **kwargs)

    def partitioned(graph: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        with V.set_fake_mode(mode):
            joint_graph_passes(graph)
        # Weights stay alive anyway.
        options |= {"static_lifetime_input_indices": [*range(len(weights))]}
        options |= {"num_fwd_outputs": num_fwd_outputs, "compiler": "inductor"}
        halves = partitioners.min_cut_rematerialization_partition(graph, inputs, **options)
        forward: Any = halves[0].graph
        outputs = forward.output_node().args[0]
        results = [getattr(node, "meta", {}).get("val") for node in outputs]
        outputs_of_layer = results[:num_fwd_outputs]
        placeholders = [node.meta.get("val") for node in forward.nodes if node.op == "placeholder"]
        sizes.append(_bytes_beyond(results, [*outputs_of_layer, *placeholders]))
        return halves

    def uncompiled(gm: Any, example_inputs: Any) -> Any:
        return gm

    # On failure torch writes the graph into the current folder; discard it.
    unwritten = patch.object(partitioners, "_get_unique_path", lambda *_: os.devnull, create=True)
    with BudgetedBackend(budget)._patched_partitioner(), unwritten:
        compiled = aot_function(
            run, uncompiled, uncompiled, partitioned, decompositions=select_decomp_table()
        )
        compiled(weights, tensors)
    return sizes[0] if sizes else 0
