"""Tokenizers by name: text to token numbers and back.

    bytes              one token per byte of UTF-8
    FOLDER             a tokenizer of transformers, as `save_pretrained` writes it
    FILE.json          a tokenizer of the package tokenizers (tokenizer.json)

Nothing is downloaded, and no code of a folder is run. A package is imported when one of its
tokenizers is loaded.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadtrain.boundary.model_folder import check_folder
from offloadtrain.data.source import optional
from offloadtrain.data.tokens import DataError

Ids = npt.NDArray[np.unsignedinteger[Any]]

_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>"),
    *("<end_of_turn>", "[EOS]", "[SEP]"),
)
"""Names of the token that ends a document, for files that do not name this token."""
_PROBE = "".join(map(chr, range(128))) + "\u00e9\u4e2d\U0001f600"
"""Text whose bytes distinguish a tokenizer of bytes from other tokenizers."""


@dataclass(frozen=True, slots=True)
class Tokenizer(ABC):
    """Text to tokens and back.

    Attributes:
        name: the name with which `tokenizer` loads it.
        identity: equal for two tokenizers that make the same tokens of any text.
        vocab_size: larger than every token.
        end_of_document: the token after a document.
        begin: the tokens before a document.
        backend: encodes and decodes; it neither pads nor truncates.
    """

    name: str
    identity: str
    vocab_size: int
    end_of_document: int
    begin: tuple[int, ...] = ()
    backend: Any = field(default=None, repr=False)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each text, without tokens for the start and the end of a
        document."""

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self.backend.decode(list(tokens)))


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8; documents end with a 0 byte."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode("utf-8", "replace")


class RustTokenizer(Tokenizer):
    """A tokenizer of the package tokenizers; its backend is a `tokenizers.Tokenizer`."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self.backend.decode(list(tokens), skip_special_tokens=False))


class PythonTokenizer(Tokenizer):
    """A tokenizer of transformers in Python; its backend is a `PreTrainedTokenizer`."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self.backend(list(texts), add_special_tokens=False, verbose=False)
        return [np.array(ids, dtype=np.uint32) for ids in encoded["input_ids"]]


def tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer with this name, for example the name in a `TokenFile`.

    Raises:
        DataError: if there is no such tokenizer, it cannot be read, or its package is missing.
    """
    if name == "bytes":
        return ByteTokenizer("bytes", "bytes", vocab_size=256, end_of_document=0)
    path = Path(name)
    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        return _of_pretrained(str(path.resolve()), pretrained(name))
    if path.is_dir():
        check_folder(path)
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"no tokenizer {name!r}: give bytes, a folder with a tokenizer of transformers, or "
            "a tokenizer.json"
        )
    return _of_file(path)


def pretrained(folder: str) -> Any:
    """Return the tokenizer of transformers in a folder.

    Raises:
        DataError: if transformers is not installed, or cannot load it without running its code.
    """
    transformers = optional("transformers", f"the tokenizer in {folder}")
    try:
        check_folder(folder)
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # any class, for a file of another kind
        reason = " ".join(str(error).split())
        raise DataError(f"transformers cannot load a tokenizer from {folder}: {reason}") from error


def _of_pretrained(name: str, loaded: Any) -> Tokenizer:
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend and backend.get_vocab_size() == 256:
        # `export` writes the tokenizer of bytes in this form for transformers.
        if backend.encode(_PROBE, add_special_tokens=False).ids == [*_PROBE.encode()]:
            return tokenizer("bytes")
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
    if end is None:
        raise DataError(
            f"the tokenizer in {name} has no end-of-sequence token: set eos_token in its "
            "tokenizer_config.json"
        )
    if backend:
        return _of_backend(name, backend, end)
    vocabulary = loaded.get_vocab()
    with_special, plain = (loaded("a", add_special_tokens=s)["input_ids"] for s in (True, False))
    return PythonTokenizer(
        name=name,
        identity=_hash([type(loaded).__name__, sorted(vocabulary.items()), end]),
        vocab_size=max(vocabulary.values()) + 1,
        begin=_before(plain, with_special),
        end_of_document=end,
        backend=loaded,
    )


def _of_file(path: Path) -> Tokenizer:
    tokenizers = optional("tokenizers", f"the tokenizer {path}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # a plain Exception for a file that is not a tokenizer
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    vocabulary = backend.get_vocab(with_added_tokens=True)
    end = next((vocabulary[end] for end in _ENDS if end in vocabulary), None)
    if end is None:
        raise DataError(
            f"{path} has none of the usual end-of-sequence tokens ({', '.join(_ENDS)}): put a "
            'tokenizer_config.json beside it that says "eos_token", and give the folder'
        )
    return _of_backend(str(path.resolve()), backend, end)


def _of_backend(name: str, backend: Any, end: int) -> RustTokenizer:
    backend = type(backend).from_str(backend.to_str())  # a copy that may be changed
    backend.no_truncation()
    backend.no_padding()
    with_special, plain = (backend.encode("a", add_special_tokens=s).ids for s in (True, False))
    return RustTokenizer(
        name=name,
        identity=_hash([backend.to_str(), end]),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        begin=_before(plain, with_special),
        end_of_document=end,
        backend=backend,
    )


def _before(plain: list[int], with_special: list[int]) -> tuple[int, ...]:
    """Return the tokens before the tokens of a text."""
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return tuple(with_special[:start])
    return ()


def _hash(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
