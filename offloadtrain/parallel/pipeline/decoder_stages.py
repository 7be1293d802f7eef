"""A decoder of transformers cut into the stages of a pipeline, by its own interface: this module
imports nothing of transformers.

[Note: Stages of a decoder]
Its forward does not pass over missing modules, and asks for its layers by number: for their kind of
attention, their mask, their place in a cache. So the list of layers keeps its length. In the place
of a layer that another stage holds stands a module that passes its input on, and so do those for a
missing final norm and for dropout after the embedding. The first stage gets tokens; the others get
hidden states as `inputs_embeds`, which enter after the embedding and whatever scales it. A stage
without the head calls the base model alone: what the whole forward does to its input or to logits
(a cap, a scale) is left to the last one.
That this is the same computation is not taken from names: `decoder_probe` runs the forward of the
model, whole and in these stages, over stand-ins for everything that has weights.
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
"""Arguments that only the stage with the head takes."""


class PassOn(StandIn):
    """In the place of another stage's module: its output is its first input."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class AddsNothing(StandIn):
    """In the place of another stage's embedding of positions, whose output is added to the hidden
    states: they have it already."""

    def forward(self, *_: Any, **__: Any) -> _Nothing:
        return _Nothing()


class _Nothing:
    """What a sum leaves out: adding zeros would turn -0 into 0, and 16 bits into 32."""

    def to(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __radd__(self, other: Tensor) -> Tensor:
        return other

    def __add__(self, other: Tensor) -> Tensor:
        return other


def is_of_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, or PEFT's around one."""
    of_class = getattr(type(model), "base_model_prefix", None)
    return isinstance(of_class, str) or hasattr(model, "get_base_model")


def check_decoder(model: Any, parts: Sequence[Part]) -> None:
    """Raises PipelineError for a model of transformers of whose structure nothing is known here."""
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
        # They would be added up over the layers of all stages.
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
    """Put stand-ins into the place of all other parts than `own`, and make the forward that of this
    stage: it takes tokens or hidden states, and returns hidden states or, the last one, logits; its
    loss where it gets `labels`."""
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
    # No method, so that a copy of the model has that of the copy.
    setattr(model, "forward", partial(_forward, model, index, count))  # noqa: B010


def cut_stage(model: nn.Module, stages: Sequence[Sequence[Part]], index: int) -> None:
    """Keep one of the stages of `divide`, of this model or of another model of its class."""
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
    layers, and a norm without weights after them. Rotary embeddings have buffers."""
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
            named["output_router_logits"] = False  # as `check_decoder` has seen
        hidden: Tensor = model.base_model(**named).last_hidden_state
        return hidden
    out = type(model).forward(model, **named, **kwargs)
    result: Tensor = out.loss if kwargs.get("labels") is not None else out.logits
    return result


def check_dtype(stage: nn.Module, outputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raises PipelineError for hidden states wider than weights: of a model of 16-bit weights such
    inputs are cast at its first layer, and those between its layers are not."""
    for wide in (x.dtype for x in outputs if x.dtype != dtype):
        raise refused(stage, f"with weights of {dtype} hidden states between layers are {wide}")
