"""Two GPUs, or two processes on the CPU: the same script, started by torchrun.

    torchrun --nproc-per-node 2 examples/two_gpus.py
    torchrun --nproc-per-node 2 examples/two_gpus.py models/llama-3.1-8b

Each rank takes its share of the batch, and holds and updates half of the state. `torchrun` sets
`OMP_NUM_THREADS` to 1: on a CPU with many cores set it yourself.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import toy
from transformers import AutoTokenizer

import offloadtrain as ot

BATCH, STEPS = 8, 20


def main() -> list[float]:
    """Train under torchrun; rank 0 prints the mean loss of all ranks now and then."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    losses = train(device, sys.argv[1] if sys.argv[1:] else None, show)
    dist.destroy_process_group()
    return losses


def show(step: int, loss: float) -> None:
    if dist.get_rank() == 0 and (step % 5 == 0 or step == STEPS - 1):
        print(f"step {step:3d}  loss {loss:.4f}", flush=True)


def toy_of_rank_0(scratch: str, device: torch.device) -> str:
    """Write a toy on rank 0, as transformers does, and return its path on every rank."""
    path = torch.zeros(512, dtype=torch.uint8)
    if dist.get_rank() == 0:
        name = toy.make_llama(scratch).encode()
        path[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    path = path.to(device)
    dist.broadcast(path, 0)  # once the folder is written
    return bytes(path.tolist()).rstrip(b"\0").decode()


def train(
    device: torch.device, given: str | None, on_step: Callable[[int, float], None]
) -> list[float]:
    """Train as one rank of the process group that is there, and return the losses.

    Args:
        device: of this rank.
        given: a folder of weights that every rank can read; a toy without one.
        on_step: gets each step and the mean of all ranks' losses, on every rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given or toy_of_rank_0(scratch, device)
        options = dict(working="host", activation="recompute", clip_norm=1.0, state="split16")
        model, optimizer = ot.from_pretrained(
            folder, ot.AdamW(lr=1e-5 if given else 3e-3), device=device, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        dist.barrier()  # rank 0 removes the folder that the others read
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in toy.CHATS]

    model.train()
    losses = []
    for step in range(STEPS):
        first = step * BATCH * ranks + rank * BATCH  # of this rank: the sampler is split once
        mine = [texts[(first + i) % len(texts)] for i in range(BATCH)]
        batch = tokenizer(mine, padding=True, return_tensors="pt").to(device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels, use_cache=False).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        on_step(step, losses[-1])
    optimizer.close()
    return losses


if __name__ == "__main__":
    main()
