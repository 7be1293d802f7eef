"""The token files of a job: opened or prepared, verified, and held to the job's tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.data.batches import Masking
from offloadtrain.data.prepare import prepare
from offloadtrain.data.source import HUB, PYTHON_STDLIB
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.data.tokens import DataError, Progress, TokenFile, verify
from offloadtrain.runtime.process_group import Ranks

_log = logging.getLogger(__name__)


def open_on_ranks(
    config: Config,
    ranks: Ranks,
    *,
    verifies: bool,
    on_prepare: Progress | None,
    on_verify: Progress | None,
) -> tuple[TokenFile, TokenFile | None]:
    """Open and verify the token files; rank 0 makes them first if they are missing. Every rank
    calls this.

    Args:
        verifies: this rank compares the files with their checksums; one rank of each host does.

    Raises:
        ConfigError: their vocabulary is larger than the model's.
        DataError: they are missing or damaged.
    """
    # The other ranks wait until rank 0 has prepared the files.
    if ranks.rank:
        ranks.barrier()
    opened = open_tokens(config, on_prepare)
    if ranks.rank == 0:
        ranks.barrier()
    for tokens in filter(None, opened):
        _check_vocabulary(config, tokens)
    for tokens in filter(None, opened if verifies else ()):
        verify(tokens, on_verify)
    # No rank goes on before the files of its host are verified.
    ranks.barrier()
    return opened


def open_tokens(
    config: Config, on_prepare: Progress | None = None
) -> tuple[TokenFile, TokenFile | None]:
    """Open the token files of a job, made first if the job names a source."""
    data = config.data
    if not data.source:
        return TokenFile(data.train), TokenFile(data.val) if data.val else None
    named = data.source == PYTHON_STDLIB or data.source.startswith(HUB)
    if not named and not Path(data.source).exists():
        raise DataError(
            f"data.source = {data.source} is not there. Set it to a file of text or records or a "
            "folder of them (--set data.source=my_texts), or name token files made by "
            "`offloadtrain prepare my_texts data` (--set data.train=data/train.bin "
            "data.val=data/val.bin)"
        )
    folder = Path(data.cache) / (Path(data.source).stem or "source")
    made = prepare(
        data.source,
        folder,
        val_fraction=data.val_fraction,
        tokenizer=data.tokenizer or "bytes",
        form=data.form,
        field=data.field,
        chat_template=data.chat_template,
        progress=on_prepare,
    )
    if made.remark:
        _log.warning(made.remark)
    return TokenFile(made.train), TokenFile(made.val) if made.val else None


def masking_of(config: Config, tokens: TokenFile) -> Masking | None:
    """Return what hides tokens of a file in a job of an encoder; None: a decoder."""
    if config.hf is not None or config.model.is_causal:
        return None
    return Masking(config.model.mask_token, tokens.header.vocab_size)


def _check_vocabulary(config: Config, tokens: TokenFile) -> None:
    masks = config.hf is None and not config.model.is_causal
    if masks and tokens.header.vocab_size > config.model.mask_token:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {tokens.header.vocab_size}, and "
            f"model.vocab_size = {config.model.vocab_size} must be at least "
            f'{tokens.header.vocab_size + 1}: with model.objective = "mlm" its last row is the '
            "mask token"
        )
    if tokens.header.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {tokens.header.vocab_size}, and "
            f"model.vocab_size = {config.model.vocab_size}; set it to at least that"
        )


def check_tokenizers(config: Config, train: TokenFile, val: TokenFile | None) -> None:
    """
    Raises:
        ConfigError: the files are known not to be of one tokenizer, or not of the job's; or the
            text generated after the last step could not be decoded.
    """
    identity = train.header.tokenizer_id
    if val is not None and val.header.tokenizer_id not in ("", identity):
        raise ConfigError(
            f"{val.path} is of another tokenizer ({val.header.tokenizer}) than {train.path} "
            f"({train.header.tokenizer}): prepare both with one"
        )
    wanted = config.data.tokenizer
    if wanted and identity not in ("", tokenizer(wanted).identity):
        raise ConfigError(
            f"data.tokenizer = {wanted}, but {train.path} was prepared with another one "
            f"({train.header.tokenizer}): prepare it again, or leave data.tokenizer out"
        )
    if config.train.sample_tokens:
        _check_decodes(config.train.sample_tokens, train)


def _check_decodes(count: int, tokens: TokenFile) -> None:
    try:
        identity = tokenizer(tokens.header.tokenizer).identity
        if tokens.header.tokenizer_id not in ("", identity):
            raise DataError(f"the tokenizer {tokens.header.tokenizer} is another one by now")
    except DataError as error:
        raise ConfigError(
            f"train.sample_tokens = {count}, but the text cannot be decoded: {tokens.path}: "
            f"{error}; set train.sample_tokens = 0"
        ) from None
