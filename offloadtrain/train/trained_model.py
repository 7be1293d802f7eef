"""A trained model to sample from and to evaluate: of a run, or of a folder of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.sections import IGNORED, Packing
from offloadtrain.data import tokenizer as tokenizers
from offloadtrain.data.batches import Batch, Batches
from offloadtrain.data.chat import ChatError, ChatTemplate, chat_template
from offloadtrain.data.tokens import Progress, TokenFile, verify
from offloadtrain.integrations import causal_lm
from offloadtrain.model.language_model import LanguageModel, Sampling
from offloadtrain.train.losses import loss_of, to_device
from offloadtrain.train.saved_run import SavedRun, is_run, language_model, open_saved
from offloadtrain.train.token_files import masking_of

SEQ_LEN_MOST = 1024
"""Tokens per sequence in the evaluation of a folder, which names no length that it was trained
with."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Attributes:
    path: as asked for.
    saved: the run that it is of; None: a folder of transformers.
    """

    path: Path
    model: LanguageModel
    saved: SavedRun | None
    device: torch.device

    @property
    def packing(self) -> Packing:
        """The packing of documents into sequences, as in its training."""
        return "stream" if self.saved is None else self.saved.job.data.packing

    @property
    def seq_len(self) -> int:
        """Tokens per sequence: those of its training, or few enough for any memory."""
        if self.saved is not None:
            return self.saved.job.data.seq_len
        return min(self.model.max_seq_len, SEQ_LEN_MOST)


@dataclass(frozen=True, slots=True)
class Words:
    """Text to the tokens of a model, and back.

    Attributes:
        chat: returns the template that its conversations are rendered with; DataError: none.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_of_text: int | None
    chat: Callable[[], ChatTemplate]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Attributes:
    loss: mean over `tokens` targets, nats.
    left_out: targets at the end of the file that fill no sequence.
    """

    loss: float
    tokens: int
    left_out: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def open_model(path: Path, device: torch.device) -> TrainedModel:
    """Load the weights of a run's newest checkpoint, of one checkpoint, or of a folder.

    Raises:
        ConfigError: it is none of them.
    """
    if is_run(path):
        saved = open_saved(path)
        return TrainedModel(path, language_model(saved, device), saved, device)
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{path} holds adapters without their base: write both as one with `offloadtrain "
            "export RUN OUT --merge`"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a run folder or a checkpoint, nor a folder of transformers (it has "
            "no config.json)"
        )
    return TrainedModel(path, causal_lm.load(path, device), None, device)


def words_of(trained: TrainedModel) -> Words:
    """Return the tokenizer of the tokens that the model was trained on.

    Raises:
        DataError, CausalLmError: it is not here.
    """
    if (saved := trained.saved) is not None:
        tokenizer = tokenizers.tokenizer(saved.tokenizer)
        return Words(
            lambda text: [*tokenizer.begin, *tokenizer.encode_batch([text])[0].tolist()],
            tokenizer.decode,
            tokenizer.end_of_document,
            lambda: chat_template(tokenizer, saved.job.data.chat_template),
        )
    other = causal_lm.tokenizer(trained.path)
    return Words(
        lambda text: list(other(text)["input_ids"]),
        lambda tokens: str(other.decode(tokens, skip_special_tokens=True)),
        other.eos_token_id,
        lambda: chat_template(tokenizers.tokenizer(str(trained.path))),
    )


def continued(trained: TrainedModel, prompt: str, num_tokens: int, sampling: Sampling) -> str:
    """Return the prompt's continuation, up to the end of its text.

    Raises:
        ConfigError: the prompt is empty, and the tokenizer has no token to begin with.
    """
    words = words_of(trained)
    tokens = words.encode(prompt) or ([] if words.end_of_text is None else [words.end_of_text])
    if not tokens:
        raise ConfigError("--prompt is empty, and the tokenizer has no token to begin with")
    return _generated(trained, words, tokens, num_tokens, sampling)


def answered(trained: TrainedModel, question: str, num_tokens: int, sampling: Sampling) -> str:
    """Return the assistant's answer to a user's first message.

    Raises:
        DataError: the tokenizer has no chat template, or transformers is not installed.
        ConfigError: the template refuses the message.
    """
    words = words_of(trained)
    try:
        tokens = words.chat().encode_question(question)
    except ChatError as error:
        raise ConfigError(f"--chat: {error}") from error
    return _generated(trained, words, tokens, num_tokens, sampling)


def _generated(
    trained: TrainedModel, words: Words, tokens: list[int], num_tokens: int, sampling: Sampling
) -> str:
    prompt_BT = torch.tensor([tokens], device=trained.device)
    found_BT = trained.model.generate(prompt_BT, num_tokens, sampling)
    new = found_BT[0, len(tokens) :].tolist()
    if words.end_of_text in new:
        new = new[: new.index(words.end_of_text)]
    return words.decode(new)


@torch.no_grad()
def evaluate(
    trained: TrainedModel,
    data: Path,
    *,
    seq_len: int,
    batch: int,
    most_tokens: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Return the mean loss over the counted tokens of all whole sequences of a token file.

    Args:
        most_tokens: stop after so many, which then are spread evenly over the file; 0: all.
        progress: called with (bytes done, bytes in all).

    Raises:
        ConfigError: the file's vocabulary or the length is not the model's.
    """
    tokens, model = TokenFile(data), trained.model
    _check(trained, tokens, seq_len)
    verify(tokens)
    batches = Batches(
        tokens,
        batch=batch,
        seq_len=seq_len,
        packing=trained.packing,
        shuffle=False,
        masking=None if trained.saved is None else masking_of(trained.saved.job, tokens),
    )
    wanted = min(batches.windows, -(-most_tokens // seq_len) or batches.windows)
    width = seq_len * tokens.tokens.itemsize
    total, counted, done = 0.0, 0, 0
    while done < wanted:
        full_batch = batches.next()
        part = Batch(*(None if x is None else x[: wanted - done] for x in full_batch))  # type: ignore[arg-type]
        total += loss_of(model, to_device(part, trained.device), 1.0).item()
        counted += int((part.targets_BT != IGNORED).sum())
        done += len(part.tokens_BT)
        if progress is not None:
            progress(done * width, wanted * width)
    complete = wanted == batches.windows and trained.packing == "stream"
    left_out = len(tokens) - 1 - wanted * seq_len if complete else 0
    return Evaluation(total / max(1, counted), counted, left_out)


def _check(trained: TrainedModel, tokens: TokenFile, seq_len: int) -> None:
    model, header = trained.model, tokens.header
    if header.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {header.vocab_size}, and {trained.path} "
            f"has one of {model.vocab_size}: prepare the text with the model's tokenizer"
        )
    if trained.saved is not None and trained.saved.tokenizer != header.tokenizer:
        raise ConfigError(
            f"{tokens.path} was prepared with the tokenizer {header.tokenizer}, and {trained.path} "
            f"was trained on tokens of {trained.saved.tokenizer}"
        )
    if seq_len > model.max_seq_len:
        raise ConfigError(
            f"--seq-len {seq_len} is beyond the model's longest sequence, {model.max_seq_len}"
        )
