"""The loss of a step is that of one large batch, however many tokens each microbatch counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloadtrain.config.sections import IGNORED, Packing
from offloadtrain.data.batches import Batches
from offloadtrain.data.tokens import TokenFile, TokenWriter
from offloadtrain.model.transformer import Transformer
from tests.distributed.conftest import Run
from tests.distributed.rank_jobs import FP32, job_of, losses_are_close, train

ROWS = 8
STEPS = 4


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents of 2 to 60 tokens, each with a prompt that does not count; some count nothing."""
    draw = np.random.default_rng(5)
    for name in ("train", "val"):
        with TokenWriter(
            tmp_path / f"{name}.bin", vocab_size=256, tokenizer="bytes", masked=True
        ) as writer:
            for length in draw.integers(2, 61, 60):
                counted = np.arange(length) >= draw.integers(0, length + 1)
                writer.write(draw.integers(0, 256, length), [length], counted.astype(np.uint8))
            writer.commit()
    return tmp_path


def changes(data: Path, packing: Packing, micro_batch: int) -> dict[str, Any]:
    return FP32 | {
        "model.dropout": 0.0,
        "data.source": '""',
        "data.train": f'"{data}/train.bin"',
        "data.val": f'"{data}/val.bin"',
        "data.packing": f'"{packing}"',
        "train.micro_batch": micro_batch,
        "train.grad_accum_steps": ROWS // micro_batch,
        "train.eval_batches": 16 // micro_batch,
        "train.steps": STEPS,
        "train.eval_every": 2,
        "train.checkpoint_every": 0,
        "offload.clip_norm": 0.5,
    }


LATER = [pytest.param(one, marks=pytest.mark.slow) for one in ("stream", "padded")]


@pytest.mark.parametrize("packing", ["isolated", *LATER])
def test_microbatches_and_ranks_make_the_step_of_one_large_batch(
    ranks: Run, tmp_path: Path, data: Path, packing: Packing
) -> None:
    (large,) = ranks(1, train, tmp_path / "large", data, **changes(data, packing, ROWS))
    others = [
        *ranks(1, train, tmp_path / "rows", data, **changes(data, packing, 1)),
        *ranks(2, train, tmp_path / "ranks", data, **changes(data, packing, 2)),
    ]
    for other in others:
        assert losses_are_close(other.losses, large.losses, 2e-6)
        assert other.val_loss == pytest.approx(large.val_loss, rel=2e-6)
    assert large.losses[1] == pytest.approx(_plain(data, packing), rel=2e-6)


def _plain(data: Path, packing: Packing) -> float:
    """Return the loss of the first step by torch's own cross-entropy over one batch."""
    job = job_of(data, **changes(data, packing, ROWS))
    batches = Batches(
        TokenFile(data / "train.bin"),
        batch=ROWS,
        seq_len=job.data.seq_len,
        packing=packing,
        seed=job.train.seed,
    )
    batch = batches.next()
    assert len({int((row != IGNORED).sum()) for row in batch.targets_BT}) > 3
    model = Transformer(job.model, seed=job.train.seed)
    with torch.no_grad():
        logits_BTV = model(batch.tokens_BT, positions_BT=batch.positions_BT)
    loss = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).double(), batch.targets_BT.flatten(), ignore_index=IGNORED
    )
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "offloaded",
    [
        {"offload.working": '"host"'},
        {"offload.activation": '"recompute"'},
        {"offload.activation": '"offload"', "offload.working": '"host"'},
    ],
)
def test_documents_stay_apart_wherever_weights_and_activations_are(
    ranks: Run, tmp_path: Path, data: Path, offloaded: dict[str, Any]
) -> None:
    chosen = changes(data, "isolated", 2) | {"train.eval_every": 0}
    (plain,) = ranks(1, train, tmp_path / "plain", data, **chosen)
    (other,) = ranks(1, train, tmp_path / "other", data, **(chosen | offloaded))
    assert other.losses == plain.losses
