"""`offloadtrain convert` and `offloadtrain import-deepspeed`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from offloadtrain.boundary.output import say_on_stderr
from offloadtrain.cli.commands.jobs import find_job
from offloadtrain.cli.exit_codes import ends_as_interrupted
from offloadtrain.cli.options import Overrides
from offloadtrain.config.errors import ConfigError, OffloadTrainError, require_path


def convert(
    source: Path,
    out: Path | None = None,
    /,
    *,
    to: Literal["run", "torch", "dcp"] = "run",
    job: str | None = None,
    overrides: Overrides = (),
    optimizer: Path | None = None,
    run_dir: Annotated[Path | None, Parameter(name=("--run-dir", "--run"))] = None,
) -> None:
    """Make a run of a checkpoint of torch, FSDP or DeepSpeed; or a checkpoint of torch of a run.

    Model and state of Adam are taken over: fp32 masters, both moments, the step. Data, schedule and
    random numbers are where a run of the job is after so many steps. `train JOB --resume` goes on.

    Parameters
    ----------
    source
        A file of torch.save, a folder of torch.distributed.checkpoint, or one of DeepSpeed's ZeRO
        1, 2 or 3. With --to torch or dcp: a run folder, or one checkpoint.
    out
        With --to torch or dcp: the file or folder to write, which must not exist.
    to
        run: a run folder of --job. torch: one file with "model", "optimizer" and "step", for
        torch.optim.AdamW or Adam. dcp: a folder of torch.distributed.checkpoint with "model",
        "optim" and "step", by names, for FSDP on any number of ranks.
    job
        The job that goes on: a job file, or the name of a shipped job.
    overrides
        KEY=VALUE ...: values that override the job's.
    optimizer
        File or folder of the optimizer's state, if it is not in SOURCE.
    run_dir
        Folder of the run. Default: runs/<UTC time>-<name>.
    """
    options = {"--job": job, "--set": overrides, "--optimizer": optimizer, "--run-dir": run_dir}
    used = [key for key, value in options.items() if value]
    if to != "run":
        if used:
            raise ConfigError(f"--to {to} takes no {used[0]}: a run has its own job")
        if out is None:
            raise ConfigError(f"--to {to} needs the path to write: convert RUN OUT --to {to}")
        with ends_as_interrupted():
            _from_run(source, out, to)
        return
    if out is not None:
        raise ConfigError(f"{out}: a run is made in --run-dir; --to torch or dcp writes a path")
    if job is None:
        raise ConfigError("--job is needed: the job that goes on from the checkpoint")
    with ends_as_interrupted():
        _to_run(source, job, overrides, optimizer, run_dir)


def _to_run(
    source: Path,
    job: str,
    overrides: tuple[str, ...],
    optimizer: Path | None,
    run_dir: Path | None,
) -> None:
    from offloadtrain.config import job as jobs
    from offloadtrain.config import toml
    from offloadtrain.convert.run_import import to_run
    from offloadtrain.train.log.console import Console

    for path in filter(None, (source, optimizer)):
        require_path(path)
    path = find_job(job)
    config = jobs.load(path, overrides, say_on_stderr)
    text = toml.read(path)
    console = Console()
    with console.never_silent("converting"):
        made = to_run(config, text, source, optimizer=optimizer, run_dir=run_dir, console=console)
    print(made)


def _from_run(source: Path, out: Path, to: Literal["torch", "dcp"]) -> None:
    from offloadtrain.convert.torch_export import to_dcp, to_torch
    from offloadtrain.train.trained_model import open_saved

    write = {"torch": to_torch, "dcp": to_dcp}[to]
    for line in write(open_saved(source), out):
        print(line, file=sys.stderr)
    print(out)


def import_deepspeed(
    config: Path,
    out: Path | None = None,
    /,
    *,
    to: Literal["job", "mixin"] = "job",
    trainer_args: Path | None = None,
) -> None:
    """Translate a DeepSpeed configuration, and list on stderr what has no translation.

    Parameters
    ----------
    config
        The JSON file.
    out
        File to write, which must not exist; default: stdout.
    to
        A job's TOML, or JSON with the options of OffloadMixin and the TrainingArguments.
    trainer_args
        JSON of TrainingArguments, or the script that makes them: what "auto" stands for.
    """
    from offloadtrain.convert import deepspeed_config

    loaded = deepspeed_config.load(config, trainer_args)
    text = loaded.job() if to == "job" else loaded.mixin()
    if out is None:
        print(text, end="")
    else:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise OffloadTrainError(f"{out} cannot be written: {error.strerror}") from error
        print(out)
    undecided = loaded.undecided_in_a_job() if to == "job" else {}
    for key, why in {**loaded.unmapped, **undecided}.items():
        print(f"not mapped: {key}: {why}", file=sys.stderr)
