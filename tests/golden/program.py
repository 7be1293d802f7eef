"""A training program that uses `offload` and saves itself with torch.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offloadtrain as ot

STEPS_BEFORE, STEPS_AFTER, MICROBATCHES = 3, 3, 2

CASES: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.5, "grad_accum_steps": MICROBATCHES},
    "split16, streamed": {"state": "split16", "working": "host", "resident_blocks": 1},
    "int8, delayed": {"state": "int8", "update": "delayed", "clip_norm": 0.5},
    "speculative": {"update": "speculative", "clip_norm": 10.0},
    "fp16": {"precision": "fp16"},
    "fp32 on the device": {"precision": "fp32", "state_on": "device"},
}
"""Options of `offload` by case."""


class Training:
    """A model, its optimizer of two groups, and a schedule."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.options = options
        layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)]
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*layers), nn.Linear(8, 1))
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.ndim == 1], "lr": 3e-3},
        ]
        self.optimizer = ot.offload(
            self.model, ot.AdamW(lr=1e-2), params=groups, device="cpu", seed=3, **options
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def step(self, number: int) -> float:
        """Train a step on batches that its number determines; return the loss."""
        generator = torch.Generator().manual_seed(number)
        total = 0.0
        for _ in range(self.options.get("grad_accum_steps", 1)):
            inputs = torch.randn(16, 4, generator=generator)
            loss = self.loss(inputs)
            self.optimizer.backward(loss)
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total

    def loss(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs).float()
        return (outputs - inputs.sin().sum(dim=1, keepdim=True)).square().mean()

    def save(self, path: Path) -> None:
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
            },
            path,
        )

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}.pt"


def save(folder: Path, name: str) -> list[float]:
    """Train a case from the start, save it, and return the losses of the steps after that."""
    training = Training(CASES[name], seed=0)
    for number in range(STEPS_BEFORE):
        training.step(number)
    training.save(path_of(folder, name))
    return [training.step(STEPS_BEFORE + number) for number in range(STEPS_AFTER)]


def resume(folder: Path, name: str) -> list[float]:
    """Load a case into objects of other initial weights; return the losses of its next steps."""
    training = Training(CASES[name], seed=1)
    training.load(path_of(folder, name))
    return [training.step(STEPS_BEFORE + number) for number in range(STEPS_AFTER)]
