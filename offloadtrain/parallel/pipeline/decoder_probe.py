"""Runs a transformers decoder undivided and in stages, and compares the results.

[Note: A decoder without weights]
Every module with weights is replaced: layers and norms by a product and a sum, embeddings and head
by fixed functions. Only the model's code around them remains. It runs once undivided and once in
the requested stages, which are cut by the function that cuts the real ones. Every stand-in records
its arguments. If layers get equal arguments in both runs, to the bit, and the logits are equal,
then stages compute the same as the undivided model, whatever the layers do to their input. This
holds only if nothing but hidden states passes from layer to layer, so a cache, a dictionary, or
any other object that a layer could fill for the next is refused. The runs are on the host and
take little time, as they multiply no matrices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from offloadtrain.engine.partition import Part
from offloadtrain.parallel.pipeline.decoder_stages import check_decoder, cut_stage, head_of, refused

_ROWS, _TOKENS = 2, 6

Call = tuple[str, Any, Any]
"""(part, its arguments, its keyword arguments)"""


class _Noting(nn.Module):
    """Stand-in for a module with weights; records its arguments."""

    note: Callable[[Any, Any], None]

    def __init__(self, name: str, number: int, calls: list[Call], sizes: tuple[int, ...]) -> None:
        """`calls`: gets (name, args, kwargs) of every call. `sizes`: shape of the first weight of
        the replaced module."""
        nn.Module.__init__(self)  # not the constructor of the replaced module's class
        self.number, self.sizes = number, sizes
        # A parameter, so that it counts as a module with weights, as the replaced one does.
        self.register_parameter("weight", nn.Parameter(torch.zeros(1)))
        self.note = lambda args, kwargs: calls.append((name, args, kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.note(*tree_map_only(Tensor, torch.clone, (args, kwargs)))
        first: Tensor = args[0] if args else next(iter(kwargs.values()))
        return self.made(first)

    def made(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.1 / (1 + self.number)) + 0.01 * (1 + self.number)


class _NotingEmbedding(_Noting, nn.Embedding):
    """Stand-in for an embedding of tokens or positions."""

    def made(self, x: Tensor) -> Tensor:
        return torch.sin((x[..., None] + 1.0) * (torch.arange(self.sizes[-1]) + 1.0))


class _NotingHead(_Noting):
    def made(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True) * torch.linspace(0.5, 1.0, self.sizes[0])


@torch.no_grad()
def check_stages(model: Any, stages: Sequence[Sequence[Part]]) -> None:
    """Run the model without its weights, undivided and in stages, and compare.

    Raises:
        PipelineError: the model's structure is unknown, or stages would compute something else.
    """
    parts = [part for stage in stages for part in stage]
    check_decoder(model, parts)
    try:
        whole_calls, logits = _run(model, parts, [])
        _check_calls(model, parts, whole_calls)
        calls, stage_logits = _run(model, parts, stages)
    except ValueError as error:
        raise refused(model, f"{error}") from error
    except Exception as error:  # the model's code may raise anything at stand-ins
        raise refused(model, f"without its weights its forward fails ({error})") from error
    if [name for name, *_ in calls] != [name for name, *_ in whole_calls]:
        raise refused(model, "in stages its modules are called in another order")
    for (name, *got), (_, *expected) in zip(calls, whole_calls, strict=True):
        if not _same(got, expected):
            raise refused(model, f"'{name}' would get something else in its stage")
    if not _same(stage_logits, logits):
        raise refused(model, "its logits would differ")


def _run(
    model: Any, parts: Sequence[Part], stages: Sequence[Sequence[Part]]
) -> tuple[list[Call], Tensor]:
    """Return all calls of parts, and the logits. Without stages, run the undivided model."""
    calls: list[Call] = []
    vocab = head_of(model).weight.shape[0]
    tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % vocab
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if padding is not None:
        # The mask that a forward derives from tokens differs from that of hidden states. The
        # padding is not at an end, where transformers would warn about it.
        tokens = torch.where(tokens == padding, (padding + 1) % vocab, tokens)
        tokens[:, 2] = padding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if not stages:
            return calls, _without_weights(model, parts, calls)(tokens, use_cache=False).logits
        hidden = tokens
        for index in range(len(stages)):
            stage = _without_weights(model, parts, calls)
            cut_stage(stage, stages, index)
            hidden = stage(hidden)
    return calls, hidden


def _without_weights(model: Any, parts: Sequence[Part], calls: list[Call]) -> Any:
    """Copy the model with its parts replaced by modules that only record their calls."""
    embeddings, head = model.get_input_embeddings(), head_of(model)
    memo: dict[int, Any] = {}
    for number, part in enumerate(parts):
        kind: type[_Noting] = _Noting
        sizes = tuple(part.parameters[0][1].shape)
        if part.module is head:
            kind = _NotingHead
        elif part.module is embeddings or isinstance(part.module, nn.Embedding):
            kind = _NotingEmbedding
        memo[id(part.module)] = kind(part.name, number, calls, sizes)
    memo |= {id(buffer): _on_host(buffer) for buffer in model.buffers()}
    copied = copy.deepcopy(model, memo)
    copied.__dict__.pop("forward", None)
    return copied.train(model.training)


def _on_host(buffer: Tensor) -> Tensor:
    if buffer.is_meta:
        return torch.full_like(buffer, 1, device="cpu")
    return buffer.detach().cpu().clone()


def _check_calls(model: Any, parts: Sequence[Part], calls: Sequence[Call]) -> None:
    """Raise ValueError unless each part is called once, and layers in order, after earlier
    parts."""
    called = [name for name, *_ in calls]
    layers = [part.name for part in parts if part.repeated]
    first = next(number for number, part in enumerate(parts) if part.repeated)
    before = {part.name for part in parts[:first]}
    for name in (part.name for part in parts):
        if called.count(name) != 1:
            raise ValueError(f"its forward calls '{name}' {called.count(name)} times, not once")
    if set(called[:first]) != before or called[first : first + len(layers)] != layers:
        raise ValueError("its forward calls modules in another order than they are registered in")
    for name, args, kwargs in calls:
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor | bool | int | float | str | torch.dtype | None):
                raise ValueError(f"'{name}' gets a {type(leaf).__name__}")
        if name in layers and any(isinstance(value, dict | list) for value in kwargs.values()):
            raise ValueError(f"'{name}' gets a list or dictionary, which layers could fill")


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    return type(value) is type(other) and bool(value == other)
