"""Group-relative policy optimization: TRL's GRPOTrainer, all weights, with two lines changed (←).

    python examples/grpo.py                               # a toy on the CPU, in seconds
    python examples/grpo.py models/qwen2.5-7b prompts.jsonl out

A line of the file has `prompt`. Each step writes completions with the newest weights, rewards them,
and compares the policy with a reference model, which follows it every few steps. The reward is to
be replaced by your own: here, the share of a completion's letters that are vowels.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import toy
from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer

import offloadtrain as ot
from offloadtrain.integrations.hf import OffloadMixin


class Tuner(OffloadMixin, GRPOTrainer):  # type: ignore[misc]  # ← 1
    """GRPOTrainer over an offloaded model: weights on the device for generation."""

    offload = {"state": "split16"}  # noqa: RUF012  # ← 2


def vowels(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Return the share of vowels among the characters of each completion."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]


def make_trainer(
    folder: str,
    rows: Any,
    output_dir: str,
    trainer: type[GRPOTrainer] = Tuner,
    dtype: str = "bfloat16",
    **arguments: Any,
) -> GRPOTrainer:
    """Return a trainer of the model in `folder`.

    Args:
        rows: dataset with a column `prompt`.
        trainer: `Tuner`, or TRL's own for comparison.
        arguments: of `GRPOConfig`, in place of the ones below.
    """
    defaults: dict[str, Any] = dict(
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        num_generations=8,  # completions that share a prompt, and are compared with each other
        max_completion_length=256,
        beta=0.04,  # weight of the distance to the reference
        sync_ref_model=True,  # the reference takes over a part of the policy
        ref_model_sync_steps=64,
        max_grad_norm=1.0,
        bf16=False,  # the model is in bf16 already
        gradient_checkpointing=False,  # offload has `activation="recompute"`
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        model_init_kwargs={"dtype": dtype},
    )
    args = GRPOConfig(output_dir, **(defaults | arguments))
    return trainer(model=folder, reward_funcs=vowels, args=args, train_dataset=rows)


TOY: dict[str, Any] = dict(
    learning_rate=3e-3,
    max_completion_length=16,
    ref_model_sync_steps=4,
    max_steps=24,
)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; print and return the mean reward of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a Hugging Face folder with a chat template")
    parser.add_argument("prompts", nargs="?")
    parser.add_argument("out", nargs="?")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or toy.make_llama(scratch + "/toy")
        rows: Any = (
            load_dataset("json", data_files=given.prompts, split="train")
            if given.prompts
            else Dataset.from_list([{"prompt": row["prompt"]} for row in toy.PREFERENCES])
        )
        trainer = make_trainer(folder, rows, scratch, **({} if given.model else TOY))
        trainer.train()
        if given.out:
            ot.save_pretrained(trainer.model, given.out)
        trainer.optimizer.close()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    main()
