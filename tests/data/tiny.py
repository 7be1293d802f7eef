"""Tiny tokenizers and token files, made where they are needed: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from offloadtrain.data.tokens import TokenFile, TokenWriter

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace(
    "message['content'] +", "(message['content'] if loop.last else message['content'][:2]) +"
)
"""A template that shortens earlier turns, as some drop their reasoning."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def backend(begin: str = "") -> Any:
    """Return a byte-level BPE tokenizer of about 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat and the hat, user and assistant: what is it? "] * 9, trainer)
    if begin:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
        )
    return made


def folder(path: Path, template: str | None = CHATML, begin: str = "") -> Path:
    """Save the tokenizer as transformers does."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=backend(begin), eos_token="<|endoftext|>")
    made.chat_template = template
    made.save_pretrained(path)
    return path


def write_tokens(
    path: str | Path,
    pieces: Iterable[npt.NDArray[Any]],
    *,
    vocab_size: int,
    tokenizer: str,
    tokenizer_id: str = "",
    fingerprint: str = "",
) -> None:
    """Write a whole token file, atomically. Raises as `TokenWriter` does."""
    with TokenWriter(
        path,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        tokenizer_id=tokenizer_id,
        fingerprint=fingerprint,
    ) as writer:
        for piece in pieces:
            writer.write(piece)
        writer.commit()


def scanned(path: Path) -> TokenFile:
    """Open a token file and check all of it."""
    file = TokenFile(path)
    file.scan()
    return file
