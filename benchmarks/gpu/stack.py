"""Ways to compute the same, over some layers of a model and its head, forward and backward:
`python -m benchmarks.gpu.stack losses|packed [--toy]` prints JSON.

"losses": whole logits, the loss in parts of the vocabulary (`train.chunked_loss`) and Liger's.
"packed": documents apart by a mask, by variable-length attention, and rows of one document each,
which compute more pairs than either needs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.systems import here, precision_of
from offloadtrain.config.model_shape import SIZES, ModelShape
from offloadtrain.model.loss import cross_entropy, linear_cross_entropy
from offloadtrain.model.transformer import Transformer
from offloadtrain.runtime.dtypes import PRECISIONS

LAYERS, ROWS, SEQ_LEN = 4, 4, 2048
"""Of the llama-3b shape: its vocabulary makes 0.5 GiB of logits of 8192 tokens."""
DOCUMENT = 256
"""Tokens of the mean document; lengths are drawn from 1 to twice as many."""
WARM, ROUNDS = 3, 9

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _whole(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    return cross_entropy(torch.nn.functional.linear(hidden_ND, weight_VD), targets_N, None)


def _liger(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Any = liger_fused_linear_cross_entropy(hidden_ND, weight_VD, targets_N)
    return loss if isinstance(loss, Tensor) else loss[0]


def losses(*, toy: bool) -> dict[str, Any]:
    """Milliseconds and peak bytes with each loss."""
    model, tokens_BT = _stack(toy=toy)
    ways: dict[str, Loss] = {"whole logits": _whole, "in parts": linear_cross_entropy}
    missing = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]
    if not missing and tokens_BT.is_cuda:
        ways["liger"] = _liger
    weight_VD = model.head.weight
    setattr(model, "head", None)  # noqa: B010  # as in a stage: it returns its hidden states

    def step(loss: Loss) -> float:
        hidden_ND = model.norm(model(tokens_BT)).flatten(0, 1)
        total = loss(hidden_ND, weight_VD, tokens_BT.roll(-1, 1).flatten())
        total.backward()
        return total.item()

    measured = _measured({name: partial(step, loss) for name, loss in ways.items()}, model)
    return measured if "liger" in ways else measured | {"without": f"liger: {missing or 'no GPU'}"}


def packed(*, toy: bool) -> dict[str, Any]:
    """Milliseconds and peak bytes with each way to keep documents apart."""
    model, tokens_BT = _stack(toy=toy)
    positions_BT = _positions(tokens_BT)

    def step(positions: Tensor | None, varlen: bool) -> float:
        model.varlen_attention = varlen
        loss: Tensor = model(tokens_BT, tokens_BT.roll(-1, 1), positions_BT=positions)
        loss.backward()
        return loss.item()

    ways = {
        "mask": partial(step, positions_BT, varlen=False),
        "varlen": partial(step, positions_BT, varlen=True),
        "one document per row": partial(step, None, varlen=False),
    }
    documents = int((positions_BT == 0).sum())
    measured = _measured(ways, model) | {"documents": documents, "rows": len(tokens_BT)}
    if tokens_BT.is_cuda and torch.__version__ < "2.12":
        measured["without"] = "torch's variable-length kernel: varlen is one call per document"
    return measured


def _stack(*, toy: bool) -> tuple[Transformer, Tensor]:
    shape: ModelShape = replace(SIZES["debug" if toy else "llama-3b"], dropout=0.0)
    rows, seq_len = (2, min(32, shape.max_seq_len)) if toy else (ROWS, SEQ_LEN)
    shape = replace(shape, num_layers=min(LAYERS, shape.num_layers))
    shape = replace(shape, max_seq_len=max(seq_len, shape.max_seq_len))
    device, torch_state = here(), torch.Generator().manual_seed(0)
    model = Transformer(shape).to(device, PRECISIONS[precision_of(device)])
    tokens_BT = torch.randint(shape.vocab_size, (rows, seq_len), generator=torch_state)
    return model, tokens_BT.to(device)


def _positions(tokens_BT: Tensor) -> Tensor:
    rows, seq_len = tokens_BT.shape
    generator, mean = torch.Generator().manual_seed(0), min(DOCUMENT, seq_len // 4)
    lengths = torch.randint(1, 2 * mean, (rows, seq_len), generator=generator)
    row = [torch.cat([torch.arange(int(n)) for n in some])[:seq_len] for some in lengths]
    return torch.stack(row).to(tokens_BT.device)


def _measured(ways: Mapping[str, Callable[[], float]], model: Transformer) -> dict[str, Any]:
    """Take steps of each way in turn; on a CPU one, which only shows that they run."""
    on_gpu = next(model.parameters()).is_cuda
    warm, rounds = (WARM, ROUNDS) if on_gpu else (0, 1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks, values = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for number in range(warm + rounds):
        for name, step in ways.items():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            values[name] = step()
            if on_gpu:
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated()
            if number >= warm:
                seconds[name].append(time.perf_counter() - began)
            model.zero_grad()
    step_ms = {name: 1e3 * statistics.median(samples) for name, samples in seconds.items()}
    summary = ", ".join(
        f"{name} {step_ms[name]:.1f} ms" + f" {peaks[name] / 2**30:.2f} GiB" * on_gpu
        for name in ways
    )
    return {"summary": summary, "step_ms": step_ms, "peak_bytes": peaks, "losses": values}


if __name__ == "__main__":
    measure = {"losses": losses, "packed": packed}[sys.argv[1]]
    print(json.dumps(measure(toy="--toy" in sys.argv)))
