"""A job of an encoder: it learns, has the bits of a resident loop, and is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.data.batches import Batch
from offloadtrain.events import schema
from offloadtrain.model.transformer import Transformer
from offloadtrain.train.build import assemble
from offloadtrain.train.losses import loss_divisor, loss_of
from tests.conftest import Command
from tests.numerics.reference import ResidentRun
from tests.runtime.kernels.test_adam import needs_fma_in_torch
from tests.train.small_job import ENCODER, events_of, run, small_job


def encoder_job(folder: Path, *overrides: str) -> Config:
    return small_job(folder, *ENCODER, *overrides)


@pytest.mark.slow
def test_it_learns_and_is_evaluated(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "run"
    job = encoder_job(tmp_path, "optim.name=lamb", "optim.max_norm=10", "optim.lr=0.1")
    assert run(job, path) == 0
    losses = [event.val_loss for event in events_of(path, schema.Eval)]
    assert losses[-1] < losses[0] - 0.5

    (val,) = (tmp_path / "data").rglob("val.bin")
    assert "loss" in command("eval", path, "--data", val, "--device", "cpu").out
    assert "continues no text" in command("generate", path, "--prompt", "1 + ", code=2).err
    assert (
        "no class of transformers is an encoder"
        in command("export", path, f"{tmp_path}/out", code=2).err
    )


STREAMED = ("offload.working=host", "offload.activation=recompute")


@needs_fma_in_torch
@pytest.mark.parametrize(
    "placed", [STREAMED, pytest.param((), marks=pytest.mark.slow)], ids=["streamed", "resident"]
)
def test_offloaded_has_the_bits_of_resident(tmp_path: Path, placed: tuple[str, ...]) -> None:
    """Three steps of two microbatches, against a loop over torch's AdamW."""
    plain = ("model.dropout=0.0", "optim.decay=all", "offload.clip_norm=0.5")
    context = assemble(encoder_job(tmp_path, *plain, *placed))
    optimizer, model = (
        context.optimizer,
        Transformer(context.local.model, seed=context.local.train.seed),
    )
    for group in optimizer.param_groups:
        group.update(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    resident = ResidentRun(model, torch.bfloat16, clip_norm=0.5)
    for _ in range(3):
        divisor = loss_divisor(context.batches, 2, 1)
        assert divisor is not None and 1 < divisor < 2 * 4 * 32 * 0.3
        batches = [context.batches.next() for _ in range(2)]
        # ResidentRun divides by their number.
        expected = resident.step([(batch, divisor / 2) for batch in batches], by_hand)
        for batch, loss_of_both in zip(batches, expected, strict=True):
            loss = loss_of(context.model, batch, divisor)
            assert loss.item() * 2 == loss_of_both
            optimizer.backward(loss, divide=False)
        optimizer.step()
        assert optimizer.grad_norm == resident.norms[-1]
    optimizer.synchronize()
    for name, state in optimizer.named_state():
        assert torch.equal(state["master"], resident.master(name)), name
    optimizer.close()


def by_hand(model: nn.Module, item: tuple[Batch, float]) -> Tensor:
    batch, divisor = item
    loss: Tensor = model(
        batch.tokens_BT, batch.targets_BT, positions_BT=batch.positions_BT, divisor=divisor
    )
    return loss


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    for override, message in (
        ("data.packing=padded", 'data.packing = "padded" does not go with model.objective = "mlm"'),
        ("train.sample_tokens=5", "train.sample_tokens = 5 must be 0 with model.objective"),
        ("model.objective=bert", "model.objective = 'bert' must be one of causal, mlm"),
    ):
        with pytest.raises(ConfigError, match=message):
            encoder_job(tmp_path, override)
    with pytest.raises(ConfigError, match=r"model.vocab_size = 256 must be at least 257: with"):
        assemble(encoder_job(tmp_path, "model.vocab_size=256"))
