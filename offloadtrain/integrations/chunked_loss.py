"""Computes the loss of causal language models of transformers without full logits.

The forward of most of them ends with two lines: `logits = self.lm_head(hidden_states)`, and
`self.loss_function(logits=logits, labels=labels, …)`. In a forward with labels the head therefore
computes the loss itself, in parts ([Note: Parts of the vocabulary] in `model/loss.py`), and
the loss function returns it. The source of the model's forward shows whether it ends this way; a
model that does more with its logits is refused by name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.sections import IGNORED
from offloadtrain.engine import ModelError
from offloadtrain.integrations.adapters import base_model
from offloadtrain.model.loss import linear_cross_entropy

_KNOWN = {"num_items_in_batch", "ignore_index", "shift_labels", "vocab_size"}
"""Keywords of transformers' causal language model loss that change its value."""


def chunk_loss(model: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
    """Make a causal language model compute its loss one part of the vocabulary at a time.

    If gradients are enabled and `labels` are given, the output has no `logits` from now on: they
    never exist. Everything else stays: evaluation under `no_grad`, generation, calls without
    labels. Call it before or after `offload`, and before or after PEFT wraps the model.

    Args:
        model: a transformers model, possibly wrapped by PEFT.
        label_smoothing, z_loss: see `linear_cross_entropy`.

    Raises:
        ModelError: the head is not a single plain linear layer, or logits are scaled, capped or
            used for something else.
    """
    base = base_model(model)
    if is_chunked(model):
        raise ModelError(f"the loss of {type(base).__name__} is computed in parts already")
    head = _usual_head(base)
    pending = _Pending(head, head.forward, base.loss_function, label_smoothing, z_loss)
    setattr(head, "forward", pending.on_head)  # noqa: B010  (mypy refuses to assign to a method)
    base.loss_function = pending.on_loss
    base.forward = _with_labels(base.forward, pending)


def is_chunked(model: Any) -> bool:
    """Return True if `chunk_loss` has changed the model."""
    return isinstance(getattr(base_model(model).loss_function, "__self__", None), _Pending)


def _with_labels(forward: Callable[..., Any], pending: _Pending) -> Callable[..., Any]:
    """Return a forward that takes the loss from the head if there are labels and gradients."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def with_labels(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        named = arguments | arguments.get("kwargs", {})
        if named.get("labels") is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        pending.begin(named["labels"], named.get("shift_labels"), named.get("ignore_index"))
        try:
            outputs = forward(*args, **kwargs)
        finally:
            pending.targets = None
        if isinstance(outputs, Tensor):  # a pipeline stage returns only the loss
            return outputs
        if isinstance(outputs, tuple):
            return (outputs[0], *outputs[2:])
        return type(outputs)(**{key: value for key, value in outputs.items() if key != "logits"})

    return with_labels


@dataclass(slots=True, eq=False)
class _Pending:
    """The loss of the current forward, passed from the head to the loss function.

    Attributes:
        targets: (B, T) int64, the token to predict at each position; None outside such a forward.
        total: loss sum over counted tokens, once the head has run.
    """

    head: nn.Linear
    head_forward: Callable[..., Any]
    loss_function: Callable[..., Any]
    label_smoothing: float
    z_loss: float
    targets: Tensor | None = None
    total: Tensor | None = None

    def begin(self, labels: Tensor, shifted: Tensor | None, ignored: int | None) -> None:
        """Set the targets as transformers' own loss does."""
        if shifted is None:
            shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        if ignored is not None and ignored != IGNORED:
            shifted = shifted.masked_fill(shifted == ignored, IGNORED)
        self.targets, self.total = shifted, None

    def on_head(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward, since its weight is available only during that forward."""
        if self.targets is None:
            logits: Tensor = self.head_forward(hidden)
            return logits
        if hidden.shape[:-1] != self.targets.shape:
            raise ValueError(
                f"hidden states {tuple(hidden.shape[:-1])} and labels "
                f"{tuple(self.targets.shape)} differ: leave logits_to_keep out where labels are in"
            )
        self.total = linear_cross_entropy(
            hidden.flatten(0, -2),
            self.head.weight,
            self.targets.flatten().to(hidden.device),
            self.head.bias,
            divisor=1.0,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )
        return hidden  # only the loss function receives it

    def on_loss(self, logits: Any = None, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replace the loss function: divide the head's sum."""
        if self.targets is None:
            return self.loss_function(logits, labels, *args, **kwargs)
        assert self.total is not None, "the head runs before the loss, as its source says"
        count = kwargs.get("num_items_in_batch")
        if count is None:
            count = (self.targets != IGNORED).sum().clamp(min=1)
        return self.total / (count.to(self.total.device) if torch.is_tensor(count) else count)


def _usual_head(model: Any) -> nn.Linear:
    """Return the head, whose logits are used only for the loss.

    Raises:
        ModelError: there is no such head.
    """
    head_name = head_attribute(type(model))
    head = getattr(model, head_name, None)
    if type(head) is not nn.Linear:
        why = f"its head '{head_name}' is a {type(head).__name__}, not a plain nn.Linear"
        raise _unusual(type(model), why)
    module = inspect.getmodule(model.loss_function)
    if module is None or getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        raise _unusual(type(model), "it has one of its own")
    return head


def _unusual(kind: type, why: str) -> ModelError:
    return ModelError(f"the loss of {kind.__name__} cannot be computed in parts: {why}")


def head_attribute(kind: type) -> str:
    """Return the attribute that computes the loss's logits, found in the source of the forward.

    Raises:
        ModelError: the forward uses its logits for more than the loss.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))  # type: ignore[attr-defined]
    losses: list[Any] = [node for node in ast.walk(tree) if _is_call_of_self(node, "loss_function")]
    if len(losses) != 1:
        why = f"its forward calls self.loss_function {len(losses)} times, not once"
        raise _unusual(kind, why)
    named = [keyword.value for keyword in losses[0].keywords if keyword.arg == "logits"]
    argument = next(iter((*named, *losses[0].args)), None)
    if not isinstance(argument, ast.Name):
        raise _unusual(kind, "its loss function does not get the logits as they are")
    made = [value for name, value in _assigned(tree) if name == argument.id]
    if len(made) != 1 or not _is_call_of_self(made[0]) or len(made[0].args) != 1:
        why = f"its forward scales, caps or changes '{argument.id}' behind the head"
        raise _unusual(kind, why)
    uses = sum(
        isinstance(node, ast.Name) and node.id == argument.id and isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )
    if uses - 1 - _returned(tree, argument.id) > 0:
        raise _unusual(kind, f"its forward uses '{argument.id}' for more than the loss")
    return str(made[0].func.attr)


def _is_call_of_self(node: Any, attribute: str | None = None) -> bool:
    """Return True if the node is `self.<attribute>(…)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and attribute in (None, node.func.attr)
    )


def _assigned(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id, node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def _returned(tree: ast.AST, name: str) -> int:
    """Count the places that return the name unchanged: `Output(logits=name)`, or the
    tuple `(name,) + outputs`."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            count += sum(_is_name(keyword.value, name) for keyword in node.value.keywords)
        elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
            count += sum(_is_name(element, name) for element in node.elts)
    return count


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
