"""The loss of a step is that of one large batch, however many tokens each microbatch counts: of
documents with prompts that do not count, and of encoders that hide some tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloadtrain.config.sections import IGNORED
from offloadtrain.data.batches import Batches
from offloadtrain.data.tokens import TokenFile, TokenWriter
from offloadtrain.model.transformer import Transformer
from tests.distributed.conftest import Run
from tests.distributed.rank_jobs import FP32, Options, job_of, losses_are_close, train
from tests.train.small_job import write_text

ROWS = 8
COMMON: Options = FP32 | {
    "model.dropout": 0.0,
    "train.steps": 4,
    "train.eval_every": 2,
    "train.checkpoint_every": 0,
    "offload.clip_norm": 0.5,
}
ENCODER: Options = {
    "model.objective": '"mlm"',
    "model.vocab_size": 257,
    "data.packing": '"isolated"',
}


def documents(folder: Path, packing: str) -> Options:
    """Write documents of 2 to 60 tokens, each with a prompt that does not count; some count
    nothing."""
    draw = np.random.default_rng(5)
    for name in ("train", "val"):
        path = folder / f"{name}.bin"
        with TokenWriter(path, vocab_size=256, tokenizer="bytes", masked=True) as writer:
            for length in draw.integers(2, 61, 60):
                counted = np.arange(length) >= draw.integers(0, length + 1)
                writer.write(draw.integers(0, 256, length), [length], counted.astype(np.uint8))
            writer.commit()
    return {
        "data.source": '""',
        "data.train": f'"{folder}/train.bin"',
        "data.val": f'"{folder}/val.bin"',
        "data.packing": f'"{packing}"',
    }


def rows(micro_batch: int) -> Options:
    """The same rows in microbatches of this size."""
    return {
        "train.micro_batch": micro_batch,
        "train.grad_accum_steps": ROWS // micro_batch,
        "train.eval_batches": 16 // micro_batch,
    }


@pytest.mark.parametrize(
    ("packing", "options", "rel"),
    [
        ("isolated", {}, 2e-6),
        pytest.param("stream", {}, 2e-6, marks=pytest.mark.slow),
        pytest.param("padded", {}, 2e-6, marks=pytest.mark.slow),
        # All ranks hide the same tokens.
        pytest.param("", ENCODER, 1e-5, marks=pytest.mark.slow),
        pytest.param("", ENCODER | {"optim.name": '"lamb"'}, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_microbatches_and_ranks_make_the_step_of_one_large_batch(
    ranks: Run, tmp_path: Path, packing: str, options: Options, rel: float
) -> None:
    write_text(tmp_path)
    chosen = COMMON | options | (documents(tmp_path, packing) if packing else {})
    (large,) = ranks(1, train, tmp_path / "large", tmp_path, **chosen | rows(ROWS))
    small = [
        *ranks(1, train, tmp_path / "rows", tmp_path, **chosen | rows(1)),
        *ranks(2, train, tmp_path / "ranks", tmp_path, **chosen | rows(2)),
    ]
    for run in small:
        assert losses_are_close(run.losses, large.losses, rel)
        assert run.val_loss == pytest.approx(large.val_loss, rel=rel)
    if packing:
        expected = first_loss_by_torch(tmp_path, chosen | rows(ROWS))
        assert large.losses[1] == pytest.approx(expected, rel=rel)


def first_loss_by_torch(folder: Path, options: dict[str, Any]) -> float:
    """The loss of the first step by torch's own cross-entropy over one batch."""
    job = job_of(folder, **options)
    source = TokenFile(folder / "train.bin")
    sizes = {"batch": ROWS, "seq_len": job.data.seq_len, "seed": job.train.seed}
    batch = Batches(source, packing=job.data.packing, **sizes).next()
    assert len({int((row != IGNORED).sum()) for row in batch.targets_BT}) > 3
    model = Transformer(job.model, seed=job.train.seed)
    with torch.no_grad():
        logits_BTV = model(batch.tokens_BT, positions_BT=batch.positions_BT)
    loss = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).double(), batch.targets_BT.flatten(), ignore_index=IGNORED
    )
    return loss.item()


@pytest.mark.slow
def test_stages_of_an_encoder_have_the_losses_of_one_process(ranks: Run, tmp_path: Path) -> None:
    write_text(tmp_path)
    four = COMMON | ENCODER | rows(2) | {"model.num_layers": 4}
    (alone,) = ranks(1, train, tmp_path / "alone", tmp_path, **four)
    staged = ranks(2, train, tmp_path / "staged", tmp_path, **four, **{"ranks.pipeline": 2})
    assert staged[0].losses == alone.losses
