"""Translates a DeepSpeed configuration to a job, or to the options of `hf.OffloadMixin`.

Standard library only. Every key of the file is mapped, or listed with the reason why not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from offloadtrain.config import toml
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import OFFLOAD
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.sections import OptimConfig
from offloadtrain.config.toml import nearest

Tables = dict[str, dict[str, Any]]

ARGUMENTS: dict[str, tuple[str, str]] = {
    "learning_rate": ("optim", "lr"),
    "adam_epsilon": ("optim", "eps"),
    "weight_decay": ("optim", "weight_decay"),
    "warmup_steps": ("optim", "warmup_steps"),
    "max_grad_norm": ("offload", "clip_norm"),
    "per_device_train_batch_size": ("train", "micro_batch"),
    "gradient_accumulation_steps": ("train", "grad_accum_steps"),
    "max_steps": ("train", "steps"),
    "seed": ("train", "seed"),
}
"""Name in TrainingArguments → (section, key) of a job."""

AUTO: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "bf16.enabled": ("bf16",),
    "fp16.enabled": ("fp16",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "scheduler.params.total_num_steps": ("max_steps",),
}
"""Key → names in TrainingArguments that "auto" refers to."""

_SIZES = "buffers are sized by the blocks of the model; device_slots and *_memory_limit bound them"
_ALWAYS = "always so"
_IN_SLOTS = "of weights on the disk a few slots are on the host, and no cache"
_DISK = "state on the disk is read ahead and written behind, several requests at once, as it is"
_LOGGING = "of the run's log, which is always complete (offloadtrain events, tui)"
_ZEROPP = "ZeRO++ is not there"

IGNORED: dict[str, str] = {
    "train_batch_size": "follows from micro_batch, grad_accum_steps and the number of ranks",
    "steps_per_print": _LOGGING,
    "wall_clock_breakdown": _LOGGING,
    "dump_state": _LOGGING,
    "memory_breakdown": _LOGGING,
    "prescale_gradients": "gradients are averaged after their sum; reduction = 'fp32' sums wider",
    "gradient_predivide_factor": "gradients are averaged after their sum",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": _ALWAYS,
    "zero_allow_untested_optimizer": "every optimizer here is made for it",
    "zero_force_ds_cpu_optimizer": "there is one CPU optimizer",
    "gradient_accumulation_dtype": "gradients are summed over microbatches in fp32",
    "data_types.grad_accum_dtype": "gradients are summed over microbatches in fp32",
    "bf16.immediate_grad_update": _ALWAYS,
    "zero_optimization.contiguous_gradients": _ALWAYS,
    "zero_optimization.overlap_comm": _ALWAYS,
    "zero_optimization.reduce_scatter": _ALWAYS,
    "zero_optimization.allgather_partitions": _ALWAYS,
    "zero_optimization.round_robin_gradients": _ALWAYS,
    "zero_optimization.load_from_fp32_weights": _ALWAYS,
    "zero_optimization.elastic_checkpoint": "jobs resume on any number of ranks",
    "zero_optimization.ignore_unused_parameters": _ALWAYS,
    "zero_optimization.legacy_stage1": "of an old DeepSpeed",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _ALWAYS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _ALWAYS,
    "zero_optimization.reduce_bucket_size": _SIZES,
    "zero_optimization.allgather_bucket_size": _SIZES,
    "zero_optimization.sub_group_size": _SIZES,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZES,
    "zero_optimization.stage3_param_persistence_threshold": _SIZES,
    "zero_optimization.stage3_model_persistence_threshold": _SIZES,
    "zero_optimization.stage3_max_live_parameters": _SIZES,
    "zero_optimization.stage3_max_reuse_distance": _SIZES,
    "zero_optimization.memory_efficient_linear": "activation = 'recompute' saves that memory",
    "zero_optimization.offload_optimizer.buffer_count": _DISK,
    "zero_optimization.offload_optimizer.buffer_size": _DISK,
    "zero_optimization.offload_optimizer.fast_init": _DISK,
    "zero_optimization.offload_optimizer.pipeline": _DISK,
    "zero_optimization.offload_optimizer.pipeline_read": _DISK,
    "zero_optimization.offload_optimizer.pipeline_write": _DISK,
    "zero_optimization.offload_param.buffer_count": "device_slots is the number of blocks there",
    "zero_optimization.offload_param.buffer_size": _SIZES,
    "zero_optimization.offload_param.max_in_cpu": _IN_SLOTS,
    "zero_optimization.zero_hpz_partition_size": _ZEROPP,
    "zero_optimization.zero_quantized_weights": _ZEROPP,
    "zero_optimization.zero_quantized_nontrainable_weights": _ZEROPP,
    "zero_optimization.zero_quantized_gradients": _ZEROPP,
    "zero_optimization.mics_shard_size": "shards are over all ranks of a process group",
    "scheduler.params.last_batch_iteration": "a run resumes from its own checkpoint",
}
"""Key → why it has no counterpart."""

SECTIONS: dict[str, str] = {
    "activation_checkpointing": "activation = 'recompute' or 'offload' says all of it",
    "aio": _DISK,
    "amp": "apex's casts are not there",
    "autotuning": "offloadtrain plan chooses: device.placement = 'auto'",
    "checkpoint": "checkpoints are written in the background, verified and resharded as they are",
    "comms_logger": _LOGGING,
    "compression_training": "not there",
    "csv_monitor": _LOGGING,
    "curriculum_learning": "not there",
    "data_efficiency": "not there",
    "elasticity": "jobs resume on any number of ranks",
    "eigenvalue": "not there",
    "flops_profiler": _LOGGING,
    "monitor_config": _LOGGING,
    "progressive_layer_drop": "not there",
    "sparse_attention": "of the model",
    "tensorboard": _LOGGING,
    "tensor_parallel": "not there",
    "wandb": _LOGGING,
    "zenflow": "not there; update = 'delayed' overlaps with one step of staleness",
}
"""Section → why its keys have no counterpart."""

_BETAS = {"optimizer.params.betas": ("optim", "betas")}
_DEFAULTS = {"optim": asdict(OptimConfig()), "offload": OFFLOAD.options()}
"""Section of a job → key → default value."""


@dataclass
class Imported:
    """A DeepSpeed configuration as sections of a job.

    Attributes:
        tables: section of a job → key → value.
        unmapped: key of the file → why it has no counterpart.
        undecided: key set to "auto" → what decides its value. `OffloadMixin` reads it from there;
            in a job it has its default.
    """

    tables: Tables = field(default_factory=lambda: {"optim": {}, "offload": {}, "train": {}})
    unmapped: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)

    warm_up_is_linear: bool = False

    def put(self, key: str, section: str, name: str, value: Any) -> None:
        """Set a value; list a contradiction if another key of the file has set it before."""
        before = self.tables[section].setdefault(name, value)
        if before != value:
            self.unmapped[key] = f"another key says {section}.{name} = {before!r}"

    def undecided_in_a_job(self) -> dict[str, str]:
        """Return key → what would decide it, and the job's value instead."""
        undecided = dict(self.undecided)
        for key, why in self.undecided.items():
            target = ARGUMENTS.get(next(iter(AUTO.get(key, ())), ""), _BETAS.get(key))
            if target is not None and target[0] in _DEFAULTS:
                value = _DEFAULTS[target[0]][target[1]]
                undecided[key] = f"{why}; until you set it, {'.'.join(target)} is {value!r}"
        return undecided

    def job(self) -> str:
        """Return TOML of a job, without keys that DeepSpeed files do not have."""
        lacking = ["model.size", "data.source"]
        lacking += [] if "steps" in self.tables["train"] else ["train.steps"]
        # None means no clipping, which is 0 in TOML.
        tables = {
            name: {key: 0 if value is None else value for key, value in table.items()}
            for name, table in self.tables.items()
            if table
        }
        return f"# Set {', '.join(lacking)}.\n" + toml.emit({"name": "from-deepspeed", **tables})

    def mixin(self) -> str:
        """Return JSON with the options of `OffloadMixin`, and the `TrainingArguments` that
        determine its other options."""
        names = {target: argument for argument, target in ARGUMENTS.items()}
        arguments, offload = _as_arguments(self.tables), {}
        for section, table in self.tables.items():
            for key, value in table.items():
                if (argument := names.get((section, key))) is not None:
                    arguments[argument] = 0.0 if value is None else value  # no clipping
                elif section == "offload" and key != "precision":
                    offload[key] = value
                elif key == "name" and value in _NO_ARGUMENT:
                    self.unmapped["optim.name"] = f"{value!r}: optimizer_cls_and_kwargs says it"
                elif key == "min_lr_ratio" and value:
                    self.unmapped[f"{section}.{key}"] = f"{value!r}: use lr_scheduler_kwargs"
        return json.dumps({"offload": offload, "training_arguments": arguments}, indent=2) + "\n"


def load(path: Path, arguments: Path | None = None) -> Imported:
    """Read a configuration, and the Trainer's arguments that its "auto" values refer to.

    Args:
        arguments: JSON of the arguments, or a script that creates them with literal values.

    Raises:
        ConfigError: a file cannot be read, or has a wrong format.
    """
    imported = Imported()
    trainer_args = {} if arguments is None else _arguments(arguments, imported)
    for key, value in _leaves(_object(path, toml.read(path))):
        _map(imported, key, value, trainer_args)
    for name, target in ARGUMENTS.items() if trainer_args else ():
        if name in trainer_args:
            value = (
                trainer_args[name] or None
                if target == ("offload", "clip_norm")
                else trainer_args[name]
            )
            imported.put(f"arguments.{name}", *target, value)
    _take_precision(imported, trainer_args)
    _finish(imported)
    return imported


def _map(imported: Imported, key: str, value: Any, trainer_args: Mapping[str, Any]) -> None:
    names = AUTO.get(key, ())
    if value == "auto" and names:
        if not set(names) <= set(trainer_args):
            imported.undecided[key] = f"TrainingArguments' {' and '.join(names)} decides"
            return
        values = [trainer_args[name] for name in names]
        value = values if len(values) > 1 else values[0]
    elif value == "auto" and key in _MAPPED:
        imported.undecided[key] = "DeepSpeed's default decides"
        return
    section = next((name for name in SECTIONS if key == name or key.startswith(f"{name}.")), "")
    if (mapped := _MAPPED.get(key)) is not None:
        if reason := mapped(imported, key, value):
            imported.unmapped[key] = reason
    elif key in IGNORED or section:
        imported.unmapped[key] = IGNORED.get(key) or SECTIONS[section]
    else:
        imported.unmapped[key] = f"unknown key{nearest(key, [*_MAPPED, *IGNORED, *AUTO])}"


_Mapper = Callable[[Imported, str, Any], str]
"""Sets the counterpart of a key; returns why there is none, or ""."""


def _to(section: str, name: str, convert: Callable[[Any], Any] = lambda value: value) -> _Mapper:
    def put(imported: Imported, key: str, value: Any) -> str:
        imported.put(key, section, name, convert(value))
        return ""

    return put


def _only(expected: tuple[Any, ...], why: str) -> _Mapper:
    return lambda imported, key, value: "" if value in expected else f"{value!r}: {why}"


def _precision(name: str) -> _Mapper:
    def put(imported: Imported, key: str, value: Any) -> str:
        if value:
            imported.put(key, "offload", "precision", name)
        return ""

    return put


def _tier(section: str, name: str, tiers: Mapping[str, str]) -> _Mapper:
    def put(imported: Imported, key: str, value: Any) -> str:
        if value not in tiers:
            return f"{value!r}: the tiers are {', '.join(tiers)}"
        imported.put(key, section, name, tiers[value])
        return ""

    return put


def _optimizer(imported: Imported, key: str, value: Any) -> str:
    name = str(value).lower()
    if name == "adam":
        name = "adamw"  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
    if name not in get_args(get_type_hints(OptimConfig)["name"]):
        return f"{value!r} is no optimizer of a job"
    imported.put(key, "optim", "name", name)
    return ""


def _adam_mode(imported: Imported, key: str, value: Any) -> str:
    if not value and imported.tables["optim"].get("name") == "adamw":
        imported.tables["optim"]["name"] = "adam"
    return ""


def _schedule(imported: Imported, key: str, value: Any) -> str:
    shape, ends = _SCHEDULES.get(value, ("", 1.0))
    if not shape:
        return f"{value!r}: the schedules are {', '.join(_SCHEDULES)}"
    imported.put(key, "optim", "schedule", shape)
    if shape == "linear":
        imported.put(key, "optim", "min_lr_ratio", ends)
    return ""


def _warm_up(imported: Imported, key: str, value: Any) -> str:
    imported.warm_up_is_linear = value == "linear"
    return ""


_SCHEDULES = {"WarmupLR": ("constant", 1.0), "WarmupDecayLR": ("linear", 0.0)}
_SCHEDULES["WarmupCosineLR"] = ("cosine", 0.0)


def _reduction(imported: Imported, key: str, value: Any) -> str:
    wide = value in ("fp32", True)
    imported.put(key, "offload", "reduction", "fp32" if wide else "working")
    return ""


def _stage(imported: Imported, key: str, value: Any) -> str:
    if value not in (1, 2, 3):
        return f"{value!r}: among ranks the state is always in shards, from stage 1 on"
    imported.put(key, "offload", "zero_stage", value)
    return ""


_ZERO, _SCALE = "zero_optimization", "optimizer.params"
_TIERS = {"cpu": "host", "none": "device", "nvme": "disk"}
_DYNAMIC = "the loss scale is dynamic, from 2^16, doubled after 2000 steps, halved at once"
_MAPPED: dict[str, _Mapper] = {
    "train_micro_batch_size_per_gpu": _to("train", "micro_batch"),
    "gradient_accumulation_steps": _to("train", "grad_accum_steps"),
    "gradient_clipping": _to("offload", "clip_norm", lambda value: value or None),
    "communication_data_type": _reduction,
    "fp32_allreduce": _reduction,
    "seed": _to("train", "seed"),
    "bf16.enabled": _precision("bf16"),
    "bfloat16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    "fp16.loss_scale": _only((0,), f"a fixed loss scale: {_DYNAMIC}"),
    "fp16.initial_scale_power": _only((16,), _DYNAMIC),
    "fp16.loss_scale_window": _only((2000,), _DYNAMIC),
    "fp16.hysteresis": _only((1,), f"{_DYNAMIC}; see offload.loss_scale_hysteresis"),
    "fp16.min_loss_scale": _only((), "the smallest loss scale is 2^-14"),
    "fp16.auto_cast": _only((False,), "inputs are cast where they meet a 16-bit matrix"),
    "amp.enabled": _only((False,), "apex's casts: use bf16 or fp16"),
    f"{_ZERO}.stage": _stage,
    f"{_ZERO}.offload_optimizer.device": _tier("offload", "state_on", _TIERS),
    f"{_ZERO}.offload_optimizer.nvme_path": _to("offload", "scratch_dir"),
    f"{_ZERO}.offload_param.device": _tier("offload", "working", _TIERS),
    f"{_ZERO}.offload_param.nvme_path": _to("offload", "scratch_dir"),
    f"{_ZERO}.cpu_offload": _to("offload", "state_on", lambda on: "host" if on else "device"),
    f"{_ZERO}.cpu_offload_params": _to("offload", "working", lambda on: "host" if on else "device"),
    f"{_ZERO}.offload_optimizer.pin_memory": _to("offload", "pin_memory"),
    f"{_ZERO}.offload_param.pin_memory": _to("offload", "pin_memory"),
    f"{_ZERO}.offload_optimizer.ratio": _only((1, 1.0), "all of the state goes to the host"),
    f"{_ZERO}.cpu_offload_use_pin_memory": _to("offload", "pin_memory"),
    "optimizer.type": _optimizer,
    f"{_SCALE}.lr": _to("optim", "lr"),
    f"{_SCALE}.betas": _to("optim", "betas", list),
    f"{_SCALE}.eps": _to("optim", "eps"),
    f"{_SCALE}.weight_decay": _to("optim", "weight_decay"),
    f"{_SCALE}.adam_w_mode": _adam_mode,
    f"{_SCALE}.torch_adam": _only((False, True), ""),
    f"{_SCALE}.bias_correction": _only((True,), "moments are always corrected"),
    f"{_SCALE}.amsgrad": _only((False,), "AMSGrad is not there"),
    "scheduler.type": _schedule,
    "scheduler.params.warmup_num_steps": _to("optim", "warmup_steps"),
    "scheduler.params.total_num_steps": _to("train", "steps"),
    "scheduler.params.warmup_max_lr": _to("optim", "lr"),
    "scheduler.params.warmup_min_lr": _only((0, 0.0), "the warm-up begins at 0"),
    "scheduler.params.warmup_type": _warm_up,
    "scheduler.params.cos_min_ratio": _to("optim", "min_lr_ratio"),
    "scheduler.params.warmup_min_ratio": _only((0, 0.0), "the warm-up begins at 0"),
    "activation_checkpointing.cpu_checkpointing": _to(
        "offload", "activation", lambda on: "offload" if on else "keep"
    ),
}


def _finish(imported: Imported) -> None:
    """Set values that DeepSpeed implies by missing keys, and list contradictions."""
    options = imported.tables["offload"]
    schedule = imported.tables["optim"].get("schedule")
    if schedule in ("constant", "linear") and not imported.warm_up_is_linear:
        imported.unmapped["scheduler.params.warmup_type"] = (
            "'log', the default: the warm-up is linear"
        )
    streams = options.get("working", "device") != "device"
    if "disk" not in (options.get("state_on"), options.get("working")):
        options.pop("scratch_dir", None)  # as DeepSpeed, which then ignores the path
    if "state_on" not in options:
        options["state_on"] = "host" if streams else "device"
    if options.get("state_on") == "device" and streams:
        options["state_on"] = "host"
        imported.unmapped[f"{_ZERO}.offload_param.device"] = (
            "weights on the host or the disk have no state on the device: state_on = 'host'"
        )
    accum = imported.tables["train"].get("grad_accum_steps", 1)
    checked = OffloadConfig(**{**options, "grad_accum_steps": accum})
    for problem in checked.problems():
        imported.unmapped[f"offload.{problem.split(' ')[0]}"] = problem


def _take_precision(imported: Imported, trainer_args: Mapping[str, Any]) -> None:
    for name in ("bf16", "fp16"):
        if trainer_args.get(name) is True:
            imported.put(f"arguments.{name}", "offload", "precision", name)
    # DeepSpeed's default is fp32; "auto" without arguments stays the job's "auto".
    if not {"bf16.enabled", "fp16.enabled"} & set(imported.undecided):
        imported.tables["offload"].setdefault("precision", "fp32")


def _as_arguments(tables: Tables) -> dict[str, Any]:
    """Return Trainer arguments that do not correspond to a single key of a job."""
    optim, offload = tables["optim"], tables["offload"]
    arguments: dict[str, Any] = {
        name: True for name in ("bf16", "fp16") if offload.get("precision") == name
    }
    if isinstance(optim.get("betas"), list):
        arguments |= dict(zip(("adam_beta1", "adam_beta2"), optim["betas"], strict=True))
    shapes = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    if "schedule" in optim:
        arguments["lr_scheduler_type"] = shapes[optim["schedule"]]
    if optim.get("name") == "lion":
        arguments["optim"] = "lion_32bit"
    return arguments


_NO_ARGUMENT = ("adam", "sgd", "adagrad")
"""Optimizers of a job without a value of TrainingArguments' `optim`."""


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parsed


def _arguments(path: Path, imported: Imported) -> dict[str, Any]:
    """Return the arguments by name; a script's values that are not literals are listed."""
    if path.suffix != ".py":
        return {k: v for k, v in _object(path, toml.read(path)).items() if v is not None}
    try:
        tree = ast.parse(toml.read(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _makes(node)]
    if len(calls) != 1:
        raise ConfigError(f"{path} makes TrainingArguments {len(calls)} times, and not once")
    values = {}
    for keyword in calls[0].keywords:
        try:
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            name = f"arguments.{keyword.arg or '**'}"
            imported.unmapped[name] = "not a literal in the script"
    return values


def _makes(call: ast.Call) -> bool:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    return name.endswith("TrainingArguments") or name in ("SFTConfig", "DPOConfig")
