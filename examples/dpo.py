"""Direct preference optimization: TRL's DPOTrainer, all weights, with two lines changed (←).

    python examples/dpo.py                                     # a toy on the CPU, in seconds
    python examples/dpo.py models/llama-3.1-8b preferences.jsonl out

A line of the file has `prompt`, `chosen` and `rejected`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import toy
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import offloadtrain as ot
from offloadtrain.integrations.hf import OffloadMixin


class Tuner(OffloadMixin, DPOTrainer):  # type: ignore[misc]  # ← 1
    """DPOTrainer over an offloaded model."""

    offload = {"working": "host", "state": "split16"}  # noqa: RUF012  # ← 2


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the losses and return them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a Hugging Face folder with a chat template")
    parser.add_argument("preferences", nargs="?")
    parser.add_argument("out", nargs="?")
    given = parser.parse_args(arguments)
    scratch = tempfile.TemporaryDirectory()
    folder = given.model or toy.make_llama(scratch.name + "/toy")

    rows: Any = (
        load_dataset("json", data_files=given.preferences, split="train")
        if given.preferences
        else Dataset.from_list(toy.PREFERENCES)
    )
    trainer = Tuner(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        args=DPOConfig(
            scratch.name,
            learning_rate=1e-6 if given.model else 1e-4,
            precompute_ref_log_probs=True,  # the reference is not in memory while training
            max_grad_norm=1.0,
            bf16=False,  # the model is in bf16 already
            num_train_epochs=1 if given.model else 2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    if given.out:
        ot.save_pretrained(trainer.model, given.out)
    trainer.optimizer.close()
    scratch.cleanup()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
