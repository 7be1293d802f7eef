"""A diffusion transformer of diffusers learns to remove noise (flow matching).

    python examples/diffusion.py                  # a toy on the CPU, in seconds
    python examples/diffusion.py models/dit-xl    # a folder that DiTTransformer2DModel loads

The latents have one bright corner, and the class says which.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel
from torch import Tensor

import offloadtrain as ot

BATCH, STEPS = 16, 60


def blobs(channels: int, size: int) -> tuple[Tensor, Tensor]:
    """Latents (B, channels, size, size): a bright corner, and the class that says which."""
    labels = torch.randint(4, (BATCH,))
    latents = torch.full((BATCH, channels, size, size), -1.0)
    for one, label in zip(latents, labels.tolist(), strict=True):
        y, x = (half * size // 2 for half in divmod(label, 2))
        one[:, y : y + size // 2, x : x + size // 2] = 1.0
    return latents, labels


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, print the losses now and then, and return them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a folder of diffusers")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    shape: Any = dict(num_layers=2, num_attention_heads=4, attention_head_dim=16, sample_size=8)
    model = (
        DiTTransformer2DModel.from_pretrained(given.model)
        if given.model
        else DiTTransformer2DModel(**shape, patch_size=2, num_embeds_ada_norm=1000)
    )
    options: Any = dict(working="host", activation="recompute", state="split16", clip_norm=1.0)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-5 if given.model else 3e-3), **options)
    device = optimizer.device

    losses = []
    for step in range(STEPS):
        clean, labels = blobs(model.config.in_channels, model.config.sample_size)
        noise, time = torch.randn_like(clean), torch.rand(BATCH)
        noisy = torch.lerp(clean, noise, time[:, None, None, None])
        steps = (1000 * time).long().to(device)
        found = model(noisy.to(device), timestep=steps, class_labels=labels.to(device)).sample
        velocity = found[:, : clean.shape[1]].float()  # the rest is a variance, if there is one
        loss = F.mse_loss(velocity, (noise - clean).to(device))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    optimizer.close()
    return losses


if __name__ == "__main__":
    main()
