"""The sections [data], [device], [log], [optim] and [train] of a job. `ranged` declares each key
with the range of its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from offloadtrain.config import command_hooks, toml
from offloadtrain.config.errors import ConfigError, broken
from offloadtrain.config.model_shape import MOST_SEQ_LEN
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.option import NOT_NEGATIVE, POSITIVE, SHARE, Rule, at_least, ranged
from offloadtrain.config.units import parse_bytes

Form = Literal["text", "chat", "completion"]
"""Form of a record, see `data/encode.py`."""

Packing = Literal["stream", "isolated", "padded"]
"""Packing of documents into sequences, see [Note: packing] in `data/batches.py`."""


IGNORED = -100
"""The target of a token that the loss does not count; torch's `ignore_index`."""


PATH: Rule = (lambda value: value and value.isprintable()), "a path: not empty, printable"
_PATH_OR_NONE: Rule = (lambda value: not value or value.isprintable()), "a printable path"
_COMMAND: Rule = (command_hooks.is_command, "a program and its arguments, printable; or empty")


def _is_size(text: str) -> bool:
    try:
        return not text or parse_bytes(text) > 0
    except ValueError:
        return False


_SIZE: Rule = (_is_size, 'a size such as "10 GiB", or empty for none')


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The source of the tokens.

    Attributes:
        source: input of `offloadtrain prepare`: a file or folder of text, JSONL, CSV or Parquet, a
            folder of `datasets`, "hf:NAME", or "python-stdlib"; prepared on first use.
        tokenizer: "bytes", a folder with a tokenizer of transformers, or a tokenizer.json; empty:
            the tokenizer of the weights in `model.hf`, else bytes. Must match the files of `train`.
        form: form of a record of `source`; "auto": detected from the first record.
        field: field of a record with the text.
        chat_template: Jinja file to use instead of the tokenizer's own template.
        train: a token file made by `offloadtrain prepare`; replaces `source`.
        val: held-out token file, used with `train`.
        cache: folder for the token files prepared from `source`.
        val_fraction: share of the documents of `source` that is held out.
        seq_len: tokens per sequence.
        packing: "stream": sequences are windows over all documents, and attention crosses the ends
            of documents; "isolated": the same, but positions and attention restart at each
            document; "padded": one document per sequence, cut or padded to `seq_len`.
        varlen_attention: with packing "isolated", compute attention only within documents, instead
            of attention of all pairs under a mask. Faster if documents are short; the results
            differ by rounding.
    """

    source: str = ranged("", _PATH_OR_NONE)
    tokenizer: str = ranged("", _PATH_OR_NONE)
    form: Literal["auto", "text", "chat", "completion"] = "auto"
    field: str = ranged(
        "text", ((lambda value: value and value.isprintable()), "a name: not empty, printable")
    )
    chat_template: str = ranged("", _PATH_OR_NONE)
    train: str = ranged("", _PATH_OR_NONE)
    val: str = ranged("", _PATH_OR_NONE)
    cache: str = ranged("data", PATH)
    val_fraction: float = ranged(0.05, ((lambda value: 0 <= value < 1), "from 0 to below 1"))
    seq_len: int = ranged(
        256, ((lambda value: 2 <= value <= MOST_SEQ_LEN), f"from 2 to {MOST_SEQ_LEN}")
    )
    packing: Packing = "stream"
    varlen_attention: bool = False


def data_contradictions(data: DataConfig, *, evaluates: int) -> list[str]:
    """Return a sentence for each contradiction; `evaluates`: value of `train.eval_every`."""
    of_sources = broken(
        (
            data.source and (data.train or data.val),
            f"data.source = {toml.shown(data.source)} and data.train or data.val are both set; "
            "leave one of them out",
        ),
        (
            data.val and not data.train,
            "data.train is missing: data.val is set, but is used only with data.train",
        ),
        (
            not data.source and not data.train,
            "data.source is missing: a file or folder of text or records, or python-stdlib; or set "
            "data.train to a token file made by `offloadtrain prepare`",
        ),
        (
            data.varlen_attention and data.packing != "isolated",
            'data.varlen_attention = true needs data.packing = "isolated"',
        ),
        (
            not data.source and data.chat_template,
            "data.chat_template is set, but is used only to prepare data.source",
        ),
    )
    return of_sources[:1] + broken(
        (
            evaluates and data.train and not data.val,
            f"data.val is missing: train.eval_every = {evaluates} needs it",
        ),
        (
            evaluates and data.source and not data.val_fraction,
            "data.val_fraction = 0.0 holds out nothing; train.eval_every must be 0 then",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device of forward and backward.

    Attributes:
        kind: "auto": a GPU if there is one.
        threads: number of torch's CPU threads; 0: torch's choice.
        process_memory_limit: limit on torch's GPU memory in this process, including activations
            (CUDA only), such as "10 GiB"; empty: none.
        placement: "as-set": use [offload]; "auto": the plan chooses the fastest `working` and
            `activation` that fit.
        machine: a machine file written by `offloadtrain doctor --save`; the plan uses its rates.
    """

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = ranged(0, ((lambda value: 0 <= value <= 4096), "0 (as torch chooses) to 4096"))
    process_memory_limit: str = ranged("", _SIZE)
    placement: Literal["as-set", "auto"] = "as-set"
    machine: str = ranged("", _PATH_OR_NONE)


Destination = Literal["csv", "jsonl", "tensorboard", "wandb"]

PACKAGES = ("tensorboard", "wandb")
"""Destinations that need a package; the package has the same name as the extra of offloadtrain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Copies of the scalars in a run's log; rank 0 writes them in the run folder.

    Attributes:
        to: "csv": metrics.csv; "jsonl": metrics.jsonl; "tensorboard": the folder tensorboard;
            "wandb": Weights & Biases, and the folder wandb.
        project: project of Weights & Biases; empty: the project in its own settings.
    """

    to: tuple[Destination, ...] = ()
    project: str = ""


def check_packages(log: LogConfig) -> None:
    """
    Raises:
        ConfigError: a package that `log.to` needs is not installed.
    """
    specs = {to: find_spec(to) for to in log.to if to in PACKAGES}
    # A folder with the same name in the working directory, for example W&B's folder, is not a
    # package.
    missing = sorted(to for to, spec in specs.items() if spec is None or spec.origin is None)
    if missing:
        named = ", ".join(f'"{name}"' for name in missing)
        raise ConfigError(
            f"log.to has {named}, which is not installed: "
            f"pip install 'offloadtrain[{','.join(missing)}]'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The update rule and its schedule.

    Attributes:
        name: name of the update rule.
        lr: highest learning rate; with muon, of its matrices.
        betas: for adamw, adam, lion and lamb; with muon, for its adamw.
        eps: for adamw, adam, adagrad and lamb, whose authors use 1e-6; with muon, for its adamw.
        momentum, dampening, nesterov: for sgd, which stores a buffer unless `momentum` is 0.
        lr_decay: for adagrad: step t uses lr / (1 + (t - 1) * lr_decay), on top of the schedule.
        max_norm: for lamb: upper bound of a tensor's norm in its trust ratio; 0: no bound.
        muon_momentum: for muon; always Nesterov's momentum.
        adjust_lr: for muon: "original": lr times sqrt(max(1, rows / columns)); "match_rms_adamw":
            lr times 0.2 * sqrt(max(rows, columns)).
        adamw_lr: with muon, highest rate of all parameters that are not matrices of a layer.
        weight_decay: decoupled, a share of `lr`; for sgd and adagrad an L2 term.
        decay: "matrices": weight decay only on parameters with at least two dimensions.
        schedule: course of the rate after the warm-up.
        warmup_steps: linear warm-up from 0, in steps. If an override of `train.steps` makes the run
            shorter than the file's warm-up, the warm-up is a tenth of the run.
        min_lr_ratio: rate at the end of the schedule, as a share of `lr`.
    """

    name: Literal["adamw", "adam", "lion", "sgd", "adagrad", "lamb", "muon"] = "adamw"
    lr: float = ranged(3e-4, POSITIVE)
    betas: tuple[float, float] = ranged(
        (0.9, 0.95),
        ((lambda value: all(0 <= beta < 1 for beta in value)), "each from 0 to below 1"),
    )
    eps: float = ranged(
        1e-8, ((lambda value: value >= 1.2e-38), "at least 1.2e-38, the smallest number of fp32")
    )
    momentum: float = ranged(0.9, NOT_NEGATIVE)
    dampening: float = ranged(0.0, ((lambda value: value <= 1), "at most 1"))
    nesterov: bool = False
    lr_decay: float = ranged(0.0, NOT_NEGATIVE)
    max_norm: float = ranged(0.0, NOT_NEGATIVE)
    muon_momentum: float = ranged(0.95, SHARE)
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    adamw_lr: float = ranged(3e-4, POSITIVE)
    weight_decay: float = ranged(0.1, NOT_NEGATIVE)
    decay: Literal["matrices", "all"] = "matrices"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = ranged(0, NOT_NEGATIVE)
    min_lr_ratio: float = ranged(0.1, SHARE)


_KEYS_OF_RULES = {
    "betas": ("adamw", "adam", "lion", "lamb", "muon"),
    "eps": ("adamw", "adam", "adagrad", "lamb", "muon"),
    "momentum": ("sgd",),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
    "lr_decay": ("adagrad",),
    "max_norm": ("lamb",),
    "muon_momentum": ("muon",),
    "adjust_lr": ("muon",),
    "adamw_lr": ("muon",),
}
"""Keys of [optim] that only some rules read."""


def optim_contradictions(optim: OptimConfig, offload: OffloadConfig) -> Iterator[str]:
    """Yield a sentence for each broken rule."""
    name = toml.shown(optim.name)
    for key, rules in _KEYS_OF_RULES.items():
        value = getattr(optim, key)
        if optim.name not in rules and value != getattr(OptimConfig(), key):
            yield (
                f"optim.{key} = {toml.shown(value)} is not used by optim.name = {name}, only by "
                f"{', '.join(rules)}; leave it out"
            )
    state, is_muon = offload.state, optim.name == "muon"
    yield from broken(
        (
            optim.nesterov and not (optim.momentum and optim.dampening == 0.0),
            "optim.nesterov = true needs optim.momentum above 0 and optim.dampening = 0.0",
        ),
        (
            optim.name == "adagrad" and state.format == "int8",
            'offload.state = "int8" cannot keep the sum of optim.name = "adagrad"; use "fp32" or '
            '"split16"',
        ),
        (
            is_muon and state.format == "int8",
            'offload.state = "int8" rounds masters and moments together, which optim.name = "muon" '
            'writes at two times; use "fp32" or "split16"',
        ),
        (
            is_muon and state.format == "split16" and (state.device_share or state.tier == "auto"),
            'offload.state = "split16" of optim.name = "muon" is for state on the host: the '
            'device\'s kernels for matrices are of fp32 state; use "fp32", or offload.state_on = '
            '"host"',
        ),
        (
            offload.skip_unused and optim.name in ("muon", "lamb"),
            f"offload.skip_unused = {toml.shown([*offload.skip_unused])} and optim.name = {name}, "
            'which updates whole tensors: leave it out, or set optim.name = "adamw"',
        ),
        (
            is_muon and offload.update == "speculative",
            'offload.update = "speculative" needs the gradient of a wrong guess again, over which '
            'optim.name = "muon" orthogonalizes; use "exact" or "delayed"',
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The training loop. Zero in an `…_every` key means never.

    Attributes:
        steps: optimizer steps of the whole run.
        micro_batch: sequences per forward.
        grad_accum_steps: microbatches per step.
        global_batch_tokens: tokens per step; if set, determines `grad_accum_steps`.
        chunked_loss: compute the logits in parts of the vocabulary. This takes the memory of a few
            parts instead of two copies of all logits; the head's product is computed twice.
        label_smoothing, z_loss: weights of two more terms of the training loss, which validation
            omits; need `chunked_loss`.
        eval_every: steps between evaluations on the held-out tokens.
        eval_batches: microbatches of one evaluation.
        checkpoint_every: steps between checkpoints; the end and a stop also make a checkpoint.
        keep_last: number of the newest checkpoints to keep.
        keep_every: also keep the checkpoints of steps divisible by this number; 0: none.
        checkpoint_spill: bytes of each rank's host memory for a copy of the state that a save
            writes last, so that the next update waits less; 0: none. Has an effect only with
            `checkpoint_every` and state on the host.
        on_spike: action for the step of a loss spike. "report": raise an alert and take the step;
            "skip": skip the step; "rollback": skip the step, return to the last checkpoint and
            continue with the data after the spike.
        spike_score: a loss is a spike if it is this many robust standard deviations above recent
            losses.
        max_rollbacks: largest number of rollbacks in a run; the next spike ends the run.
        log_every_s: seconds between plain console lines.
        hang_timeout_s: smallest time without progress, in seconds, that ends the run as hung; 0:
            never. The limit rises to four times the longest silence from which the same phase
            recovered.
        max_s: longest time of steps in one start, in seconds. Then the run ends as after its last
            step; a resume continues it. 0: no limit.
        sample_tokens: length of the text generated at the end; 0: none.
        sample_prompt: start of the generated text; empty: start of a document.
        seed: seed of the initial weights, of dropout and of the order of the data.
        deterministic: use only torch's deterministic kernels, which repeat a GPU's bits.
        on_alert, on_end: a command and its arguments. Rank 0 runs it without a shell when an alert
            is raised, or when this start ends; OFFLOADTRAIN_… variables describe the event.
    """

    steps: int = field(metadata={"rule": at_least(1)})
    micro_batch: int = ranged(8, at_least(1))
    grad_accum_steps: int = 1
    global_batch_tokens: int = ranged(0, NOT_NEGATIVE)
    chunked_loss: bool = False
    label_smoothing: float = ranged(0.0, ((lambda value: 0 <= value < 1), "from 0 to below 1"))
    z_loss: float = ranged(0.0, NOT_NEGATIVE)
    eval_every: int = ranged(0, ((lambda value: value >= 0), "0 (never) or more"))
    eval_batches: int = ranged(8, at_least(1))
    checkpoint_every: int = ranged(0, ((lambda value: value >= 0), "0 (never) or more"))
    keep_last: int = ranged(
        2, ((lambda value: value >= 2), "at least 2 (the newest may be damaged)")
    )
    keep_every: int = ranged(0, ((lambda value: value >= 0), "0 (none) or more"))
    checkpoint_spill: int = ranged(64 << 20, NOT_NEGATIVE)
    on_spike: Literal["report", "skip", "rollback"] = "report"
    spike_score: float = ranged(8.0, POSITIVE)
    max_rollbacks: int = ranged(3, at_least(1))
    log_every_s: float = ranged(5.0, POSITIVE)
    hang_timeout_s: float = ranged(60.0, NOT_NEGATIVE)
    max_s: float = ranged(0.0, NOT_NEGATIVE)
    sample_tokens: int = ranged(0, NOT_NEGATIVE)
    sample_prompt: str = ""
    on_alert: tuple[str, ...] = ranged((), _COMMAND)
    on_end: tuple[str, ...] = ranged((), _COMMAND)
    seed: int = ranged(1234, NOT_NEGATIVE)
    deterministic: bool = False


def train_contradictions(train: TrainConfig, offload: OffloadConfig) -> list[str]:
    """Return a sentence for each broken rule."""
    return broken(
        *(
            (
                getattr(train, key) and not train.chunked_loss,
                f"train.{key} = {getattr(train, key)} needs train.chunked_loss = true",
            )
            for key in ("label_smoothing", "z_loss")
        ),
        (
            train.on_spike != "report" and offload.updates_early,
            f'train.on_spike = "{train.on_spike}" decides before the update, but with '
            "offload.skip_nonfinite = false and no offload.clip_norm Adam runs inside backward: "
            "set one of them",
        ),
        (
            train.on_spike == "rollback" and not train.checkpoint_every,
            'train.on_spike = "rollback" goes back to checkpoints: set train.checkpoint_every',
        ),
        (
            train.sample_prompt and not train.sample_tokens,
            "train.sample_prompt is set though train.sample_tokens = 0 samples nothing",
        ),
    )
