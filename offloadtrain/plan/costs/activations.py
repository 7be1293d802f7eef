"""Device memory of torch besides the engine's: activations saved by autograd, logits and loss, and
gradients in flight.

They are counted operation by operation over `model.transformer`; those of a traced model are what
its trace has found. `tests/plan/test_activations.py` compares the sums with torch's allocations on
the CPU. Per token, D is d_model, F the MLP's width, V the vocabulary, e the bytes of a working
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offloadtrain.config.loss_parts import classes_of_part
from offloadtrain.config.model_shape import ModelShape, mlp_params
from offloadtrain.plan.costs.microbatch import Activations
from offloadtrain.plan.placement import Placement

_ROWS_BYTES_CPU, _ROWS_BYTES_GPU = 4 << 20, 64 << 20
"""Bytes of the fp32 rows of logits that the loss processes at a time."""

_CHOICE_BYTES = 3 * 8 + 2 * 4
"""Of one choice of a token: its expert, its row, the row's choice; a probability and a weight."""


def activations(placed: Placement, *, on_cpu: bool) -> Activations:
    """Return the larger of two moments: the backward of the loss, and of the last layer. A trace
    has looked at all moments of one microbatch."""
    if placed.traced is not None:
        traced = placed.traced.activations
        return replace(traced, saved=traced.saved * placed.in_flight)
    in_backward, stage = _in_backward(placed, on_cpu), placed.config.stage
    if stage is not None and not stage.is_last:
        return in_backward
    return max(_at_loss(placed, on_cpu), in_backward, key=lambda a: a.total)


def together(stages: Sequence[Activations]) -> Activations:
    """Return those of several stages on one device: all keep what they have saved, and one of them
    computes."""
    at_work = max(stages, key=lambda stage: stage.total - stage.saved)
    return replace(at_work, saved=sum(stage.saved for stage in stages))


def _at_loss(placed: Placement, on_cpu: bool) -> Activations:
    model, weight, tokens = placed.config.model, placed.weight_bytes, _tokens(placed)
    saved, head = _kept_of_layers(placed, on_cpu), 0
    if placed.config.train.chunked_loss:
        logits = _part_bytes(placed, on_cpu) + tokens * model.d_model * (4 + weight)
        head = model.vocab_size * model.d_model * weight
    else:
        logits = 2 * weight * tokens * model.vocab_size + _rows_bytes(placed, on_cpu)
    logits += tokens * _norm(model, weight, on_cpu)  # the final norm's input and output
    return Activations(saved, 0, logits, head, _documents(placed), "loss")


def _in_backward(placed: Placement, on_cpu: bool) -> Activations:
    """Compute the last layer's backward: all activations are saved, and its gradients appear."""
    model, weight = placed.config.model, placed.weight_bytes
    saved = _kept_of_layers(placed, on_cpu)
    if _recomputed(placed) < model.num_layers:  # the last layer keeps all of it
        saved -= _layer_bytes(placed, on_cpu)
    else:
        saved -= placed.input_bytes  # the layer saves it anyway
    work, gradients = max(_walk(placed, on_cpu), key=sum)
    table = model.vocab_size * model.d_model * weight if model.tie_embeddings else 0
    return Activations(saved, work, 0, gradients + table, _documents(placed), "backward")


def _walk(placed: Placement, on_cpu: bool) -> Iterator[tuple[int, int]]:
    """Yield (activations, gradients of weights) of one layer at each operation of its backward."""
    model, weight, tokens = placed.config.rank_shape, placed.weight_bytes, _tokens(placed)
    width = weight * model.d_model
    norm = _norm(model, weight, on_cpu)
    attention = _attention(model, placed.config.data.seq_len, weight, on_cpu)
    qkv = weight * (model.num_heads + 2 * model.kv_heads) * model.head_dim
    half = norm + attention  # the rest after the MLP
    wide = 4 * model.d_model if model.norm == "rmsnorm" and on_cpu else 0  # fp32 temporaries
    masks = _dropouts(model, weight, on_cpu)
    for per_token, gradients in _walk_of_mlp(model, weight):
        yield tokens * (half + norm + masks + per_token), gradients
    made = weight * mlp_params(model)
    out, into = width * model.num_heads * model.head_dim, model.d_model * qkv
    yield tokens * (half + norm + 3 * width + 2 * wide), made
    yield tokens * (half + 2 * width), made + out
    turned = 12 * model.d_model if model.positions == "rotary" else qkv
    yield tokens * (half + 2 * width + qkv + turned), made + out
    yield tokens * (norm + 2 * width + qkv), made + out + into
    yield tokens * (norm + 3 * width + 2 * wide), made + out + into


def _walk_of_mlp(model: ModelShape, weight: int) -> Iterator[tuple[int, int]]:
    """Yield the same of the MLP, its activations per token."""
    width, hidden, count = weight * model.d_model, weight * model.ff_width, 1
    gated, saved = model.mlp == "swiglu", _saved_of_mlp(model, weight)
    if model.num_experts:
        count = model.experts_per_token
        wide = 4 * count * model.d_model  # products with the router's weights are fp32
        yield saved + width + (0 if weight == 4 else 4 * model.d_model) + 2 * wide, 0
        saved -= count * width  # what the weights have multiplied
        width *= count
    down = weight * max(model.held_experts, 1) * model.d_model * model.ff_width
    up, hidden = (2 if gated else 1) * down, count * hidden
    residual = weight * model.d_model if model.num_experts else 0
    yield saved + residual + width + hidden, down
    yield saved - hidden + residual + width + 3 * hidden - (0 if gated else hidden), down
    if gated:
        yield saved - 2 * hidden + residual + width + 4 * hidden, down
    yield saved - (4 if gated else 2) * hidden + 2 * width + (2 if gated else 1) * hidden, down + up


def _kept_of_layers(placed: Placement, on_cpu: bool) -> int:
    again = _recomputed(placed)
    not_recomputed = (
        (placed.config.model.num_layers - again) * _layer_bytes(placed, on_cpu) * placed.in_flight
    )
    if placed.config.offload.activations.mode == "recompute" and placed.spec.input_parts == 1:
        return not_recomputed + again * placed.input_bytes * placed.in_flight
    # Those in flight to or from the host, or gathered.
    return not_recomputed + min(again, 3) * placed.input_bytes


def _recomputed(placed: Placement) -> int:
    """Number of layers whose forward runs again; a single one is no list."""
    layers = range(placed.config.model.num_layers)
    return len(placed.config.offload.activations.recomputed_of(layers)) if len(layers) > 1 else 0


def _layer_bytes(placed: Placement, on_cpu: bool) -> int:
    """Bytes saved by autograd per layer, including its input."""
    shape, weight = placed.config.rank_shape, placed.weight_bytes
    per_token = 2 * _norm(shape, weight, on_cpu)
    per_token += _attention(shape, placed.config.data.seq_len, weight, on_cpu)
    per_token += _saved_of_mlp(shape, weight) + _dropouts(shape, weight, on_cpu)
    return _tokens(placed) * per_token


def _saved_of_mlp(shape: ModelShape, weight: int) -> int:
    """The hidden activations; with experts of each that a token chose, beside what they read and
    returned, and what the router says."""
    hidden = weight * shape.ff_width * (4 if shape.mlp == "swiglu" else 2)
    if not shape.num_experts:
        return hidden
    router = 4 * shape.num_experts
    chosen = 2 * weight * shape.d_model + hidden + _CHOICE_BYTES
    return router + shape.experts_per_token * chosen


def _norm(shape: ModelShape, weight: int, on_cpu: bool) -> int:
    """Input, statistics and output. RMSNorm on a CPU is a chain of fp32 operations."""
    width = shape.d_model
    if shape.norm == "rmsnorm" and on_cpu:
        return (8 + weight) * width + 4
    statistics = 2 * (weight if on_cpu else 4) if shape.norm == "layernorm" else 4
    return 2 * weight * width + statistics


def _attention(shape: ModelShape, seq_len: int, weight: int, on_cpu: bool) -> int:
    """Queries, keys and values, the mixed values, and one number per head."""
    heads, kv, width = shape.num_heads, shape.kv_heads, shape.head_dim
    rotary = shape.positions == "rotary"
    qkv = weight * (heads + 2 * kv) * width
    mixed = weight * heads * width
    if on_cpu and shape.dropout:  # no fused kernel: scores, their softmax and its dropout, in fp32
        return mixed + 12 * heads * width + 12 * heads * seq_len
    turned = weight * (heads + kv) * width if rotary else 0
    copied = mixed if rotary else 0  # attention keeps the layout of rotated queries
    return qkv + turned + mixed + copied + 4 * heads


def _dropouts(shape: ModelShape, weight: int, on_cpu: bool) -> int:
    """The masks of the two residual branches."""
    return 2 * shape.d_model * (weight if on_cpu else 1) if shape.dropout else 0


def _documents(placed: Placement) -> int:
    """One bias of the scores for all layers and heads; a cosine and a sine in fp32 per position."""
    data, model = placed.config.data, placed.config.model
    if data.packing != "isolated":
        return 0
    tables = 4 * model.head_dim if model.positions == "rotary" else 0
    return _tokens(placed) * (placed.weight_bytes * data.seq_len + tables)


def _rows_bytes(placed: Placement, on_cpu: bool) -> int:
    most = _ROWS_BYTES_CPU if on_cpu else _ROWS_BYTES_GPU
    rows = min(most, 4 * _tokens(placed) * placed.config.model.vocab_size)
    return rows if placed.weight_bytes == 4 else 2 * rows  # wider, then their softmax


def _part_bytes(placed: Placement, on_cpu: bool) -> int:
    """A part's logits in fp32, and rounded beside it, for all tokens: see `model.chunked_loss`."""
    tokens, weight = _tokens(placed), placed.weight_bytes
    columns = classes_of_part(tokens, on_cpu=on_cpu)
    elements = tokens * min(columns, placed.config.model.vocab_size)
    return elements * (4 if weight == 4 else 4 + weight)


def _tokens(placed: Placement) -> int:
    return placed.config.train.micro_batch * placed.config.data.seq_len
