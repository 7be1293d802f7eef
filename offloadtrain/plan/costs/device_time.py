"""Seconds of compute on a device: the blocks of a transformer, and its head with the loss.

[Note: What a device's time is made of]
The time follows from a few rates of the machine, and from counts of the kernels' work:
* a matrix product: its FLOPs over `Machine.flops` at the geometric mean of the weight's sides. A
  library kernel also takes time to start, to read its inputs and to write its outputs, which costs
  narrow products most: `Machine.half_width`. The weight itself, or its gradient, is moved once per
  microbatch, which costs short microbatches most. A hand-fused program overlaps memory with
  compute, and a kernel's end with the next one's start: its products take the larger of both;
* attention: "flash" computes half of the scores if it is causal, 2.5 times as much in backward, and
  is faster for longer sequences; "scores" computes all of them as matrix products, writes them to
  memory and reads them again;
* everything else (norms, residual sums, activation functions, positions, dropout, loss): bytes read
  and written, over the device's memory bandwidth;
* launches: an eager operation takes at least as long as the host needs to launch it. A block takes
  the larger of its kernels' time and its launches' time.

`python -m benchmarks.validate_plan` fits the constants below to published throughputs and prints
the residuals: docs/validation.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from offloadtrain.config.model_shape import ModelShape, chosen_experts
from offloadtrain.config.offload import PRECISIONS, Precision
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.microbatch import AttentionKind, BlockCost, Work
from offloadtrain.step.layout.block_spec import BlockSpec, readings_of
from offloadtrain.step.layout.formats import ITEMSIZE

Level = Literal["eager", "compiled", "fused"]
Attention = Literal["flash", "scores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How a program computes a block.

    Attributes:
        level: "eager": one kernel per operation; "compiled": elementwise operations are fused
            (torch.compile, Megatron-LM), products as in eager programs; "fused": hand-written,
            including loss and products, and launched as a graph.
        attention: "flash" stores no scores; "scores" writes them to memory.
        flash: version of FlashAttention. Version 1, in CUDA or Triton until July 2023, took as long
            again as its FLOPs in products: 1.8 times version 2 on an A100, which is said to be
            1.3 to 3.0 times as fast (arXiv:2307.08691).
        causal: attention to earlier tokens only; "flash" then skips half.
        split: GPUs that split every matrix (tensor parallel).
        strided: slowdown of operations on tensors with gaps; 0: there are none. Nonzero for the
            shipped transformer, eager: it rotates positions in fp32, operation by operation, on
            halves of heads, and gate and value are halves of a product.
        norm_fp32: eager norms are computed in fp32, operation by operation, as RMSNorm was
            before PyTorch had a kernel for it.
        padded_head: the logits' rows are padded to the load width of tensor cores; without padding
            an odd vocabulary slows the head's products.
        fp8: layers' products whose sides are multiples of 16 are in FP8, except in routers and
            experts; casts are fused with the preceding operations.
        autocast: torch.autocast with fp32 weights: the residual stream, norms and softmax are in
            fp32, with casts before the products.
    """

    level: Level = "eager"
    attention: Attention = "flash"
    flash: Literal[1, 2] = 2
    causal: bool = True
    split: int = 1
    strided: float = 0.0
    norm_fp32: bool = False
    padded_head: bool = True
    fp8: bool = False
    autocast: bool = False

    def product_flops(self, machine: Machine, precision: str, width: float) -> float:
        """Return the FLOP/s of a product with a weight of this width."""
        if self.level == "fused":
            machine = replace(machine, half_width=0.0)
        return machine.flops(precision, width)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds per microbatch."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(self.forward * times, self.backward * times)


NOTHING = Seconds(0.0, 0.0)


def half_width(tflops: float, hbm_gbps: float) -> float:
    """Return `Machine.half_width` of a GPU, as fitted to complete programs (docs/validation.md): a
    benchmark of one product does not show the start and end of a kernel between others."""
    return 2.58 * 1e3 * tflops / hbm_gbps


FLASH_BACKWARD = 2.5
"""FLOPs of flash attention's backward over its forward (five products instead of two)."""


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Elements that a block's memory-bound operations read and write per token, as (forward,
    backward).

    Attributes:
        hidden: per d_model, for two norms and two residual sums.
        gelu, swiglu: per channel of the MLP's width.
        rotary: per channel of queries and keys.
        dropout: per d_model, for the two residual branches.
        scores: per score, for attention that writes scores: scale, mask, softmax, dropout and the
            reads and writes of both products.
        heads: per d_model, for attention that writes scores: queries, keys and values are copied by
            head for a batched product, and its result by token.
        experts: per d_model and chosen expert: rows sorted by expert and back, and their
            weighted sum, in fp32.
        launches, routing: number of operations; additional ones of a router and its experts.
    """

    hidden: tuple[float, float]
    gelu: tuple[float, float]
    swiglu: tuple[float, float]
    rotary: tuple[float, float]
    dropout: tuple[float, float]
    scores: tuple[float, float]
    heads: tuple[float, float]
    experts: tuple[float, float]
    launches: tuple[int, int]
    routing: tuple[int, int]


_EAGER = _Traffic(
    hidden=(10, 14),
    gelu=(2, 3),
    swiglu=(5, 8),
    rotary=(8, 8),
    dropout=(12, 6),
    scores=(12.5, 13.5),
    heads=(8, 8),
    experts=(11, 16),
    launches=(30, 60),
    routing=(25, 30),
)
_FUSED = _Traffic(
    hidden=(6, 10),
    gelu=(2, 3),
    swiglu=(3, 5),
    rotary=(2, 2),
    dropout=(0.5, 0.5),
    scores=(6.5, 8.5),
    heads=(0, 0),
    experts=(7, 9),
    launches=(10, 20),
    routing=(15, 15),
)
_TRAFFIC = {"eager": _EAGER, "compiled": _FUSED, "fused": _FUSED}

CAST_BYTES = 7.0 / 3
"""Bytes per element of both operands of an FP8 product, averaged over the three products with a
weight. The input and the output's gradient are read for the largest value (2 bytes), read,
written in 8 bits and copied transposed (2 + 1 + 2)."""

STRIDED = 2.5
"""Slowdown of eager operations on tensors with gaps, for which torch computes an address per
element. Fitted to steps of a Llama on an H100 and an H200 (docs/validation.md)."""

_ROTARY_FP32 = ((13, 11), (18, 8))
"""Elements of the shipped transformer, forward and backward, as (on dense tensors, on tensors with
gaps): casts, four products of halves, two sums and a copy, in fp32."""

_SWIGLU_HALVES = ((0, 5), (2, 6))
"""As above, per channel of the MLP's width, if gate and value are halves of a product."""

_NORM_FP32 = (32, 84)
"""Elements of two fp32 norms, beyond one kernel each: casts, square, mean, root, product and
weight, and the gradient of each."""

_AUTOCAST = {"eager": (14, 30), "compiled": (6, 9), "fused": (0, 0)}
"""Elements per d_model beyond 16-bit, of two branches. Bytes of an eager branch forward: norm 8,
cast 6, sum 10, instead of 10; backward: cast 6, cast 6, norm 12, its weight 8, sum 12, instead of
14. Compiled forward: stream and branch to stream and norm 12, instead of 6; backward 19, of 10."""

_AUTOCAST_SCORES = {"eager": (8, 9), "compiled": (0, 0), "fused": (0, 0)}
"""Elements per score: a cast to fp32, a softmax and a cast back move 20 bytes instead of 4, and
24 in backward instead of 6. A compiled softmax casts while it reads and writes."""

_LOSS_BYTES = {"eager": (14, 20), "compiled": (10, 8), "fused": (4, 6)}
"""Bytes per token and entry of the vocabulary. Eager: 16-bit logits become fp32, then
probabilities, then gradients, which are scaled. Fused: the gradient replaces the logits."""


_ODD_HEAD = 2.0
"""Slowdown of the head's products with an odd vocabulary. Source: GPT-2 with 50,257 and
with 50,304 tokens on an A100, 112,046 and 127,345 tokens/s (rasbt/LLMs-from-scratch)."""


def block_seconds(
    shape: ModelShape,
    seq_len: int,
    tokens: int,
    machine: Machine,
    precision: Precision,
    kernels: Kernels,
) -> Seconds:
    """Return the time of one block for `tokens` tokens in sequences of `seq_len`."""
    work = _Block(shape, seq_len, tokens, machine, precision, kernels)
    forward = tokens * (work.matrices + work.attention[0] + work.moved[0])
    backward = tokens * (2 * work.matrices + work.attention[1] + work.moved[1])
    if kernels.level == "fused":  # launched as a graph
        return Seconds(forward, backward)
    launched = [1e-6 * machine.launch_us * count for count in launches(shape, kernels)]
    return Seconds(max(forward, launched[0]), max(backward, launched[1]))


def launches(shape: ModelShape, kernels: Kernels) -> tuple[int, int]:
    """Return the number of operations of a block's (forward, backward)."""
    traffic = _TRAFFIC[kernels.level]
    more = traffic.routing if shape.num_experts else (0, 0)
    return traffic.launches[0] + more[0], traffic.launches[1] + more[1]


def again_seconds(
    shape: ModelShape,
    seq_len: int,
    tokens: int,
    machine: Machine,
    precision: Precision,
    kernels: Kernels,
    *,
    selects: bool = False,
) -> float:
    """Return the seconds of one block's recomputed forward: it runs up to the input of the last
    product, since backward needs nothing after it; with experts, up to their output. `selects`:
    results of products and attention were saved."""
    work = _Block(shape, seq_len, tokens, machine, precision, kernels)
    product = 0.0
    if not shape.num_experts:
        product = work.product(shape.ff_width / kernels.split, shape.d_model)
    added = 3 * shape.d_model * ITEMSIZE[PRECISIONS[precision]] / (1e9 * machine.hbm_gbps)
    again = 0.0 if selects else work.matrices + work.attention[0] - product
    return tokens * (again + work.moved[0] - added)


def head_seconds(
    shape: ModelShape, tokens: int, machine: Machine, precision: Precision, kernels: Kernels
) -> Seconds:
    """Return the time of the logits and the loss for `tokens` tokens."""
    vocabulary = shape.vocab_size / kernels.split
    product = _product_s(machine, precision, kernels, shape.d_model, vocabulary, tokens)
    if shape.vocab_size % 2 and not kernels.padded_head:
        product *= _ODD_HEAD
    down, up = (
        nbytes * vocabulary / (1e9 * machine.hbm_gbps) for nbytes in _LOSS_BYTES[kernels.level]
    )
    return Seconds(tokens * (product + down), tokens * (2 * product + up))


def traced_seconds(
    cost: BlockCost, tokens: int, machine: Machine, precision: Precision, kernels: Kernels
) -> Seconds:
    """Return the seconds of a traced block: products and attention at the rates of their sizes,
    bytes of weights and of all other operations, but at least the time of its launches."""
    per_weight = ITEMSIZE[PRECISIONS[precision]] / (2.0 * tokens)  # 2 FLOPs per weight and token

    def seconds(work: Work) -> float:
        dtype = "fp8" if kernels.fp8 else precision
        computed = sum(
            flops / kernels.product_flops(machine, dtype, width)
            for width, flops in work.products.items()
        )
        computed += sum(
            _flash_s(flops, kind, machine, precision, kernels)
            for kind, flops in work.attention.items()
        )
        nbytes = work.nbytes + per_weight * sum(work.products.values())
        if kernels.fp8:  # each product casts two operands of `flops / (2 * width**2)` tokens
            nbytes += CAST_BYTES * sum(flops / width for width, flops in work.products.items())
        moved = nbytes / (1e9 * machine.hbm_gbps)
        return max(computed + moved, 1e-6 * machine.launch_us * work.launches)

    return Seconds(seconds(cost.forward), seconds(cost.backward))


def _flash_s(
    flops: float, kind: AttentionKind, machine: Machine, precision: Precision, kernels: Kernels
) -> float:
    """Return the seconds of fused attention; `flops` counts all scores."""
    computed = flops / kernels.product_flops(machine, precision, kind.width)
    short = (kind.length + machine.flash_half_length) / kind.length
    first = 1.0 if kernels.flash == 1 else 0.0
    return computed * (short / machine.flash_share + first) * (0.5 if kind.causal else 1.0)


def _product_s(
    machine: Machine,
    precision: Precision,
    kernels: Kernels,
    rows: float,
    columns: float,
    tokens: float,
) -> float:
    """Return the seconds per token of a product of `tokens` rows with a rows x columns weight."""
    dtype = "fp8" if kernels.fp8 and rows % 16 == columns % 16 == 0 else precision
    rate = kernels.product_flops(machine, dtype, sqrt(rows * columns))
    computed = 2.0 * rows * columns / rate
    if dtype == "fp8":
        computed += CAST_BYTES * (rows + columns) / (1e9 * machine.hbm_gbps)
    per_element = ITEMSIZE[PRECISIONS[precision]] / (1e9 * machine.hbm_gbps)
    weight = per_element * rows * columns / tokens
    if kernels.level != "fused":  # the half-width includes the time of inputs and outputs
        return computed + weight
    return max(computed, per_element * (rows + columns) + weight)


@dataclass(frozen=True, slots=True)
class _Block:
    """Seconds per token of the parts of one block."""

    shape: ModelShape
    seq_len: int
    tokens: int
    machine: Machine
    precision: Precision
    kernels: Kernels

    @property
    def matrices(self) -> float:
        """Forward of the four or five products. Tensor parallel splits outputs of the first and
        inputs of the second. Experts take as long as a product of all their rows with one weight,
        but move the weights of all experts."""
        shape, split, chosen = self.shape, self.kernels.split, chosen_experts(self.shape)
        of_mlp = self.split_of_mlp
        d, width, kv = shape.d_model, shape.ff_width, shape.kv_heads * shape.head_dim
        up = 2 * width if shape.mlp == "swiglu" else width
        rows = self.tokens * chosen / shape.num_experts if shape.num_experts else 0.0
        mlp = self.product(d, up / of_mlp, rows) + self.product(width / of_mlp, d, rows)
        router = self.product(d, shape.num_experts, self.tokens) if shape.num_experts else 0.0
        attention = self.product(d, (d + 2 * kv) / split) + self.product(d / split, d)
        return attention + chosen * mlp + router

    @property
    def split_of_mlp(self) -> int:
        """GPUs that split the MLP's matrices; 1 with experts, which each GPU computes
        completely."""
        return 1 if self.shape.num_experts else self.kernels.split

    def product(self, rows: float, columns: float, tokens: float = 0.0) -> float:
        """`tokens`: rows of a router or an expert, which is never in FP8; 0: the block's tokens."""
        kernels = replace(self.kernels, fp8=False) if tokens else self.kernels
        how = self.machine, self.precision, kernels
        return _product_s(*how, rows, columns, tokens or self.tokens)

    @property
    def attention(self) -> tuple[float, float]:
        """Seconds of attention, (forward, backward)."""
        d, length = self.shape.d_model, self.seq_len
        flops = 4.0 * d * length / self.kernels.split
        if self.kernels.attention == "scores":
            side = sqrt(length * self.shape.head_dim)
            seconds = flops / self.kernels.product_flops(self.machine, self.precision, side)
            return seconds, 2 * seconds
        kind = AttentionKind(d, length, self.kernels.causal)
        seconds = _flash_s(flops, kind, self.machine, self.precision, self.kernels)
        return seconds, FLASH_BACKWARD * seconds

    @property
    def moved(self) -> tuple[float, float]:
        """Seconds of the memory-bound operations, (forward, backward)."""
        each = self._elements(0), self._elements(1)
        element = ITEMSIZE[PRECISIONS[self.precision]]
        forward, backward = (n * element / (1e9 * self.machine.hbm_gbps) for n in each)
        return forward, backward

    @property
    def _outputs(self) -> float:
        """Output channels of products with biases; the biases' gradients are sums over all
        tokens."""
        shape, split = self.shape, self.kernels.split
        attention = (shape.d_model + 2 * shape.kv_heads * shape.head_dim) / split + shape.d_model
        if shape.num_experts:
            return attention
        mlps = 2 if shape.mlp == "swiglu" else 1
        return attention + mlps * shape.ff_width / split + shape.d_model

    def _elements(self, way: int) -> float:
        shape, traffic = self.shape, _TRAFFIC[self.kernels.level]
        d, split = shape.d_model, self.kernels.split
        mlp, turned = traffic.gelu[way], traffic.rotary[way]
        if shape.mlp == "swiglu":
            mlp = traffic.swiglu[way]
        if (strided := self.kernels.strided) and shape.mlp == "swiglu":
            mlp = _SWIGLU_HALVES[way][0] + strided * _SWIGLU_HALVES[way][1]
        if strided:
            turned = _ROTARY_FP32[way][0] + strided * _ROTARY_FP32[way][1]
        chosen = chosen_experts(shape)
        count = traffic.hidden[way] * d + mlp * chosen * shape.ff_width / self.split_of_mlp
        if shape.bias and way == 1:
            count += self._outputs
        if self.kernels.norm_fp32:
            count += _NORM_FP32[way] * d
        if self.kernels.autocast:
            count += _AUTOCAST[self.kernels.level][way] * d
        if shape.num_experts:
            count += traffic.experts[way] * chosen * d
        if shape.positions == "rotary":
            count += turned * (d + shape.kv_heads * shape.head_dim) / split
        if shape.dropout:
            count += traffic.dropout[way] * d
        if self.kernels.attention == "scores":
            each = traffic.scores[way]
            if self.kernels.autocast:
                each += _AUTOCAST_SCORES[self.kernels.level][way]
            count += each * shape.num_heads * self.seq_len / split + traffic.heads[way] * d / split
        return count


def by_reading(blocks: Sequence[BlockSpec], times_of: Mapping[str, Seconds]) -> dict[str, Seconds]:
    """Return the seconds of each reading by its owner. Compute of the last block, including the
    head, runs after the last reading, since a tied head waits for its weights."""
    last, readings = blocks[-1].name, readings_of(blocks)
    times = {reading.owner: times_of.get(reading.owner, NOTHING) for reading in readings}
    if (at := readings[-1]).again:
        times[at.owner], times[last] = times[last], NOTHING
    return times
