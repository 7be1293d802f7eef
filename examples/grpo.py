"""Reinforcement learning: TRL's GRPOTrainer on one GPU, all weights, with two lines changed (←).

    python examples/grpo.py                                     # a toy on the CPU, in seconds
    python examples/grpo.py models/qwen-7b prompts.jsonl out

A line of the file has `prompt`, a string or a list of messages. The policy generates between two
updates with its newest weights. The reference model is a second copy, which `sync_ref_model` moves
towards the policy. Replace `reward` by your own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import toy
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

import offloadtrain as ot
from offloadtrain.integrations.hf import OffloadMixin


class Tuner(OffloadMixin, GRPOTrainer):  # type: ignore[misc]  # ← 1
    """GRPOTrainer over an offloaded policy."""

    offload = {"working": "device", "state": "split16"}  # noqa: RUF012  # ← 2


def reward(completions: Sequence[Any], **_: object) -> list[float]:
    """Return the share of vowels in each answer."""
    texts = [answer if isinstance(answer, str) else answer[0]["content"] for answer in completions]
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]


def train(
    kind: type[GRPOTrainer], folder: str, rows: Any, out: str, *, dtype: torch.dtype, steps: int
) -> Any:
    """Train the model in a folder, and return the trainer. `kind`: its class; TRL's own trains the
    same without offload."""
    set_seed(0)
    is_toy = steps > 0
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        reward_funcs=reward,
        args=GRPOConfig(
            out,
            learning_rate=1e-3 if is_toy else 1e-6,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=12 if is_toy else 512,
            beta=0.04,  # above 0: a reference model is in memory
            sync_ref_model=True,
            ref_model_sync_steps=2 if is_toy else 512,
            model_init_kwargs={"dtype": dtype},  # of the reference
            max_grad_norm=1.0,
            bf16=False,  # the model has its dtype already
            max_steps=steps or -1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the rewards and return them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a Hugging Face folder")
    parser.add_argument("prompts", nargs="?")
    parser.add_argument("out", nargs="?")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or toy.make_llama(scratch + "/toy")
        prompts = [{"prompt": row["prompt"]} for row in toy.PREFERENCES]
        rows: Any = (
            load_dataset("json", data_files=given.prompts, split="train")
            if given.prompts
            else Dataset.from_list(prompts)
        )
        steps = 0 if given.model else 16
        trainer = train(Tuner, folder, rows, scratch, dtype=torch.bfloat16, steps=steps)
        if given.out:
            ot.save_pretrained(trainer.model, given.out)
        trainer.optimizer.close()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    main()
