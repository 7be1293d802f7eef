"""A loop under Accelerate, as its guide writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import offloadtrain as ot
from benchmarks.frameworks import data
from benchmarks.frameworks.trainers import Logged

ADAMW: dict[str, Any] = dict(lr=1e-3, weight_decay=0.1)
CLIP_NORM, BATCH = 0.5, 2


def train(
    offload: Mapping[str, Any] | None,
    *,
    accum: int = 1,
    batch: int = BATCH,
    steps: int = 6,
    save: tuple[int, Path] | None = None,
    resume: Path | None = None,
    mixed_precision: str = "no",
    watch: Callable[[Any, Mapping[str, Any]], None] = lambda net, inputs: None,
) -> Logged:
    """Train for one epoch at most.

    Args:
        offload: options of `offload`; None: torch's AdamW.
        save: after how many microbatches the state is saved, and where.
        resume: the state to begin with; batches before it are passed over.
        watch: called with the prepared model and each batch of this process.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accum, mixed_precision=mixed_precision
    )
    net = data.model()
    if offload is None:
        optimizer: Any = torch.optim.AdamW(net.parameters(), **ADAMW)
    else:
        from offloadtrain.integrations.accelerate import offload as make

        optimizer = make(accelerator, net, ot.AdamW(**ADAMW), **offload)
    loader: Any = torch.utils.data.DataLoader(data.Texts(), batch_size=batch)
    every = 2 * accelerator.num_processes  # its wrapper steps once for each process
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    done = save[0] if resume and save else 0
    if resume:
        accelerator.load_state(str(resume))
        loader = accelerator.skip_first_batches(loader, done)
    logged, losses = [], []
    for number, inputs in enumerate(loader, done + 1):
        watch(net, inputs)
        with accelerator.accumulate(net):
            loss = net(**inputs).loss
            accelerator.backward(loss)
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(net.parameters(), CLIP_NORM))
                logged.append((round(sum(losses) / len(losses), 4), round(norm, 4)))
                losses.clear()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if save and not resume and number == save[0]:
            accelerator.save_state(str(save[1]))
        if len(logged) == steps:
            break
    return logged
