"""The [data] section of a job, and the choices that `data/` shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offloadtrain.config import toml

Form = Literal["text", "chat", "completion"]
"""What a record is: see `data/encode.py`."""

Packing = Literal["stream", "isolated", "padded"]
"""How documents fill sequences: see [Note: packing] in `data/batches.py`."""


IGNORED = -100
"""The target of a token that the loss does not count; torch's `ignore_index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The source of the tokens.

    Attributes:
        source: what `offloadtrain prepare` takes: a file or folder of text, JSONL, CSV or Parquet,
            a folder of `datasets`, "hf:NAME", or "python-stdlib"; prepared on first use.
        tokenizer: "bytes", a folder with a tokenizer of transformers, a tokenizer.json or a
            .tiktoken file; empty: bytes for `source`. With `train`, the files must be made by it.
        form: what a record of `source` is; "auto": what the first one looks like.
        field: field of a record with the text.
        chat_template: Jinja file in place of the tokenizer's own template.
        train: a token file made by `offloadtrain prepare`; replaces `source`.
        val: held-out token file, used with `train`.
        cache: folder for the token files prepared from `source`.
        val_fraction: share of the documents of `source` that is held out.
        seq_len: tokens per sequence.
        packing: "stream": sequences are windows over all documents, and attention crosses their
            ends; "isolated": the same, but positions and attention begin anew with each document;
            "padded": one document per sequence, cut or filled up to `seq_len`.
    """

    source: str = ""
    tokenizer: str = ""
    form: Literal["auto", "text", "chat", "completion"] = "auto"
    field: str = "text"
    chat_template: str = ""
    train: str = ""
    val: str = ""
    cache: str = "data"
    val_fraction: float = 0.05
    seq_len: int = 256
    packing: Packing = "stream"


def contradictions(data: DataConfig, *, evaluates: int) -> Iterator[str]:
    """Yield a sentence for each contradiction; `evaluates`: `train.eval_every`."""
    if data.source and (data.train or data.val):
        yield (
            f"data.source = {toml.shown(data.source)} and data.train or data.val are both set; "
            "leave one of them out"
        )
    elif data.val and not data.train:
        yield "data.train is missing: data.val is set, but is used only with data.train"
    elif not data.source and not data.train:
        yield (
            "data.source is missing: a file or folder of text or records, or python-stdlib; or set "
            "data.train to a token file made by `offloadtrain prepare`"
        )
    elif not data.source and data.chat_template:
        yield "data.chat_template is set, but is used only to prepare data.source"
    if evaluates and data.train and not data.val:
        yield f"data.val is missing: train.eval_every = {evaluates} needs it"
    if evaluates and data.source and not data.val_fraction:
        yield "data.val_fraction = 0.0 holds out nothing; train.eval_every must be 0 then"
