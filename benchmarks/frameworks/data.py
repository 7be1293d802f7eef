"""What the frameworks train: a small causal language model and texts of several lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

from benchmarks.architectures.batches import END, PAD, SEQUENCE, START, VOCAB
from benchmarks.architectures.models import ARCHITECTURES
from benchmarks.architectures.training import build

SAMPLES = 24
"""With 2 per batch and 5 batches per step, the last step of an epoch has two."""


def model() -> Any:
    return build(ARCHITECTURES["llama"])


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Token sequences as they are, or with some labels masked: then batches count different
    numbers of tokens."""

    def __init__(self, *, masked: bool = False) -> None:
        self._masked = masked
        source = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(END + 1, VOCAB, (SAMPLES, SEQUENCE), generator=source)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index]
        labels = tokens.clone()
        labels[: index % 9 * self._masked] = -100
        return {"input_ids": tokens, "labels": labels}

    def unpadded(self) -> list[dict[str, list[int]]]:
        return [{"input_ids": row[: 5 + i % 9].tolist()} for i, row in enumerate(self._tokens)]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The texts with masked labels, of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        texts = Texts(masked=True)
        return (texts[index] for index in range(SAMPLES))


def padded(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of texts of several lengths."""
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    tokens = pad_sequence(texts, batch_first=True, padding_value=PAD)
    mask = pad_sequence(list(map(torch.ones_like, texts)), batch_first=True)
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def counted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The sum over counted tokens, divided by their number in all microbatches of the step."""
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def preferences() -> list[dict[str, str]]:
    return [
        {"prompt": "w5 w6", "chosen": f" w7 w{END + 1 + i}", "rejected": " w9 w8"}
        for i in range(SAMPLES)
    ]


def tokenizer() -> Any:
    """A word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: Any = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = dict(pad_token=f"w{PAD}", bos_token=f"w{START}", eos_token=f"w{END}", unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=words, **ends)
