"""The [data] section of a job, and the choices that `data/` shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
