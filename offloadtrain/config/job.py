"""A job: one TOML file, read into frozen dataclasses, with every rule checked once.

Standard library only. `load` is the entry point. Its result satisfies every rule of this folder, so
later code does not check again. `dump` writes the resolved job, and loading it gives an equal job.

[Note: Overrides]
An override that shortens a job or changes its data states an intent. Keys of the file that were
meant for the long run or the other data would only make it fail. Therefore `drop_overruled_keys`
replaces keys of the file that contradict an override, and reports each one. Overridden keys are
never replaced, and contradictions within the file are refused as usual.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from offloadtrain.config import command_hooks, ranks_options, toml
from offloadtrain.config.errors import ConfigError, broken
from offloadtrain.config.hf_model import HF_KEYS, HfModel, read_hf, with_config_json
from offloadtrain.config.model_shape import (
    SIZES,
    ModelShape,
    PartOfShape,
    num_active_params,
    num_params,
)
from offloadtrain.config.offload import OPTIONS, OffloadConfig
from offloadtrain.config.option import Rule, out_of_range, ranged
from offloadtrain.config.ranks_options import RanksConfig, Stage
from offloadtrain.config.sections import (
    PATH,
    DataConfig,
    DeviceConfig,
    LogConfig,
    OptimConfig,
    TrainConfig,
    data_contradictions,
    optim_contradictions,
    train_contradictions,
)
from offloadtrain.config.toml import Job, shown
from offloadtrain.config.units import parse_bytes

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DeviceConfig",
    "LogConfig",
    "OptimConfig",
    "TrainConfig",
    "as_tables",
    "dump",
    "load",
    "loads",
    "of_tables",
]

_SOME_SIZES = '"demo", "gpt2-124m", "llama-7b", ...'

_NAME: Rule = (
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}").fullmatch,
    "1 to 64 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit",
)

Say: TypeAlias = Callable[[str], object]

DATA, DEVICE, LOG = DataConfig(), DeviceConfig(), LogConfig()
OPTIM, RANKS = OptimConfig(), RanksConfig()
OFFLOAD = OffloadConfig(precision="auto", clip_norm=1.0)
"""The defaults of [offload] in a job."""

_OF_TRAIN = ("grad_accum_steps", "seed", "checkpoint_spill")
"""Options of `offload` that a job sets in [train]."""

_NO_KEYS = (*_OF_TRAIN, "activation_policy")  # a function

OFFLOAD_KEYS = {name: option for name, option in OPTIONS.items() if name not in _NO_KEYS}
"""Maps a key of [offload] to its option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole job.

    Attributes:
        name: part of the name of the run folder.
        model: shape of the project's transformer; for a model of transformers, the shape with which
            a plan estimates.
        hf: the model of transformers to train instead.
        runs_dir: parent of the run folder.
        offload: options of `offload`. Its `grad_accum_steps`, `seed` and `checkpoint_spill` always
            come from `train`, which describes batches and the run.
        stage: the stage of a pipeline that `model` is; None: the whole model. Not a key of a job.
    """

    name: str = field(metadata={"rule": _NAME})
    model: ModelShape
    hf: HfModel | None = None
    data: DataConfig = DATA
    optim: OptimConfig = OPTIM
    offload: OffloadConfig = OFFLOAD
    device: DeviceConfig = DEVICE
    log: LogConfig = LOG
    ranks: RanksConfig = RANKS
    train: TrainConfig
    runs_dir: str = ranged("runs", PATH)
    stage: Stage | None = None

    def __post_init__(self) -> None:
        of_train = {key: getattr(self.train, key) for key in _OF_TRAIN}
        # Host memory for saves that overlap the next steps; needs saves and state on the host.
        if not self.train.checkpoint_every or self.offload.state.tier in ("device", "disk"):
            of_train["checkpoint_spill"] = 0
        object.__setattr__(self, "offload", self.offload.replace(**of_train))

    @property
    def rank_shape(self) -> ModelShape:
        """The shape of each layer on one rank: with tensor or expert parallel, a part of the
        layer."""
        return PartOfShape.of(self.model, self.ranks.tensor, self.ranks.expert)

    @property
    def num_params(self) -> int:
        """Exact number of parameters; for a model of transformers, available after its parts are
        known."""
        return num_params(self.model) if self.hf is None else _count(self.hf, trained=False)

    @property
    def num_active(self) -> int | None:
        """Number of parameters that compute one token; None for a model of transformers, whose
        experts are not known separately."""
        return num_active_params(self.model) if self.hf is None else None

    @property
    def num_trained(self) -> int:
        """Number of trained parameters."""
        return num_params(self.model) if self.hf is None else _count(self.hf, trained=True)

    @property
    def makes_logits(self) -> bool:
        """True if training computes the logits of all tokens at once: neither `train.chunked_loss`
        nor Liger computes its loss."""
        return not (self.train.chunked_loss or (self.hf is not None and self.hf.use_liger_kernel))

    @property
    def batch_tokens(self) -> int:
        """Number of tokens of one optimizer step, on all ranks."""
        return self.train.micro_batch * self.data.seq_len * self.train.grad_accum_steps


def _count(hf: HfModel, *, trained: bool) -> int:
    assert hf.parts is not None, "integrations.hf_job.described comes first"
    params = (param for part in hf.parts for param in part.params)
    return sum(prod(param.sizes) for param in params if param.trained or not trained)


_KINDS = toml.field_kinds(Config)
_SECTIONS: dict[str, type] = {
    key: kind for key, kind in _KINDS.items() if isinstance(kind, type) and is_dataclass(kind)
}
"""Maps a table of a job to its dataclass."""
_PLAIN = {key: kind for key, kind in _KINDS.items() if kind is str}
_SIZES = {
    "offload": tuple(key for key, option in OFFLOAD_KEYS.items() if option.size),
    "train": ("checkpoint_spill",),
}
"""Maps a section to its keys for sizes, in bytes or as text such as "10 GiB"."""


def load(path: str | Path, overrides: Sequence[str] = (), say: Say = warnings.warn) -> Config:
    """Read a job file; `overrides` are `section.key=value` texts that replace its values.

    Args:
        say: called with a line for each key of the file that an override of another key replaces.

    Raises:
        ConfigError: if the file cannot be read or breaks a rule; the message lists all broken
            rules. Also if it has commands and is not trusted, see `config.command_hooks`.
    """
    text = toml.read(path)
    config = loads(text, str(path), overrides, say, folder=Path(path).parent)
    overridden = {override.partition("=")[0].strip() for override in overrides}
    named = [key for key in command_hooks.KEYS if attrgetter(key)(config) and key not in overridden]
    command_hooks.check_origin(path, text, named)
    return config


def loads(
    text: str,
    origin: str = "job",
    overrides: Sequence[str] = (),
    say: Say = warnings.warn,
    *,
    hf_config: toml.Table | None = None,
    folder: Path | None = None,
) -> Config:
    """Read a job from TOML text; `origin` names the text in errors. Raises the errors of `load`.

    Args:
        folder: the folder of a machine file that the text names with a relative path.
        hf_config: config.json of `model.hf`; if set, the folder of the model is not read.
    """
    job = toml.parse(text, origin, _all_keys(), overrides)
    machine = _of_the_file(job, "device.machine")
    if folder is not None and isinstance(machine, str) and machine.endswith(".toml"):
        job.tables["device"]["machine"] = os.path.abspath(folder / machine)
    overruled = list(drop_overruled_keys(job))
    values = toml.read_table(job, _PLAIN, job.tables, others=[*_SECTIONS])
    missing = toml.missing_fields(Config, {*job.tables, *_SECTIONS})
    job.problems += [f"{key} is missing" for key in missing]
    sections = {name: _read_section(job, name) for name in _SECTIONS}
    job.raise_problems()
    if isinstance(sections["model"], HfModel):
        values["hf"], sections["model"] = with_config_json(job, sections["model"], hf_config)
        job.raise_problems()
    config = Config(**values, **sections)
    job.problems += _problems(config)
    job.raise_problems()
    config = _with_accumulation(config, job)
    job.raise_problems()
    for line in overruled:
        say(line)
    return config


def dump(config: Config) -> str:
    """Return the job as TOML that loads back to an equal Config, without derived keys."""
    tables = as_tables(config)
    if config.train.global_batch_tokens:
        del tables["train"]["grad_accum_steps"]
    return _emit(tables)


def of_tables(tables: toml.Table, origin: str, hf_config: toml.Table | None = None) -> Config:
    """Return the job of tables that `as_tables` returned, also after a round trip through JSON.
    Raises the errors of `load`."""
    return loads(_emit(tables), origin, hf_config=hf_config)


def _emit(tables: toml.Table) -> str:
    offload = dict(tables["offload"])
    if offload["clip_norm"] is None:  # an omitted key would be the default
        offload["clip_norm"] = 0
    set_options = {key: value for key, value in offload.items() if value is not None}
    return toml.emit(tables | {"offload": set_options})


def as_tables(config: Config) -> toml.Table:
    """Return every key of the job with its value, section by section."""
    tables = asdict(config)
    del tables["stage"]
    if (hf := tables.pop("hf")) is not None:
        hf_table = {key: hf[key] for key in HF_KEYS if hf[key] is not None}
        tables["model"] = hf_table
    tables["offload"] = {key: option.of(config.offload) for key, option in OFFLOAD_KEYS.items()}
    return tables


def with_defaults(tables: toml.Table) -> toml.Table:
    """Return tables that an earlier version of `as_tables` wrote, with the defaults of new keys. A
    section of a damaged record that is not a table stays unchanged."""
    filled = dict(tables)
    for name, kind in _SECTIONS.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            continue
        kind = HfModel if "hf" in table else kind
        defaults = {
            item.name: item.default for item in fields(kind) if item.default not in (MISSING, None)
        }
        if name == "offload":
            defaults = {key: option.of(OFFLOAD) for key, option in OFFLOAD_KEYS.items()}
        filled[name] = defaults | table
    return filled


def _all_keys() -> list[str]:
    nested = (f"{name}.{key}" for name in _SECTIONS for key in _kinds(name))
    return [*_PLAIN, "model.size", *(f"model.{key}" for key in HF_KEYS), *nested]


def _kinds(section: str) -> dict[str, Any]:
    """Return the type of each key of a section."""
    if section == "offload":
        return {key: option.kind for key, option in OFFLOAD_KEYS.items()}
    return toml.field_kinds(_SECTIONS[section])


def _read_section(job: toml.Job, name: str) -> Any:
    """Return the section's dataclass, or None if the job has a problem."""
    if (table := toml.section(job, name)) is None:
        return None
    if name == "model" and "hf" in table:
        return read_hf(job, table)
    cls, kinds = _SECTIONS[name], _kinds(name)
    values = _named_size(job, table) if name == "model" else {}
    toml.report_unknown(job, table, [*(("size",) if name == "model" else ()), *kinds], name)
    _read_sizes(job, table, name)
    values |= toml.read_fields(job, kinds, table, name)
    for key in toml.missing_fields(cls, {*values, *table}):
        hint = f" (or name a whole shape: model.size = {_SOME_SIZES})" if name == "model" else ""
        job.problems.append(f"{name}.{key} is missing{hint}")
    if job.problems:
        return None
    if name == "offload":
        zeros = [key for key, value in values.items() if value == 0]
        none = {key: None for key in zeros if OFFLOAD_KEYS[key].none_is_zero}
        return OFFLOAD.replace(**values | none)
    return cls(**values)


def _read_sizes(job: toml.Job, table: toml.Table, section: str) -> None:
    """Turn sizes such as "10 GiB" of a section into bytes."""
    for key in (key for key in _SIZES.get(section, ()) if isinstance(table.get(key), str)):
        try:
            table[key] = parse_bytes(table[key])
        except ValueError:
            text = toml.shown(table.pop(key))
            job.problems.append(f'{section}.{key} = {text} must be a size such as "10 GiB"')


def _named_size(job: toml.Job, table: toml.Table) -> toml.Table:
    """Return every field of the shape with the name `model.size`, or nothing if the key is not
    set."""
    size = table.get("size")
    if isinstance(size, str) and size in SIZES:
        return asdict(SIZES[size])
    if "size" in table:
        hint = toml.nearest(size, SIZES) if isinstance(size, str) else ""
        known = f"model.size = {toml.shown(size)} must be one of {', '.join(SIZES)}{hint}"
        job.problems.append(known)
        return dict.fromkeys(toml.field_kinds(ModelShape))
    return {}


def _with_accumulation(config: Config, job: toml.Job) -> Config:
    """Derive `grad_accum_steps` from `global_batch_tokens`, if that is set."""
    train, per_micro = config.train, config.train.micro_batch * config.data.seq_len
    if not (wanted := train.global_batch_tokens):
        return config
    count, rest = divmod(wanted, per_micro)
    if rest or not count:
        job.problems.append(
            f"train.global_batch_tokens = {wanted} must be a multiple of train.micro_batch * "
            f"data.seq_len = {train.micro_batch} * {config.data.seq_len} = {per_micro}"
        )
    elif "grad_accum_steps" in job.tables["train"] and train.grad_accum_steps != count:
        job.problems.append(
            f"train.grad_accum_steps = {train.grad_accum_steps} contradicts "
            f"train.global_batch_tokens = {wanted}, which makes it {count}; leave one of them out"
        )
    return replace(config, train=replace(train, grad_accum_steps=count))


def _problems(config: Config) -> Iterator[str]:
    """Yield a sentence for each broken rule; each sentence begins with the dotted key."""
    yield from out_of_range(config)
    for section in _SECTIONS:
        yield from out_of_range(getattr(config, section), f"{section}.")
    for sentence in config.model.problems() if config.hf is None else ():
        yield f"model.{sentence}"
    for sentence in config.offload.problems():
        yield f"{'train' if sentence.startswith('grad_accum_steps ') else 'offload'}.{sentence}"
    data, optim, train = config.data, config.optim, config.train
    model, offload = config.model, config.offload
    encodes = config.hf is None and not model.is_causal
    divided = max(config.ranks.pipeline, config.ranks.tensor, config.ranks.expert) > 1
    yield from data_contradictions(data, evaluates=train.eval_every)
    yield from optim_contradictions(optim, offload)
    yield from problems_of_ranks(config)
    yield from train_contradictions(train, offload)
    yield from _problems_of_kernels(config, divided=divided)
    yield from broken(
        (
            offload.activations.mode == "offload_saved" and divided,
            "offload.activation = 'offload_saved' with stages or parts (ranks.pipeline, "
            "ranks.tensor, ranks.expert) is for a loop of your own: the plan of a job traces whole "
            "models. Set 'offload' or 'recompute', or give each rank the whole model",
        ),
        (
            config.hf is None and offload.weights.keep_fp32 and offload.precision != "fp32",
            f"offload.keep_fp32 = {shown([*offload.weights.keep_fp32])} without model.hf: the "
            "shipped transformer computes in one dtype. Leave it out, or set "
            "offload.precision = 'fp32'",
        ),
        (
            0 < train.steps < optim.warmup_steps,
            f"optim.warmup_steps = {optim.warmup_steps} must be at most train.steps = "
            f"{train.steps}",
        ),
        (
            encodes and data.packing == "padded",
            'data.packing = "padded" does not go with model.objective = "mlm", whose attention to '
            'both sides would see what pads; use "isolated", which packs documents without padding',
        ),
        (
            encodes and train.sample_tokens,
            f"train.sample_tokens = {train.sample_tokens} must be 0 with model.objective = "
            '"mlm": an encoder continues no text',
        ),
        (
            data.seq_len > model.max_seq_len,
            f"data.seq_len = {data.seq_len} must be at most model.max_seq_len = "
            f"{model.max_seq_len}",
        ),
    )


def _problems_of_kernels(config: Config, *, divided: bool) -> list[str]:
    """Return a sentence for each rule of Liger's kernels and of variable-length attention."""
    data, train, offload, model = config.data, config.train, config.offload, config.model
    return broken(
        (
            train.chunked_loss and config.hf is not None and config.hf.use_liger_kernel,
            "train.chunked_loss = true and model.use_liger_kernel = true both replace the model's "
            "loss; leave one of them out",
        ),
        (
            divided and config.hf is not None and config.hf.use_liger_kernel,
            "model.use_liger_kernel = true with stages or parts (ranks.pipeline, ranks.tensor, "
            "ranks.expert): Liger's loss needs the whole model on each rank; leave it out",
        ),
        (
            data.varlen_attention and config.hf is None and model.dropout,
            f"data.varlen_attention = true needs model.dropout = 0.0, not {model.dropout}: its "
            "kernel drops nothing",
        ),
        (
            data.varlen_attention and (divided or offload.activations.mode == "offload_saved"),
            "data.varlen_attention = true does not go with ranks.pipeline, ranks.tensor or "
            "ranks.expert above 1, or with offload.activation = 'offload_saved', whose plan would "
            "need the lengths of documents",
        ),
    )


def problems_of_ranks(config: Config) -> Iterator[str]:
    """Yield a sentence for each rule of the table [ranks] that other keys break."""
    ranks, offload, rule = config.ranks, config.offload, config.optim.name
    yield from ranks_options.contradictions(
        *(ranks, config.model, offload),
        is_own=config.hf is None,
        samples=config.train.sample_tokens > 0,
        adapters=config.hf is not None and config.hf.lora is not None,
        rule=rule,
    )
    yield from ranks_options.interleaved_contradictions(ranks, offload)
    yield from ranks_options.unflushed_contradictions(
        ranks, offload, rule=rule, on_spike=config.train.on_spike
    )


WARMUP_SHARE = 10
"""Share of warm-up steps, as 1/n, in a run shorter than the file's warm-up."""

_Wins = Callable[[Any], bool]


# (overridden key, predicate of its value, key of the file that has no effect then)
_GIVES_WAY: list[tuple[str, _Wins, str]] = [
    ("data.source", bool, "data.train"),
    ("data.source", bool, "data.val"),
    ("data.train", bool, "data.source"),
    ("data.val_fraction", lambda share: share == 0, "train.eval_every"),
    ("train.global_batch_tokens", bool, "train.grad_accum_steps"),
    ("train.grad_accum_steps", bool, "train.global_batch_tokens"),
    ("train.sample_tokens", lambda count: count == 0, "train.sample_prompt"),
]

_GIVES_WAY += [
    (f"ranks.{axis}", lambda count: isinstance(count, int) and count > 1, f"train.{key}")
    for axis in ("pipeline", "tensor", "expert")
    for key in ("sample_tokens", "sample_prompt")
]

# Options that have an effect only with certain values of another option.
_GIVES_WAY += [
    (f"offload.{needs.option}", needs.rejects, f"offload.{option.name}")
    for option in OPTIONS.values()
    if (needs := option.needs) is not None
]


def drop_overruled_keys(job: Job) -> Iterator[str]:
    """Remove keys from the job's tables that overrides make meaningless; yield a line for each
    key."""
    for key, wins, other in _GIVES_WAY:
        value, left = _value(job, key), _of_the_file(job, other)
        section, name = other.split(".")
        # The default of an option contradicts no other key.
        is_default = section == "offload" and left == OPTIONS[name].default
        if key in job.overridden and wins(value) and left and not is_default:
            del job.tables[section][name]
            yield f"{other} = {shown(left)} of the job is overridden by {key} = {shown(value)}"
    # If an override shortens the run below its warm-up, the warm-up shrinks to a share of it.
    steps, warmup = _value(job, "train.steps"), _of_the_file(job, "optim.warmup_steps")
    if "train.steps" not in job.overridden or type(steps) is not int or type(warmup) is not int:
        return
    if 0 < steps < warmup:
        fitting = job.tables["optim"]["warmup_steps"] = steps // WARMUP_SHARE
        yield f"optim.warmup_steps {warmup} -> {fitting} (train.steps = {steps})"


def _of_the_file(job: Job, key: str) -> Any:
    """Return the key's value if the file sets it and no override does."""
    section = key.split(".")[0]
    return None if {key, section} & job.overridden else _value(job, key)


def _value(job: Job, key: str) -> Any:
    section, name = key.split(".")
    table = job.tables.get(section)
    return table.get(name) if isinstance(table, dict) else None
