"""Device memory of torch besides the engine's: activations saved by autograd, logits and loss, and
gradients in flight, as a trace of one microbatch counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offloadtrain.plan.costs.microbatch import Activations
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.tracing.shape import ShapeTrace


def activations(placed: Placement, *, on_cpu: bool) -> Activations:
    """Return the bytes at the peak of a micro-step: of the model that was traced for the placement,
    else of our transformer of its shape."""
    traced = placed.traced
    if traced is None:
        divided = placed.spec.input_parts > 1
        traced = ShapeTrace(on_cpu, divided_inputs=divided)(placed.config)
    saved = traced.activations.saved * placed.in_flight
    return replace(traced.activations, saved=saved)


def together(stages: Sequence[Activations]) -> Activations:
    """Return those of several stages on one device: all keep what they have saved, and one of them
    computes."""
    at_work = max(stages, key=lambda stage: stage.total - stage.saved)
    return replace(at_work, saved=sum(stage.saved for stage in stages))
