"""Cuts a transformers decoder into pipeline stages through its own interface, without an import of
transformers.

[Note: Stages of a decoder]
The decoder's forward fails at missing modules, and looks up properties of a layer by its index:
kind of attention, mask, place in a cache. So the list of layers keeps its length. A layer of
another stage is replaced by a module that passes its input on, as are a missing final norm and the
dropout after the embedding. The first stage gets tokens; the others get hidden states as
`inputs_embeds`, which enter after the embedding and its scale. A stage without the head calls only
the base model; what the model's forward does to hidden states or logits after it (a cap, a scale)
is left to the last stage.
Module names do not prove that this is the same computation: `decoder_probe` runs the forward of
the model, undivided and in these stages, with stand-ins for all modules with weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import PipelineError
from offloadtrain.engine.partition import Part, remember_layers
from offloadtrain.parallel.pipeline.stage_modules import StandIn, cut

_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments that only the stage with the head accepts."""


class PassOn(StandIn):
    """Stand-in for a module of another stage; returns its first input."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class AddsNothing(StandIn):
    """Stand-in for an embedding of positions in another stage. The model adds its output to hidden
    states, which already include the positions."""

    def forward(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing()


class _Nothing:
    """Neutral operand of a sum: adding zeros would turn -0 into 0, and 16 bits into 32."""

    def to(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __radd__(self, other: Tensor) -> Tensor:
        return other

    def __add__(self, other: Tensor) -> Tensor:
        return other


def is_of_transformers(model: nn.Module) -> bool:
    """Return True if it is a model of transformers, or a PEFT wrapper around one."""
    of_class = getattr(type(model), "base_model_prefix", None)
    return isinstance(of_class, str) or hasattr(model, "get_base_model")


def check_decoder(model: Any, parts: Sequence[Part]) -> None:
    """Raise PipelineError for a transformers model of an unsupported structure."""
    name = type(model).__name__
    if hasattr(model, "get_base_model"):
        raise PipelineError(
            f"{name} wraps a model in adapters (PEFT), which a pipeline does not divide: merge them"
            ", or train without a pipeline"
        )
    base, config = model.base_model, model.config
    lists = {part.name.rpartition(".")[0] for part in parts if part.repeated}
    for problem, applies in {
        "it has no base model around its layers": base is model,
        "it has an encoder and a decoder": bool(config.is_encoder_decoder),
        "it has no head of its own (get_output_embeddings() is None)": head_of(model) is None,
        f"it has several lists of layers ({', '.join(sorted(lists))})": len(lists) != 1,
        # Its terms would have to be summed over the layers of all stages.
        "its loss balances experts (config.output_router_logits = True)": bool(
            getattr(config.get_text_config(), "output_router_logits", False)
        ),
        "its forward was replaced": any("forward" in module.__dict__ for module in (model, base)),
    }.items():
        if applies:
            raise refused(model, problem)


def refused(model: nn.Module, why: str) -> PipelineError:
    return PipelineError(
        f"{type(model).__name__} cannot be divided into stages: {why}. Pipelines take causal "
        "language models of transformers whose layers pass on hidden states and nothing else; "
        "others train on one process or on replicas (zero_stage)"
    )


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def cut_decoder(
    model: Any, own: Sequence[str], parts: Sequence[Part], *, index: int, count: int
) -> None:
    """Replace all parts not in `own` by stand-ins, and set the forward of this stage: it takes
    tokens or hidden states, and returns hidden states. The last stage returns logits, or its loss
    if it gets `labels`."""
    embedding, base = model.get_input_embeddings(), model.base_model
    inside = {id(module) for module in base.modules()}
    first_layer = next(number for number, part in enumerate(parts) if part.repeated)
    for number, part in enumerate(parts):
        if part.name in own:
            continue
        path, _, key = part.name.rpartition(".")
        module = model.get_submodule(part.name)
        stand_in: StandIn | None = None
        if number < first_layer and isinstance(module, nn.Embedding) and module is not embedding:
            stand_in = AddsNothing()
        elif module is not embedding and id(module) in inside:
            stand_in = PassOn()
        model.get_submodule(path)._modules[key] = stand_in
    holder = model.get_submodule(_list_of(parts).rpartition(".")[0])
    _pass_over_others(holder, is_first=index == 0, is_last=index == count - 1)
    # A partial, not a method: a copied model must call the copy.
    setattr(model, "forward", partial(_forward, model, index, count))  # noqa: B010


def cut_stage(model: nn.Module, stages: Sequence[Sequence[Part]], index: int) -> None:
    """Reduce the model to one of the stages of `divide`, computed from it or another model of its
    class."""
    every, stage_names = (
        [part for parts in stages for part in parts],
        [part.name for part in stages[index]],
    )
    remember_layers(model, [part.name for part in stages[index] if part.repeated])
    if is_of_transformers(model):
        cut_decoder(model, stage_names, every, index=index, count=len(stages))
    else:
        cut(model, stage_names, [part.name for part in every])


def _list_of(parts: Sequence[Part]) -> str:
    return next(part.name.rpartition(".")[0] for part in parts if part.repeated)


def _pass_over_others(holder: nn.Module, *, is_first: bool, is_last: bool) -> None:
    """Skip modules without weights that belong to the first or the last stage: dropout before the
    layers, and a norm without weights after them. Rotary embeddings remain: they have buffers."""
    after_layers = False
    for key, child in list(holder.named_children()):
        after_layers = after_layers or isinstance(child, nn.ModuleList)
        empty = next(chain(child.parameters(), child.buffers(), child.children()), None) is None
        passes = not is_last if after_layers else not is_first and isinstance(child, nn.Dropout)
        if passes and empty and not isinstance(child, StandIn):
            setattr(holder, key, PassOn())


def _forward(model: Any, index: int, count: int, stage_input: Tensor, **kwargs: Any) -> Tensor:
    """The forward of a stage; see [Note: Stages of a decoder]."""
    entrance = "input_ids" if index == 0 else "inputs_embeds"
    named: dict[str, Any] = {entrance: stage_input, "use_cache": False}
    if index < count - 1:
        named |= {key: value for key, value in kwargs.items() if key not in _OF_THE_LOSS}
        if "output_router_logits" in signature(type(model).forward).parameters:
            named["output_router_logits"] = False  # as in the config, see `check_decoder`
        hidden: Tensor = model.base_model(**named).last_hidden_state
        return hidden
    out = type(model).forward(model, **named, **kwargs)
    result: Tensor = out.loss if kwargs.get("labels") is not None else out.logits
    return result


def check_dtype(stage: nn.Module, outputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise PipelineError for hidden states that are wider than the weights: a model with 16-bit
    weights casts such inputs at its first layer, but not between its layers."""
    for wide in (x.dtype for x in outputs if x.dtype != dtype):
        raise refused(stage, f"with weights of {dtype} hidden states between layers are {wide}")
