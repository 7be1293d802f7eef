"""Conversations: rendered by the tokenizer's chat template, with the assistant's tokens marked.

A record of a conversation has the fields of OpenAI (`messages`), of ShareGPT (`conversations` or
`conversation`, with `from` and `value`) or of Alpaca (`instruction`, `input`, `output`):
`messages_of` reads all three.

A template that marks the assistant's text with `{% generation %}` defines the counted tokens. With
any other template, the tokens of turn k are the difference of two renderings: the first k messages,
and the first k - 1 messages with the prompt for an answer. This is correct only if each of these
renderings is a prefix, token by token, of the rendered conversation. The prefixes are checked for
every turn. A template that, for example, drops the reasoning of earlier turns is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offloadtrain.data.source import optional
from offloadtrain.data.tokenizer import RustTokenizer, Tokenizer, pretrained
from offloadtrain.data.tokens import DataError

Messages = Sequence[dict[str, Any]]
Mask = npt.NDArray[np.uint8]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Speakers of ShareGPT; other speakers have the names of the roles."""
_TURNS = ("messages", "conversations", "conversation")
FIELDS = (*_TURNS, "instruction", "input", "output", "system", "tools")
"""All fields of a conversation that are read."""


class ChatError(ValueError):
    """A conversation that cannot be used; the text is the reason."""


def is_conversation(record: Mapping[str, Any]) -> bool:
    """Return True if the fields of a record are the fields of a conversation."""
    turns = (record.get(name) for name in _TURNS)
    texts = (record.get(name) for name in ("instruction", "output"))
    return any(isinstance(x, list) for x in turns) or all(isinstance(x, str) for x in texts)


def messages_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record in the form of OpenAI, ShareGPT or Alpaca.

    In the form of Alpaca the question is `instruction` and, after an empty line, `input`. A field
    `system` is the first message.

    Raises:
        ChatError: if the record has none of these forms; the text names the missing field.
    """
    if isinstance(messages := record.get("messages"), list):
        turns = messages
    elif isinstance(spoken := record.get("conversations") or record.get("conversation"), list):
        turns = [_turn(turn) for turn in spoken]
    elif is_conversation(record):
        if not isinstance(more := record.get("input") or "", str):
            raise ChatError(f"its input is no text: {more!r}")
        question = "\n\n".join(filter(None, (record["instruction"], more)))
        answer = {"role": "assistant", "content": record["output"]}
        turns = [{"role": "user", "content": question}, answer]
    else:
        there = ", ".join(ascii(key) for key, value in record.items() if value is not None)
        raise ChatError(
            "no conversation: it needs messages, conversations (ShareGPT), or instruction and "
            f"output (Alpaca){f'; there is {there}' if there else ''}"
        )
    if not all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns):
        raise ChatError(
            'each message must be {"role": ..., "content": ...}, or {"from": ..., "value": ...}'
        )
    if isinstance(system := record.get("system"), str) and system and turns is not messages:
        turns = [{"role": "system", "content": system}, *turns]
    return turns


def _turn(turn: Any) -> Any:
    """Return a turn of ShareGPT as a message; a turn that is already a message stays unchanged."""
    match turn:
        case {"from": str(speaker), "value": str(text)}:
            return {"role": ROLES.get(speaker, speaker), "content": text}
    return turn


def _refuse_empty(messages: Messages, numbers: Iterable[int]) -> None:
    """Raise ChatError if an answer is empty: the model would learn to end its turn."""
    for number in numbers:
        values = [value for name, value in messages[number].items() if name != "role"]
        if not any(map(_says_something, values)):
            raise ChatError(f"message number {number + 1}, an answer, is empty")


def _says_something(content: Any) -> bool:
    """Return True if the content of a message has a word or a part that is not text."""
    if isinstance(content, list):
        return any(map(_says_something, content))
    text = content["text"] if _is_text(content) else content
    return bool(text.strip() if isinstance(text, str) else text)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and the tokenizer of transformers that renders it."""

    pretrained: Any = field(repr=False)
    template: str = field(repr=False)

    @property
    def identity(self) -> str:
        return hashlib.blake2b(self.template.encode(), digest_size=16).hexdigest()

    def encode(self, messages: Messages, tools: Any = None) -> tuple[npt.NDArray[np.uint32], Mask]:
        """Return the tokens of a conversation, and a mask with 1 for the assistant's turns.

        Raises:
            ChatError: if the template refuses it, it has no answer, or its turns are unknown.
        """
        turns = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise ChatError("no message of the assistant: the loss would count nothing")
        _refuse_empty(messages, turns)
        messages = self._readable(messages, tools)
        if _MARKS.search(self.template):
            rendered = self._apply(
                messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens, mask = (
                rendered["input_ids"],
                np.array(rendered["assistant_masks"], dtype=np.uint8),
            )
        else:
            parts = [(messages[:n], n == turn) for turn in turns for n in (turn, turn + 1)]
            texts = (self._render(part, tools, ask) for part, ask in ((messages, False), *parts))
            tokens, *prefixes = self._tokens(list(texts))
            mask = np.zeros(len(tokens), dtype=np.uint8)
            for turn, before, after in zip(turns, prefixes[::2], prefixes[1::2], strict=True):
                self._check_begins(tokens, before, f"the messages before number {turn + 1}")
                self._check_begins(tokens, after, f"the first {turn + 1} messages")
                mask[len(before) : len(after)] = 1
        if not mask.any():
            raise ChatError("the chat template renders no token of the assistant")
        return np.array(tokens, dtype=np.uint32), mask

    def encode_completion(
        self, prompt: Messages, completion: Messages, tools: Any = None
    ) -> tuple[npt.NDArray[np.uint32], Mask]:
        """Return the tokens of prompt and completion, and a mask with 1 for the completion.

        Raises:
            ChatError: as in `encode`.
        """
        _refuse_empty(completion, range(len(completion)))
        both = self._readable([*prompt, *completion], tools)
        prompt_text = self._render(both[: len(prompt)], tools, ask=True)
        tokens, before = self._tokens([self._render(both, tools), prompt_text])
        self._check_begins(tokens, before, "the prompt")
        mask = np.zeros(len(tokens), dtype=np.uint8)
        mask[len(before) :] = 1
        return np.array(tokens, dtype=np.uint32), mask

    def encode_question(self, question: str) -> list[int]:
        """Return the tokens of a user's first message, up to the start of the assistant's answer.

        Raises:
            ChatError: if the template refuses it.
        """
        text = self._render([{"role": "user", "content": question}], None, ask=True)
        return self._tokens([text])[0]

    def _readable(self, messages: Messages, tools: Any) -> Messages:
        """Return the messages. If the template refuses lists of text parts, or prints them as
        Python lists, the parts are joined.

        Raises:
            ChatError: if the parts must be joined and one is not text.
        """
        lists = {
            number: message["content"]
            for number, message in enumerate(messages)
            if not isinstance(message.get("content"), str | None)
        }
        if not lists:
            return messages
        with suppress(ChatError):
            text = self._render(messages, tools)
            if not any(str(content) in text for content in lists.values()):
                return messages
        for number, parts in lists.items():
            if not (isinstance(parts, list) and all(map(_is_text, parts))):
                raise ChatError(
                    f"the content of message number {number + 1} is not text alone, and the chat "
                    "template does not read it: leave out its other parts"
                )
        texts = {n: "".join(part["text"] for part in parts) for n, parts in lists.items()}
        return [
            {**message, "content": texts.get(number, message.get("content"))}
            for number, message in enumerate(messages)
        ]

    def _render(self, messages: Messages, tools: Any, ask: bool = False) -> str:
        if not messages:
            raise ChatError(
                "the assistant speaks first: no user message separates its turn from the opening"
            )
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=ask))

    def _apply(self, messages: Messages, tools: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.pretrained.apply_chat_template(
                list(messages), tools=tools, chat_template=self.template, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(f"the chat template refuses it ({error})") from error

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        encoded = self.pretrained(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return list(encoded)

    def _check_begins(self, tokens: list[int], part: list[int], what: str) -> None:
        """Raise ChatError if the conversation's tokens do not begin with the tokens of a part."""
        if tokens[: len(part)] == part:
            return
        at = next(
            (n for n, pair in enumerate(zip(tokens, part, strict=False)) if pair[0] != pair[1]),
            len(tokens),
        )
        here, there = (self.pretrained.decode(ids[at : at + 8]) for ids in (part, tokens))
        raise ChatError(
            f"the chat template is not prefix-stable: {what} alone are rendered with {here!r} at "
            f"token {at}, where the whole conversation has {there!r}, so the assistant's tokens "
            "are not known; use a template that marks them with {% generation %} (chat_template)"
        )


def chat_template(tokenizer: Tokenizer, path: str = "") -> ChatTemplate:
    """Return the tokenizer's own template, or the template in a Jinja file.

    Raises:
        DataError: if there is no template, or transformers is not installed.
    """
    if Path(tokenizer.name).is_dir():
        loaded = pretrained(tokenizer.name)
    elif isinstance(tokenizer, RustTokenizer):
        transformers = optional("transformers", "a chat template")
        loaded = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
    else:
        raise DataError(
            f"conversations need a chat template, and tokenizer {tokenizer.name!r} cannot have "
            "one: choose the folder of a tokenizer of transformers (--tokenizer; in a job, "
            "data.tokenizer)"
        )
    try:
        template = Path(path).read_text(encoding="utf-8") if path else loaded.chat_template
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the chat template {path}: {error}") from error
    if not isinstance(template, str):
        raise DataError(
            f"the tokenizer {tokenizer.name} has no chat template: name a Jinja file with one "
            "(chat_template)"
        )
    return ChatTemplate(loaded, template)
