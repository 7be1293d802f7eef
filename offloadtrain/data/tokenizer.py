"""Tokenizers by name: text to token numbers and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offloadtrain.data.tokens import DataError


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per byte of UTF-8; documents end with a 0 byte."""

    name: str = "bytes"
    vocab_size: int = 256
    end_of_document: int = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode("utf-8", "replace")


TOKENIZERS = {"bytes": ByteTokenizer()}


def tokenizer(name: str) -> ByteTokenizer:
    """Return the tokenizer of that name, which a `TokenFile` also carries.

    Raises:
        DataError: there is no such tokenizer.
    """
    if name not in TOKENIZERS:
        raise DataError(f"unknown tokenizer {name!r}; choose one of: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]
