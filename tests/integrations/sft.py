"""Fine-tuning by TRL. Imported by tests when they run: TRL, PEFT and datasets take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import offloadtrain as ot
from benchmarks.architectures.batches import END, PAD, SEQUENCE, START, VOCAB

STEPS = 4


class Watch(TrainerCallback):
    """What the optimizer says of each step, and that the model checkpoints by itself."""

    def __init__(self, optimizer: ot.OffloadOptimizer) -> None:
        self.optimizer = optimizer
        self.norms: list[float] = []
        self.skipped: list[bool] = []
        self.checkpointed: list[bool] = []

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        report = self.optimizer.last_step
        assert report is not None
        self.norms.append(report.grad_norm)
        self.skipped.append(report.skipped)
        self.checkpointed.append(model.is_activation_checkpointing)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word per token."""
    words = models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    ends = dict(pad_token=f"w{PAD}", bos_token=f"w{START}", eos_token=f"w{END}", unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **ends)


def texts() -> Dataset:
    """One text, over and over: its loss falls."""
    tokens = torch.randint(END + 1, VOCAB, (SEQUENCE,), generator=torch.Generator().manual_seed(1))
    return Dataset.from_list([{"input_ids": tokens.tolist()}] * 16)


def masters(optimizer: ot.OffloadOptimizer) -> dict[str, torch.Tensor]:
    state = dict(optimizer.named_state())
    return {name: held["master"].clone() for name, held in state.items() if "master" in held}


def fine_tune(
    model: nn.Module, folder: Path, options: dict[str, Any], **arguments: Any
) -> tuple[list[float], Watch]:
    """Losses as logged, and what was watched; every trainable weight has moved."""
    optimizer = ot.offload(model, ot.AdamW(lr=1e-3), device="cpu", **options)
    before, watch = masters(optimizer), Watch(optimizer)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=STEPS,
            logging_steps=1,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=texts(),
        processing_class=tokenizer(),
        optimizers=(optimizer, None),
        callbacks=[watch],
    )
    trainer.train()
    moved = {name for name, now in masters(optimizer).items() if not torch.equal(now, before[name])}
    assert moved == set(before)
    optimizer.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], watch
