"""The learning rate range test: it doubles every few steps until the loss rises (Smith, 2017).

    python examples/lr_finder.py                       # a toy on the CPU, in seconds
    python examples/lr_finder.py models/llama text.txt

Take a tenth of the rate with the lowest loss. The weights are spoilt: nothing is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import toy
from transformers import AutoTokenizer

import offloadtrain as ot

FIRST, LAST, STEPS, BATCH, LENGTH = 1e-6, 1.0, 60, 8, 32


def main(arguments: list[str] | None = None) -> list[tuple[float, float]]:
    """Print learning rates with the smoothed loss, and return both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a Hugging Face folder")
    parser.add_argument("text", nargs="?", default=argparse.__file__)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or toy.make_llama(scratch)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        options = dict(working="host", activation="recompute", clip_norm=1.0)
        model, optimizer = ot.from_pretrained(folder, ot.AdamW(lr=FIRST), state="int8", **options)
    text = Path(given.text).read_text()
    tokens = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    growth = (LAST / FIRST) ** (1 / (STEPS - 1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, growth)

    model.train()
    found: list[tuple[float, float]] = []
    smooth = 0.0
    for step in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        batch = tokens[starts + torch.arange(LENGTH)].to(optimizer.device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        rate = optimizer.param_groups[0]["lr"]
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        smooth = 0.8 * smooth + 0.2 * loss.item()
        found.append((rate, smooth / (1 - 0.8 ** (step + 1))))
        if step % 4 == 0:
            print(f"lr {rate:.1e}  loss {found[-1][1]:.4f}")
        if found[-1][1] > 1.5 * min(smoothed for _, smoothed in found):
            break
    optimizer.close()
    best, _ = min(found, key=lambda pair: pair[1])
    print(f"the lowest loss is at {best:.1e}: try lr = {best / 10:.1e}")
    return found


if __name__ == "__main__":
    main()
