"""Checks that a model can be offloaded with these options; warnings of options without effect."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain, islice, pairwise
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from offloadtrain.config.errors import ModelError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.parameters import OffloadedParameter
from offloadtrain.engine.partition import layers_of, partition
from offloadtrain.optim import AnyRule, MatrixRule, Rule
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import is_distributed, local
from offloadtrain.step.layout.formats import FORMATS
from offloadtrain.step.layout.state_tiers import may_be_on_device
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier

_log = logging.getLogger(__name__)

offloaded: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""Offloaded models, each with a weak reference to its `OffloadOptimizer`."""


_RULES = (
    "The rules are ot.AdamW, ot.Adam, ot.Lion, ot.SGD, ot.Adagrad, ot.LAMB, ot.Muon "
    "and your own "
    "(docs/extending.md)"
)
_OF_A_RULE = (
    "moments",
    "calls_only_kernels",
    "defaults",
    "check",
    "update",
    "set_master",
    "convert",
)


def check_arguments(model: object, rule: object) -> None:
    """Reject arguments in the order or of the kinds that other libraries take.

    Raises:
        TypeError: with the correct call.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: pass the model itself, ot.offload(model, "
            "ot.AdamW(lr=…)); groups of its parameters go into params=…"
        )
    if isinstance(rule, torch.optim.Optimizer):
        raise TypeError(
            f"rule is a torch.optim.{type(rule).__name__}, and offload makes the optimizer itself: "
            f"ot.offload(model, {_as_rule(rule)}). {_RULES}"
        )
    if isinstance(rule, type):
        torchs = issubclass(rule, torch.optim.Optimizer)
        kind = f"the class {rule.__name__}{' of torch.optim' if torchs else ', not one of it'}"
        raise TypeError(f"rule is {kind}: ot.offload(model, ot.AdamW(lr=…)). {_RULES}")
    if rule is None or isinstance(rule, MatrixRule):
        return
    if not callable(getattr(rule, "update", None)):
        raise TypeError(f"rule is {rule!r:.80}: ot.offload(model, ot.AdamW(lr=…)). {_RULES}")
    if missing := [name for name in _OF_A_RULE if not hasattr(rule, name)]:
        raise TypeError(
            f"rule is {rule!r:.80}, which lacks {', '.join(missing)} of optim.UpdateRule: "
            "optim.ElementwiseRule brings all but moments and update_fp32"
        )


def check_rule(rule: AnyRule, config: OffloadConfig) -> None:
    """Raises ValueError for options that the rule does not support."""
    _check_state_keeps(config.state.format, rule)
    if not isinstance(rule, MatrixRule):
        return
    _check_state_keeps(config.state.format, rule.rest)
    name = type(rule).__name__
    if config.state.format == "int8":
        raise ValueError(
            f"state = 'int8' and {name}: it writes moments and masters at two times, and int8 "
            "rounds them together. Use state = 'fp32' or 'split16'"
        )
    if config.state.format != "fp32" and may_be_on_device(config):
        raise ValueError(
            f"state = '{config.state.format}' and {name} with state on the device: its kernels for "
            "matrices are of fp32 state. Use state = 'fp32', or state_on = 'host'"
        )
    if config.update == "speculative":
        raise ValueError(
            f"update = 'speculative' and {name}: matrices are orthogonalized over their gradient, "
            "which a wrong guess would need again. Use update = 'exact' or 'delayed'"
        )


def _check_state_keeps(state: str, rule: Rule) -> None:
    """Raises ValueError if a format cannot store the rule's moments."""
    format = FORMATS[state]
    if not format.keeps_moments(rule.moments):
        alternatives = [
            f"'{name}'"
            for name, candidate in FORMATS.items()
            if candidate.keeps_moments(rule.moments)
        ]
        raise ValueError(
            f"state = '{state}' cannot keep {' and '.join(rule.moments) or 'no moment'} of "
            f"{type(rule).__name__}: use {' or '.join(alternatives)}"
        )


def _as_rule(optimizer: torch.optim.Optimizer) -> str:
    """Return the rule that corresponds to torch's optimizer, as source code."""
    name = type(optimizer).__name__
    keys = _AS_TORCH.get(name)
    if keys is None:
        return "ot.AdamW(lr=…)"
    return f"ot.{name}({', '.join(f'{key}={optimizer.defaults[key]}' for key in keys)})"


_AS_TORCH = {
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "eps"),
}
"""torch optimizers that exist here as rules of the same name, with their hyperparameters."""


def check_model(model: nn.Module, *, may_be_meta: bool = False, is_offloaded: bool = False) -> None:
    """Reject a model that would not train correctly, before anything is allocated or changed.

    Args:
        is_offloaded: the model's optimizer is about to change its layout.

    Raises:
        ModelError: naming the parameter or module and the remedy.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ModelError(
            f"the model is wrapped in {type(model).__name__}, which keeps gradients of its own: "
            "offload model.module"
        )
    # torch.compile's wrapper; an isinstance check would import the compiler.
    if hasattr(model, "_orig_mod"):
        raise ModelError(
            "the model is compiled as a whole, and its weights move between calls: compile each "
            "block instead (block.forward = torch.compile(block.forward)) and offload the model"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"'{name}' is a TorchScript module, whose forward takes no hooks: offload the "
                "module that it was scripted from, and script that after close()"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(f"'{name}' makes sparse gradients: build it with sparse=False")
    for name, param in model.named_parameters():
        if isinstance(param, OffloadedParameter) and not is_offloaded:
            raise ModelError(
                f"parameter '{name}' is a parameter of another offloaded model: close() its "
                "optimizer first, or offload one module that contains both models"
            )
        for is_faulty, what in _faults(param, may_be_meta):
            if is_faulty:
                raise ModelError(f"parameter '{name}' {what}")
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise ModelError("the model has nothing to train: no parameter has requires_grad=True")
    _check_overlap(list(model.named_parameters()))


def _faults(param: nn.Parameter, may_be_meta: bool) -> Iterator[tuple[bool, str]]:
    lazy = isinstance(param, nn.parameter.UninitializedParameter)
    yield lazy, "is not initialised: run one forward of the model first"
    if lazy:
        return
    yield (
        param.is_inference(),
        "was made in inference mode, and torch does not train it: make the model outside of it",
    )
    divided = is_distributed(param)
    yield (
        divided and not param.requires_grad,
        "is a frozen DTensor: only trained ones can be offloaded. Leave it out of the plan of "
        "parallelize_module, whole on each rank, or train it",
    )
    yield param.is_complex(), f"is complex ({param.dtype}): only real parameters can be offloaded"
    yield (
        param.requires_grad and param.dtype not in (torch.float32, torch.bfloat16, torch.float16),
        f"is {param.dtype}: trainable parameters must be float32, bfloat16 or float16",
    )
    yield (
        param.layout is not torch.strided,
        f"is {param.layout}: only dense parameters can be offloaded",
    )
    yield (
        param.is_meta and not may_be_meta,
        "is on the meta device: say how it is filled with param_init_fn, or materialise it first",
    )
    yield (
        bool(param.numel()) and param.grad is not None,  # empty parameters keep theirs
        "has a gradient already: call zero_grad(set_to_none=True) before offload()",
    )
    yield (
        local(param).untyped_storage().nbytes() < local(param).numel() * param.element_size(),
        "is an expanded view of a smaller storage: make it contiguous",
    )


def check_compiled(model: nn.Module, config: OffloadConfig) -> None:
    """Raises ModelError if modules with DTensor parameters are compiled or are to be compiled, or
    if operations are to be selected in a module that is compiled already."""
    selects = config.activations.mode == "selective" and not config.compute.compile_blocks
    for name, module in model.named_modules():
        if selects and has_compiled(module):
            raise ModelError(
                f"activation = 'selective' and '{name or type(module).__name__}' is compiled: what "
                "compiled code keeps is decided when it is compiled. Compile by offload("
                "compile_blocks=True, activation='selective'), or set activation = 'recompute'"
            )
        compiled = config.compute.compile_blocks or has_compiled(module)
        divided = compiled and any(map(is_distributed, module.parameters()))
        if divided:
            cause = (
                "compile_blocks=True" if config.compute.compile_blocks else f"'{name}' is compiled"
            )
            divided_param = next(n for n, p in model.named_parameters() if is_distributed(p))
            raise ModelError(
                f"{cause}, and parameter '{divided_param}' is a DTensor: torch does not compile "
                "those whose memory moves. Leave the compiler out"
            )


def _writes_weights(module: nn.Module) -> bool:
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return is_table and module.max_norm is not None


def check_run_again(model: nn.Module, config: OffloadConfig) -> None:
    """Raises ModelError for a torch module that would train with other gradients. RReLU saves its
    slopes before it draws them: torch's checkpoint may end a second run between the two, and
    "offload_saved" copies them there. A second run of an embedding with `max_norm` reads other
    weights, as the first run has written them."""
    activations = config.activations
    saves = activations.mode == "offload_saved"
    if config.compute.compile_blocks or not (activations.recomputes or saves):
        return
    layers = () if saves else activations.recomputed_of(layers_of(model))
    inside = {module for layer in layers for module in layer.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.RReLU) and (saves or module in inside):
            problem, modes = "an RReLU, which saves its slopes before it draws them", "'keep'"
        elif module in inside and _writes_weights(module):
            problem = f"an {type(module).__name__} with max_norm, which writes its weights"
            modes = "'keep' or 'offload_saved'"
        else:
            continue
        raise ModelError(
            f"activation = '{activations.mode}' and '{name}' is {problem}: set activation = {modes}"
        )


def check_wrapped(model: nn.Module, config: OffloadConfig) -> None:
    """Raises ModelError if weights are to be moved whose memory is in other tensors, such as
    torchao's quantized weights. On the device they stay unchanged."""
    if not config.weights.offloaded:
        return
    for name, param in model.named_parameters():
        if param.numel() and not param.is_meta and not local(param).data_ptr():
            raise ModelError(
                f"parameter '{name}' is a {type(param.data).__name__}, which holds its values in "
                f"other tensors, and working = '{config.weights.tier}' moves the memory of "
                "parameters: leave working = 'device'"
            )


def has_compiled(module: nn.Module) -> bool:
    """Return True if a module's forward is compiled."""
    return (
        hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _check_overlap(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raises ModelError for two parameters over the same bytes: flat buffers would untie them."""
    extents = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in ((name, local(param)) for name, param in named)
        if p.numel() > 0 and not p.is_meta and p.data_ptr()
    )
    for (_, end, name), (start, _, other) in pairwise(extents):
        if start < end:
            raise ModelError(
                f"parameters '{name}' and '{other}' share memory but are two objects. To tie them, "
                "assign the same nn.Parameter to both modules; otherwise clone one."
            )


def keeps_fp32(model: nn.Module, named: Iterable[str] = ()) -> set[nn.Parameter]:
    """Return the parameters that stay fp32 on the device whatever the precision.

    These are the parameters of norms with running statistics (torch rejects mixed dtypes there),
    those that a Hugging Face model names in `_keep_in_fp32_modules` and
    `_keep_in_fp32_modules_strict`, and those that `named` matches.

    Raises:
        ModelError: a pattern in `named` matches no parameter, or gives the parameters of a module
            two dtypes.
    """
    fp32_params: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            fp32_params.update(module.parameters(recurse=False))
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            if words := set(getattr(module, attribute, None) or ()):
                fp32_params.update(
                    p for n, p in module.named_parameters() if words & set(n.split("."))
                )
    for pattern in named:
        matching = [p for n, p in model.named_parameters() if fnmatchcase(n, pattern)]
        if not matching:
            some = ", ".join(name for name, _ in islice(model.named_parameters(), 3))
            raise ModelError(f"keep_fp32: no parameter is called '{pattern}'; there are {some}, …")
        fp32_params.update(matching)
    for name, module in model.named_modules() if named else ():
        params = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.GroupNorm | nn.modules.conv._ConvNd):
            if params and 0 < len(fp32_params.intersection(params)) < len(params):
                raise ModelError(
                    f"keep_fp32 names some of the parameters of '{name}', and torch computes with "
                    f"one dtype there: name all of them, '{name}.*'"
                )
    return fp32_params


def warn_of_local_norm(caller: str, count: int, ranks: Ranks) -> None:
    """Warn of clipping by the norm of `count` ranks if the world has more ranks."""
    if count < ranks.world_size:
        _log.warning(
            "%s in a process group of %d of %d ranks: the norm, and with it clipping and skipping, "
            "is that of this group's gradients. That is right where each group trains a model of "
            "its own; where the others hold other parts of the same model (pipeline or tensor "
            "parallel), parts clip differently and what they share drifts apart: do not clip there",
            caller,
            count,
            ranks.world_size,
        )


def warn_of_small_shares(spec: StepSpec) -> None:
    """Warn of a device share that is too small for any layer and thus has no effect."""
    config = spec.config
    shares = {
        "sums_on": (config.gradients.device_share, any(b.sums_on_device for b in spec.buckets)),
        "state_on": (config.state.device_share, spec.has_state_on(Tier.DEVICE)),
    }
    for option, (share, has_effect) in shares.items():
        if share and not has_effect:
            _log.warning(
                "%s = {'device': %g} is less than half of the first layer that it could hold: "
                "nothing is on the device. Raise it, or leave it out",
                option,
                share,
            )


def warn_of_views(model: nn.Module) -> None:
    """Warn of module attributes that view a parameter's memory, which the parameter will leave. A
    pre-forward hook of the module may recreate them for every forward."""
    owners = {
        param.untyped_storage()._cdata: name
        for name, param in model.named_parameters()
        if type(param) is nn.Parameter
    }
    for prefix, module in model.named_modules():
        for name, value in chain(vars(module).items(), module._buffers.items()):
            if type(value) is not torch.Tensor or module._forward_pre_hooks:
                continue
            if value.layout is torch.strided and value.untyped_storage()._cdata in owners:
                _log.warning(
                    "'%s' is a view of the parameter '%s' and keeps the values that it has now: "
                    "make it in forward",
                    f"{prefix}.{name}".removeprefix("."),
                    owners[value.untyped_storage()._cdata],
                )


def warn_of_no_layers(model: nn.Module, config: OffloadConfig, ranks: Ranks) -> None:
    """Warn of options for the layers of a list if the model has no list of layers."""
    if any(part.repeated for part in partition(model)):
        return
    options = [f"activation = {config.activations.mode!r}"] * config.activations.recomputes
    # Several ranks also divide the weights of other modules.
    options += [f"working = {config.weights.tier!r}"] * (
        config.weights.offloaded and ranks.is_single
    )
    options += ["compile_blocks = True"] * config.compute.compile_blocks
    if options:
        _log.warning(
            "%s: without effect, as %s has no list of layers (an nn.ModuleList or nn.Sequential "
            "with two or more that have weights). All weights and activations stay on the device; "
            "activation = 'offload_saved' moves the activations of any model",
            " and ".join(options),
            type(model).__name__,
        )
