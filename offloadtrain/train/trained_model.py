"""Loads a trained model from a run, a checkpoint or a folder of transformers, without an engine.

`open_saved` opens a checkpoint, and `open_model` any of the three. Models are exported to
transformers, sampled from, and evaluated.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError, require_path
from offloadtrain.config.hf_model import HfModel
from offloadtrain.config.job import Config
from offloadtrain.config.sections import IGNORED, Packing
from offloadtrain.data import tokenizer as tokenizers
from offloadtrain.data.batches import Batch, Batches
from offloadtrain.data.chat import ChatError, ChatTemplate, chat_template
from offloadtrain.data.tokenizer import pretrained, tokenizer
from offloadtrain.data.tokens import DataError, Progress, TokenFile, verify
from offloadtrain.integrations import causal_lm, hf_job
from offloadtrain.integrations.adapters import PREFIX, base_model, write_model
from offloadtrain.integrations.causal_lm import CausalLm, transformers_package
from offloadtrain.integrations.export import new_folder, write_tokenizer
from offloadtrain.integrations.own_model import empty_model as empty_own_model
from offloadtrain.integrations.own_model import renamed, tokenizer_files
from offloadtrain.model.language_model import LanguageModel, OwnModel, Sampling
from offloadtrain.model.transformer import Transformer
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.runtime.dtypes import PRECISIONS
from offloadtrain.train.build import masking_of
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.manifest import MANIFEST, CheckpointError
from offloadtrain.train.checkpoint.restore import saved_weights
from offloadtrain.train.losses import loss_of, to_device
from offloadtrain.train.saved_state import require_run_state

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A verified checkpoint and its job.

    Attributes:
        tokenizer: name of the tokenizer of its tokens, as `data.tokenizer` takes it.
    """

    checkpoint: Checkpoint
    job: Config
    tokenizer: str

    @property
    def precision(self) -> str:
        """Precision of the working weights in training: "bf16", "fp16" or "fp32"."""
        return str(self.checkpoint.state["precision"])

    def weights(
        self, *, working: bool = False, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `saved_weights`."""
        rule = update_rule(self.job.optim)
        return saved_weights(self.checkpoint, rule, working=working, wanted=wanted)

    def hf_config(self) -> Any:
        """Return the configuration of its transformers model, as trained."""
        assert self.job.hf is not None
        config = hf_job.config_of(self.checkpoint.state["hf_config"])
        config.name_or_path = self.job.hf.hf
        return config


def is_run(path: Path) -> bool:
    """Return True if `open_saved` accepts this folder: a run, or one of its checkpoints."""
    return (path / MANIFEST).is_file() or (path / "checkpoints").is_dir()


def open_saved(path: Path) -> SavedRun:
    """Open a checkpoint, or the newest valid one of a run folder, and verify its files.

    Raises:
        ConfigError: there is no run, or it has no checkpoint.
        CheckpointError: no checkpoint is valid.
    """
    require_path(path)
    if (path / MANIFEST).is_file():
        verified = checkpoint.verify(path)
        require_run_state(verified)
        return _of(verified)
    if not is_run(path):
        raise ConfigError(
            f"{path} is neither a run folder (it has no folder checkpoints) nor a checkpoint (it "
            f"has no {MANIFEST})"
        )
    damaged: list[str] = []
    newest = checkpoint.newest_good(
        path / "checkpoints",
        lambda at, why: damaged.append(f"{at.name}: {why}"),
        accept=require_run_state,
    )
    if newest is None and not damaged:
        raise ConfigError(f"{path} has no checkpoint yet")
    if newest is None:
        raise CheckpointError(f"{path} has no valid checkpoint. " + "; ".join(damaged))
    for line in damaged:
        _log.warning("%s is damaged and was passed over: %s", path, line)
    return _of(newest)


def _of(opened: Checkpoint) -> SavedRun:
    state, origin = opened.state, str(opened.path)
    job = jobs.of_tables(state["config"], origin, state["hf_config"])
    return SavedRun(opened, job, state["tokenizer_name"])


def export(saved: SavedRun, folder: Path, *, dtype: str | None = None, merge: bool = False) -> str:
    """Write a folder for `AutoModelForCausalLM.from_pretrained` from master weights; return the
    name of the model's class. Uses host memory for one shard; writes the complete folder or
    nothing.

    Args:
        folder: new or empty.
        dtype: dtype of the weights: "bf16", "fp16" or "fp32"; default "bf16", for adapters "fp32".
        merge: write the base model with its adapters merged in; False: write only the adapters,
            for `PeftModel.from_pretrained`.

    Raises:
        NoClassError: no class of transformers has the model's shape.
        ConfigError: there are no adapters to merge.
        FileExistsError: `folder` is not empty.
    """
    transformers_package("export")
    hf = saved.job.hf
    adapters = hf is not None and hf.lora is not None
    if merge and not adapters:
        raise ConfigError("--merge: the model was trained without adapters (model.lora)")
    only_adapters = adapters and not merge
    as_dtype = PRECISIONS[dtype or ("fp32" if only_adapters else "bf16")]
    model = _empty_model(saved)
    if hf is None:
        weights, buffers = renamed(saved.job.model, saved.weights()), {}
    else:
        params = {name for name, _ in model.named_parameters()}
        others = saved.weights(wanted=lambda name: name not in params)
        buffers = {name.removeprefix(PREFIX): buffer for name, buffer in others}
        weights = _widened(saved.weights(wanted=params.__contains__))
    with new_folder(folder) as temporary:
        write_model(model, temporary, weights, buffers, as_dtype, merge=merge)
        if hf is not None and not only_adapters:
            _copy_generation(hf, temporary)
        source, words = tokenizer_files(saved.tokenizer)
        if source is None and words is None and hf is not None and Path(hf.hf).is_dir():
            source = Path(hf.hf)
        write_tokenizer(source, temporary, words)
    return type(base_model(model) if merge else model).__name__


def _copy_generation(hf: HfModel, folder: Path) -> None:
    """Replace the generation configuration that was made from config.json by that of the
    model."""
    name = "generation_config.json"
    try:
        source = hf.folder / name
    except FileNotFoundError:
        _log.warning("model.hf = '%s' is not here: %s is made from config.json", hf.hf, name)
        return
    if source.exists():
        shutil.copyfile(source, folder / name)


def _widened(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield what `OffloadOptimizer.master_weights` yields: frozen weights are fp32, too."""
    for name, value in weights:
        yield name, value.float() if value.is_floating_point() else value


def _empty_model(saved: SavedRun) -> Any:
    """Return the transformers model, with its adapters, on the meta device."""
    if saved.job.hf is None:
        try:
            end = tokenizer(saved.tokenizer).end_of_document
        except DataError:  # the tokenizer's files are missing
            end = None
        return empty_own_model(saved.job.model, end_of_document=end)
    return hf_job.empty_model(saved.hf_config(), saved.job.hf.lora)


def language_model(saved: SavedRun, device: torch.device) -> LanguageModel:
    """Return the model with its working weights in the run's precision, in eval mode.

    Memory: the model in its working dtype, and one more weight.
    """
    dtype, hf = PRECISIONS[saved.precision], saved.job.hf
    module: Any
    if hf is None:
        with torch.device("meta"):
            module = Transformer(saved.job.model).to(dtype)
        module = module.to_empty(device=device)
        module.tie()  # `to_empty` gave a tied head its own memory
        module.varlen_attention = saved.job.data.varlen_attention
    else:
        module = hf_job.unset_model(saved.hf_config(), hf.lora, dtype).to(device)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, value in saved.weights(working=True):
            tensors[name].copy_(value)
    module.eval()
    return OwnModel(module) if hf is None else CausalLm.of(module)


SEQ_LEN_MOST = 1024
"""Tokens per sequence when a folder is evaluated, which does not record the length it was trained
with."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Attributes:
    path: path that was opened.
    saved: the run or checkpoint; None for a folder of transformers.
    """

    path: Path
    model: LanguageModel
    saved: SavedRun | None
    device: torch.device

    @property
    def seq_len(self) -> int:
        """Tokens per sequence: as in training, or at most SEQ_LEN_MOST for a folder."""
        if self.saved is not None:
            return self.saved.job.data.seq_len
        return min(self.model.max_seq_len, SEQ_LEN_MOST)


@dataclass(frozen=True, slots=True)
class Words:
    """Converts text to the tokens of a model, and back.

    Attributes:
        chat: returns the model's chat template; raises DataError if there is none.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_of_text: int | None
    chat: Callable[[], ChatTemplate]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Attributes:
    loss: mean loss over `tokens` targets, in nats.
    left_out: targets at the end of the file that do not fill a sequence.
    """

    loss: float
    tokens: int
    left_out: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


def open_model(path: Path, device: torch.device) -> TrainedModel:
    """Load the weights of a run's newest checkpoint, of a checkpoint, or of a transformers folder.

    Raises:
        ConfigError: the path is none of these.
    """
    require_path(path)
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
            f"{path} is neither a run folder, nor a checkpoint, nor a folder of transformers (it "
            "has no config.json)"
        )
    return TrainedModel(path, causal_lm.load(path, device), None, device)


def words_of(trained: TrainedModel) -> Words:
    """Return the tokenizer of the model's training tokens.

    Raises:
        DataError: it cannot be loaded, or transformers is not installed.
    """
    if (saved := trained.saved) is not None:
        tokenizer = tokenizers.tokenizer(saved.tokenizer)
        return Words(
            lambda text: [*tokenizer.begin, *tokenizer.encode_batch([text])[0].tolist()],
            tokenizer.decode,
            tokenizer.end_of_document,
            lambda: chat_template(tokenizer, saved.job.data.chat_template),
        )
    other = pretrained(str(trained.path))
    return Words(
        lambda text: list(other(text)["input_ids"]),
        lambda tokens: str(other.decode(tokens, skip_special_tokens=True)),
        other.eos_token_id,
        lambda: chat_template(tokenizers.tokenizer(str(trained.path))),
    )


def generate(
    trained: TrainedModel, prompt: str, num_tokens: int, sampling: Sampling, *, chat: bool = False
) -> str:
    """Return the prompt's continuation, up to the end of its text.

    Args:
        chat: the prompt is a user's first message; return the assistant's answer.

    Raises:
        ConfigError: the prompt is empty and the tokenizer has no start token, or the chat
            template refuses the message.
        DataError: the tokenizer has no chat template, or transformers is not installed.
    """
    words = words_of(trained)
    try:
        tokens = words.chat().encode_question(prompt) if chat else words.encode(prompt)
    except ChatError as error:
        raise ConfigError(f"--chat: {error}") from error
    if not tokens and words.end_of_text is not None:
        tokens = [words.end_of_text]
    if not tokens:
        raise ConfigError("--prompt is empty, and the tokenizer has no token to begin with")
    prompt_BT = torch.tensor([tokens], device=trained.device)
    generated_BT = trained.model.generate(prompt_BT, num_tokens, sampling)
    new = generated_BT[0, len(tokens) :].tolist()
    if words.end_of_text in new:
        new = new[: new.index(words.end_of_text)]
    return words.decode(new)


@torch.no_grad()
def evaluate(
    trained: TrainedModel,
    data: Path,
    *,
    seq_len: int,
    packing: Packing | None = None,
    batch: int,
    most_tokens: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Return the mean loss over the counted tokens of all complete sequences of a token file.

    Args:
        packing: how documents fill sequences; None: as in the run's training. For a folder, which
            does not record it, conversations are padded.
        most_tokens: stop after this many tokens, which are spread evenly over the file; 0: all.
        progress: called with (bytes done, total bytes).

    Raises:
        ConfigError: the file's vocabulary or `seq_len` exceeds the model's, or tokenizers differ.
    """
    tokens, model = TokenFile(data), trained.model
    _check(trained, tokens, seq_len)
    verify(tokens)
    unknown: Packing = "padded" if tokens.header.masked else "stream"
    packing = packing or (trained.saved.job.data.packing if trained.saved else unknown)
    batches = Batches(
        tokens,
        batch=batch,
        seq_len=seq_len,
        packing=packing,
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
    complete = wanted == batches.windows and packing == "stream"
    left_out = len(tokens) - 1 - wanted * seq_len if complete else 0
    return Evaluation(total / max(1, counted), counted, left_out)


def _check(trained: TrainedModel, tokens: TokenFile, seq_len: int) -> None:
    model, header = trained.model, tokens.header
    if header.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{tokens.path} has tokens of a vocabulary of {header.vocab_size}, and {trained.path} "
            f"has one of {model.vocab_size}: prepare the text with the model's tokenizer"
        )
    trained_on = ""
    with suppress(DataError):  # the folder has no tokenizer, or one that cannot be read here
        trained_on = (
            tokenizers.tokenizer(str(trained.path)).identity
            if trained.saved is None
            else trained.saved.checkpoint.state["tokenizer"]
        )
    if trained_on and header.tokenizer_id not in ("", trained_on):
        raise ConfigError(
            f"{tokens.path} was prepared with another tokenizer ({header.tokenizer}) than the one "
            f"that {trained.path} was trained with: prepare the text with the model's tokenizer"
        )
    if seq_len > model.max_seq_len:
        raise ConfigError(
            f"--seq-len {seq_len} is beyond the model's longest sequence, {model.max_seq_len}"
        )
