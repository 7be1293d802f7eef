"""Instruction tuning from chats, one JSON object with `messages` per line; LoRA, or `--full`.

    python examples/chat_lora.py                                    # a toy on the CPU, in seconds
    python examples/chat_lora.py models/llama-3.1-8b chats.jsonl out

Adapters are written, or with `--full` all weights.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import toy
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments

import offloadtrain as ot
from offloadtrain.data.chat import ChatTemplate
from offloadtrain.integrations.hf import OffloadTrainer


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the losses and return them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a Hugging Face folder with a chat template")
    parser.add_argument("chats", nargs="?")
    parser.add_argument("out", nargs="?", help="where the adapters, or all weights, are written")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--lr", type=float)
    given = parser.parse_args(arguments)
    scratch = tempfile.TemporaryDirectory()
    folder = given.model or toy.make_llama(scratch.name + "/toy")

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    template = ChatTemplate(tokenizer, tokenizer.chat_template)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        tokens, counted = template.encode(row["messages"])
        return {"input_ids": tokens[:2048], "labels": np.where(counted, tokens, -100)[:2048]}

    rows: Any = (
        load_dataset("json", data_files=given.chats, split="train")
        if given.chats
        else Dataset.from_list([{"messages": chat} for chat in toy.CHATS])
    )
    lora = {"r": 16, "alpha": 32, "target_modules": "all-linear"}
    rule = ot.AdamW(lr=given.lr or (1e-5 if given.full else 1e-4) * (1 if given.model else 100))
    options: Any = dict(working="host", activation="recompute", clip_norm=1.0)
    model, optimizer = ot.from_pretrained(
        folder, rule, lora=None if given.full else lora, state="split16", **options
    )
    settings = dict(num_train_epochs=1 if given.model else 4, report_to=[], save_strategy="no")
    trainer = OffloadTrainer(
        model=model,
        args=TrainingArguments(scratch.name, logging_steps=4, max_grad_norm=1.0, **settings),
        train_dataset=rows.map(encode, remove_columns=rows.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        optimizers=(optimizer, None),
        chunked_loss=True,
    )
    trainer.train()
    if given.out:
        ot.save_pretrained(optimizer, given.out, tokenizer=tokenizer)
    optimizer.close()
    scratch.cleanup()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
