"""Three lines changed in somebody's own training loop (marked ←). Runs on a CPU in seconds:

    python examples/three_lines.py

The model, the data and the learning-rate scheduler are plain torch. The 16-bit working weights are
on the device; the fp32 master weights and Adam's moments are in host memory, where Adam runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offloadtrain as ot

TEXT = Path(argparse.__file__).read_text()  # real text that is on every machine
CONTEXT, BATCH, STEPS = 16, 128, 150


class NextCharacter(nn.Module):
    """Guesses a character from the `CONTEXT` characters before it."""

    def __init__(self, vocab_size: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(CONTEXT * width, CONTEXT * width) for _ in range(2))
        self.head = nn.Linear(CONTEXT * width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).flatten(1)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def main() -> float:
    """Train, print the loss now and then, and return the last one."""
    torch.manual_seed(0)
    alphabet = sorted(set(TEXT))
    text = torch.tensor([alphabet.index(character) for character in TEXT])
    model = NextCharacter(len(alphabet))

    optimizer = ot.offload(model, ot.AdamW(lr=3e-3, weight_decay=0.1), clip_norm=1.0)  # ← 1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)

    for step in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(optimizer.device)  # ← 2
        loss = F.cross_entropy(model(windows[:, :-1]).float(), windows[:, -1])
        # ← 3: in place of loss.backward(). It also scales fp16 losses and divides by
        # grad_accum_steps: a loss that is divided already wants divide=False.
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 30 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}  grad norm {optimizer.grad_norm:.3f}")

    for row in optimizer.ledger.rows():
        print(f"{row.owner:16} {row.bytes / 2**20:6.2f} MiB on the {row.tier}")
    optimizer.close()
    return loss.item()


if __name__ == "__main__":
    main()
