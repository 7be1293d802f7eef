"""A vision transformer of transformers learns to tell images apart.

    python examples/vit.py                        # a toy on the CPU, in seconds
    python examples/vit.py models/vit-huge        # a Hugging Face folder, on the same images

The images are stripes of four widths, under noise.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import offloadtrain as ot

CLASSES, BATCH, STEPS = 4, 32, 40


def stripes(size: int) -> tuple[Tensor, Tensor]:
    """A batch of noisy images, (B, 3, size, size), and their classes: the width of stripes."""
    labels = torch.randint(CLASSES, (BATCH,))
    columns = torch.arange(size)[None] // (1 << labels[:, None]) % 2
    images = columns[:, None, None].expand(BATCH, 3, size, size) * 2.0 - 1.0
    return images + 0.5 * torch.randn(BATCH, 3, size, size), labels


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the losses now and then, and return them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a Hugging Face folder")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    options: Any = dict(clip_norm=1.0, working="host", activation="recompute", state="split16")
    if given.model:
        model, optimizer = ot.from_pretrained(
            given.model,
            ot.AdamW(lr=1e-5),
            auto_class="AutoModelForImageClassification",
            model_kwargs={"num_labels": CLASSES},
            **options,
        )
    else:
        shape: Any = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
        sizes: Any = dict(intermediate_size=128, image_size=32, patch_size=8, num_labels=CLASSES)
        model = ViTForImageClassification(ViTConfig(**shape, **sizes))
        optimizer = ot.offload(model, ot.AdamW(lr=1e-3), **options)

    model.train()
    losses = []
    for step in range(STEPS):
        images, labels = stripes(model.config.image_size)
        device = optimizer.device
        loss = model(pixel_values=images.to(device), labels=labels.to(device)).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 8 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    optimizer.close()
    return losses


if __name__ == "__main__":
    main()
