"""Converts a checkpoint of another trainer to a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.convert.checkpoint import ForeignError, ModelTensor
from offloadtrain.convert.reader import CheckpointStream, open_foreign
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.process_group import UNTRAINED
from offloadtrain.train.build import TrainingContext, assemble, described, empty_model
from offloadtrain.train.checkpoint import save
from offloadtrain.train.log.console import Console
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.progress import Progress
from offloadtrain.train.run import named_memory_errors
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.saving import Saving

ADAMS = ("adamw", "adam")
"""Update rules whose state torch and DeepSpeed store in the same format."""


def to_run(
    config: Config,
    job_text: str,
    source: Path,
    *,
    optimizer: Path | None,
    run_dir: Path | None,
    console: Console,
) -> Path:
    """Create a run folder with one checkpoint, for `train --resume`; return its path.

    Args:
        source, optimizer: see `open_foreign`.
        run_dir: the folder to create; default: as in `train`.

    Raises:
        ConfigError: the job cannot continue from this checkpoint.
        ForeignError: the checkpoint cannot be read, or is of another model; no run is created.
    """
    if config.optim.name not in ADAMS:
        raise ConfigError(
            f'optim.name = "{config.optim.name}" keeps other state than Adam, which is converted: '
            'set it to "adamw" or "adam"'
        )
    config = described(config)
    model = empty_model(config)
    with ExitStack() as stack:
        foreign = stack.enter_context(open_foreign(source, optimizer, list(model_tensors(model))))
        for note in (*foreign.notes, *_hyperparameter_differences(source, foreign, model, config)):
            console.say(f"{source}: {note}")
        run = stack.enter_context(RunFolder.new(Path(config.runs_dir), config.name, run_dir))
        run.announce()
        log = stack.enter_context(RunLog(run, config, Console(quiet=True)))
        set_ledger = stack.enter_context(named_memory_errors())
        context = assemble(config)
        set_ledger(context.optimizer.ledger)
        stack.callback(context.optimizer.close)
        _load(context, foreign)
        _tell_of_format(context, console)
        saving = Saving(config, context, run, log)
        progress = Progress(step=foreign.step, tokens=foreign.step * config.batch_tokens)
        saving.check_room(foreign.step)
        run.begin(jobs.dump(config), job_text)
        log.started(context, progress)
        saving.save(progress)
        log.ended("stopped", f"converted from {foreign.kind}")
    console.say(f"step {foreign.step} of {foreign.kind}: go on with --resume {run.path}")
    return run.path


def model_tensors(model: nn.Module) -> Iterator[ModelTensor]:
    """Yield every parameter and persistent buffer of a model."""
    named = list(model.named_parameters(remove_duplicate=False))
    for name, param in model.named_parameters():
        aliases = tuple(other for other, same in named if same is param and other != name)
        shape, dtype = tuple(param.shape), _sent(param.dtype)
        yield ModelTensor(name, shape, aliases, param.requires_grad, True, dtype)
    params = {name for name, _ in named}
    for name, buffer in model.state_dict().items():
        if name not in params:
            yield ModelTensor(name, tuple(buffer.shape), (), False, False, _sent(buffer.dtype))


def _sent(dtype: torch.dtype) -> str:
    """Return the dtype in which the reader sends a tensor of this dtype."""
    return "float32" if dtype in (torch.bfloat16, torch.float16) else name_of(dtype)


def _hyperparameter_differences(
    source: Path, foreign: CheckpointStream, model: nn.Module, config: Config
) -> Iterator[str]:
    """Yield a message for each hyperparameter of the checkpoint that the job replaces.

    Raises:
        ConfigError: the checkpoint is at or after the job's last step.
        ForeignError: the checkpoint was trained with the other kind of weight decay.
    """
    optim, steps = config.optim, config.train.steps
    if foreign.step >= steps:
        raise ConfigError(
            f"{source} is at step {foreign.step}, and train.steps = {steps}: raise train.steps"
        )
    matrices = {name for name, param in model.named_parameters() if param.ndim >= 2}
    lines: dict[str, None] = {}
    for group in foreign.groups:
        decoupled = group.values.get("decoupled_weight_decay", optim.name == "adamw")
        if bool(decoupled) != (optim.name == "adamw") and group.values.get("weight_decay"):
            there = "AdamW" if decoupled else "Adam"
            raise ForeignError(
                f"{source} was trained with {there}'s weight decay: set optim.name = "
                f'"{there.lower()}"'
            )
        lines |= dict.fromkeys(_other_values(group.values, group.names, matrices, config))
    for line in lines:
        yield f"{line}; the job's is used from here on"
    if not foreign.groups:
        yield "its hyperparameters were not saved; the job's are used"


def _other_values(
    values: Any, names: Sequence[str], matrices: set[str], config: Config
) -> Iterator[str]:
    optim = config.optim
    for key, job_value in (("betas", list(optim.betas)), ("eps", optim.eps)):
        if key in values and values[key] != job_value:
            yield f"{key} = {values[key]} there and optim.{key} = {job_value} in the job"
    if "weight_decay" not in values:
        return
    there = values["weight_decay"]
    for name in names:
        job_value = optim.weight_decay if optim.decay == "all" or name in matrices else 0.0
        if there != job_value:
            what = "matrices" if name in matrices else "other parameters"
            yield f"weight_decay = {there:g} of {what} there and {job_value:g} in the job"


def _load(context: TrainingContext, foreign: CheckpointStream) -> None:
    """Load weights and state, and skip the batches of completed steps.

    Raises:
        ForeignError: the reader has failed.
    """
    optimizer, module = context.optimizer, context.model.module
    extra, extents = save.untrained(module, optimizer), optimizer.extents()
    for wanted, tensors in foreign.tensors():
        if wanted.trained:
            optimizer.load_named_state(wanted.name, tensors)
        elif wanted.name in extents:
            optimizer.load_named_state(wanted.name, {UNTRAINED: tensors["weight"]})
        else:
            with torch.no_grad():
                extra[wanted.name].copy_(tensors["weight"])
    # For fp16, start with the job's initial loss scale, since sources use other scalers.
    optimizer.finish_load(step=foreign.step, scaler=optimizer.scaler_state())
    context.batches.skip(foreign.step * context.local.train.grad_accum_steps)


def _tell_of_format(context: TrainingContext, console: Console) -> None:
    state = context.optimizer.config.state.format
    if state != "fp32":
        console.say(f'offload.state = "{state}": its encoder has rounded the state to nearest')
