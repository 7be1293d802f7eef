"""Records to tokens and a loss mask.

    text        a string in one field; every token counts
    chat        `messages`, rendered by the chat template; the assistant's tokens count
    completion  `prompt` and `completion`, strings or messages; the completion's tokens count

A text, and a completion that is a string, begins and ends with the tokenizer's tokens for that. A
chat template writes its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offloadtrain.config.data_options import Form
from offloadtrain.data.chat import ChatError, ChatTemplate, Mask
from offloadtrain.data.cut import hash64
from offloadtrain.data.records import Bad, Record, excerpt
from offloadtrain.data.tokenizer import ByteTokenizer, Ids, Tokenizer

_COLUMNS = {
    "chat": ("messages", "tools"),
    "completion": ("prompt", "completion", "tools"),
}


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one record.

    Attributes:
        split_hash: of what it says, decides whether it is held out.
        counted: 1 for a token that the loss counts; None: all.
    """

    split_hash: int
    tokens: Ids
    counted: Mask | None


def form_of(record: Record | None) -> Form:
    """Return the form that the fields of a record suggest."""
    if record and isinstance(record.get("messages"), list):
        return "chat"
    if record and {"prompt", "completion"} <= record.keys():
        return "completion"
    return "text"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns records of one form into documents.

    Attributes:
        field: of a record of text.
        chat: None if no conversation is rendered.
    """

    tokenizer: Tokenizer
    form: Form
    field: str
    chat: ChatTemplate | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return _COLUMNS.get(self.form, (self.field,))

    @property
    def masked(self) -> bool:
        return self.form != "text"

    def encode(self, batch: Sequence[Record]) -> list[Document | Bad | None]:
        """Return a document for each record; None for one without text."""
        if self.form == "text":
            return self._texts(batch)
        return [self._encode_record(record) for record in batch]

    def _texts(self, batch: Sequence[Record]) -> list[Document | Bad | None]:
        documents: list[Document | Bad | None] = []
        good, texts = [], []
        for number, record in enumerate(batch):
            raw = self._raw(record)
            documents.append(raw if isinstance(raw, Bad) else None)
            if isinstance(raw, bytes) and raw:
                good.append((number, hash64(raw)))
                texts.append(record[self.field])
        encoded = self.tokenizer.encode_batch(texts)
        for (number, split_hash), ids in zip(good, encoded, strict=True):
            documents[number] = Document(split_hash, self.ended(ids), None)
        return documents

    def _raw(self, record: Record) -> bytes | Bad:
        """Return the text in UTF-8. Bytes as tokens may spell half a surrogate pair, too."""
        if bad := _problem(record, self.field):
            return bad
        errors = "surrogatepass" if isinstance(self.tokenizer, ByteTokenizer) else "strict"
        try:
            return str(record[self.field]).encode("utf-8", errors)
        except UnicodeEncodeError:
            return Bad(f'field "{self.field}" is not Unicode: it holds half a surrogate pair')

    def ended(self, ids: Ids, *, begins: bool = True, ends: bool = True) -> Ids:
        """Return tokens with those at the begin and the end of a document."""
        begin = self.tokenizer.begin if begins else ()
        end = (self.tokenizer.end_of_document,) if ends else ()
        parts = (np.array(begin, ids.dtype), ids, np.array(end, ids.dtype))
        return np.concatenate(parts) if begin or end else ids

    def _encode_record(self, record: Record) -> Document | Bad:
        if problem := self._missing(record):
            return Bad(f"{problem}: {excerpt(repr(record).encode('utf-8', 'replace'))}")
        values = [record[name] for name in self.columns[:-1]]
        try:
            tools = record.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            ids, counted = self._counted(values, tools)
        except (ChatError, UnicodeEncodeError) as error:
            return Bad(f"{error}: {excerpt(repr(record).encode('utf-8', 'replace'))}")
        return Document(hash64(json.dumps(values, sort_keys=True).encode()), ids, counted)

    def _missing(self, record: Record) -> str:
        """Return the problem with the fields of a record, or ""."""
        names = self.columns[:-1]
        for name in names:
            if name not in record:
                there = ", ".join(ascii(key) for key in record)
                return f'no field "{name}" (there is {there})' if record else f'no field "{name}"'
        kinds = {type(record[name]) for name in names}
        if self.form == "completion" and kinds == {str}:
            return ""
        if kinds != {list}:
            return f"field {' and '.join(names)} must be a list of messages" + (
                " or both a string" if self.form == "completion" else ""
            )
        if self.chat is None:
            return "its prompt is a list of messages, but that of the first record was a string"
        messages = [message for name in names for message in record[name]]
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            return 'each message must be {"role": ..., "content": ...}'
        return ""

    def _counted(self, values: list[Any], tools: Any) -> tuple[Ids, Mask]:
        if self.form == "completion" and isinstance(values[0], str):
            return self._completion(*values)
        assert self.chat is not None  # _missing has looked
        if self.form == "completion":
            return self.chat.encode_completion(values[0], values[1], tools)
        return self.chat.encode(values[0], tools)

    def _completion(self, prompt: str, completion: str) -> tuple[Ids, Mask]:
        """Tokens of both together; those from where the prompt's own tokens end, or where a token
        spans both, count (as in TRL)."""
        alone, together = self.tokenizer.encode_batch([prompt, prompt + completion])
        least = min(len(alone), len(together))
        differ = np.flatnonzero(alone[:least] != together[:least])
        shared = int(differ[0]) if differ.size else least
        tokens = self.ended(together)
        counted = np.zeros(len(tokens), dtype=np.uint8)
        counted[len(self.tokenizer.begin) + shared :] = 1
        return tokens, counted


def _problem(record: Record, field: str) -> Bad | None:
    """Return what keeps the field from being text."""
    if field not in record:
        problem = f'no field "{field}"{_fields_of(record)}'
    elif not isinstance(record[field], str):
        problem = f'field "{field}" is not a string'
    else:
        return None
    return Bad(f"{problem}: {excerpt(json.dumps(record, default=str).encode())}")


def _fields_of(record: Record) -> str:
    """Name the fields that could be meant."""
    if (form := form_of(record)) != "text":
        return f' (its fields are those of the form "{form}": choose it with --form {form})'
    if isinstance(turns := record.get("conversations"), list) and turns:
        return (
            ' (the turns of "conversations" have to be "messages", each {"role": "user" or '
            '"assistant" or "system", "content": ...})'
        )
    texts = [ascii(key) for key, value in record.items() if isinstance(value, str)]
    if texts:
        return f" (text is in {', '.join(texts[:4])}: choose one with --field)"
    return " (no other field is a string: write each conversation as one string)" if record else ""
