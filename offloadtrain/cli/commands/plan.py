"""`offloadtrain plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from offloadtrain.cli.exit_codes import DOES_NOT_FIT
from offloadtrain.cli.options import Flag, Json, Overrides
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.units import parse_bytes

if TYPE_CHECKING:
    from offloadtrain.config.job import Config
    from offloadtrain.hardware.machine import Machine
    from offloadtrain.plan.costs.microbatch import Trace
    from offloadtrain.plan.plan import Plan
    from offloadtrain.plan.search.compare import Row
    from offloadtrain.plan.search.largest import Row as LargestRow
    from offloadtrain.plan.search.suggest import Change
    from offloadtrain.plan.search.why import Why

_HF_JOB = """
name = "fine-tune"
[model]
hf = {folder}
[data]
train = "-"
seq_len = 2048
[offload]
activation = "recompute"
[device]
placement = "auto"
[train]
steps = 1
micro_batch = 1
global_batch_tokens = 32768
"""
"""The job of `--hf`."""

SMALLEST = 1 << 20
"""Bytes of any memory."""

STAND_IN = "rtx4090"
"""The machine whose rates are used if only the memory of a GPU is given."""


def plan(
    job: str = "",
    /,
    *,
    overrides: Overrides = (),
    machine: str = "",
    gpus: int = 1,
    gpu_memory: Annotated[str, Parameter(name=("--gpu-memory", "--gpu"))] = "",
    host_memory: Annotated[str, Parameter(name=("--host-memory", "--host"))] = "",
    hf: str = "",
    fine_tune: str = "",
    largest: Flag = False,
    compare: Flag = False,
    search: Flag = False,
    sweep: str = "",
    plot: str = "",
    why: Flag = False,
    as_json: Json = False,
) -> int:
    """Print the memory of a job by owner, the time of a step, and whether the job fits.

    Nothing is allocated. If the job does not fit, the exit code is 4 and the smallest changes that
    make it fit are printed, the fastest first.

    Parameters
    ----------
    job
        A job file, or the name of a shipped job (`offloadtrain ls`).
    overrides
        KEY=VALUE ...: values that override the job's.
    machine
        A machine file (`offloadtrain doctor --save FILE.toml`), or the name of a shipped one: dgx2,
        v100_32gb, t4, a10g, l4, a100_40gb, a100_80gb, h100, h100_pcie, h200, gh200, b200, l40s,
        a6000, rtx2080ti, rtx3060, rtx3090, rtx4060ti, rtx4080, rtx4090, rtx5060ti, rtx5090,
        rtx_pro6000, mi300x (a plan only: the engine needs CUDA), cpu2. Default: the job's
        device.machine, else this machine, with the rates of the most similar shipped one.
    gpus
        Number of ranks, one per GPU. They divide the job's batch.
    gpu_memory
        Memory of each GPU, such as 32GiB, instead of the machine's.
    host_memory
        Memory of each host, such as 128GiB, instead of the machine's.
    hf
        A folder with config.json, that file, or a name in the cache of Hugging Face: plan the
        fine-tuning of this causal language model: 32,768 tokens per step in sequences of 2048,
        layers recomputed, weights where they fit (no JOB; --set changes any key).
    fine_tune
        Number of parameters, such as 8B: whether such a model can be fine-tuned on the machine
        with 32,768 tokens per step, and the fastest placement, format and microbatch (no JOB).
    largest
        Print the largest published model that trains on the machine with 32,768 tokens per step,
        per placement and state format (no JOB).
    compare
        Also print what DeepSpeed's ZeRO-Offload, FSDP2's CPU offload and torchao need for the same
        step on this machine, their predicted speed, and how far such predictions were off.
    search
        With --gpus N: print the fastest divisions of the job's step into stages of a pipeline,
        replicas, microbatches and recompute, each simulated stage by stage and link by link.
        Matrices and experts stay divided as the job says (ranks.tensor, ranks.expert).
    sweep
        gpus=1,2,4,...: plan the job for each number of GPUs, each GPU with the whole batch of the
        job, with the optimizer state on the hosts (ZeRO stages 1 to 3) and on the GPUs (0 to 3).
    plot
        With --sweep: also plot the result into this file, .svg or .png.
    why
        Also print what bounds the step, and the three changes of one key that gain most.
    as_json
        Print one JSON object.
    """
    from offloadtrain.config.batch_split import parse_ranks
    from offloadtrain.plan.search import compare as comparison
    from offloadtrain.plan.search import suggest
    from offloadtrain.plan.search.why import why as explain

    parse_ranks("--gpus", str(gpus))
    if plot and not sweep:
        raise ConfigError(f"--plot {plot}: it needs a --sweep, such as --sweep gpus=1,2,4")
    if compare and (sweep or largest):
        raise ConfigError("--compare compares one plan: leave out --sweep and --largest")
    _check_alone("--search tries the divisions of one job", search, hf, sweep, ())
    _check_alone(
        "--largest searches over models", largest, job or hf or fine_tune, sweep, overrides
    )
    _check_alone("--fine-tune asks for a size", bool(fine_tune), job or hf, sweep, overrides)
    if largest or fine_tune:
        name, target = chosen_machine(machine, gpu_memory, host_memory)
        if largest:
            return _largest(name, target, gpus, as_json=as_json)
        return _fine_tune(fine_tune, name, target, gpus, compare=compare, as_json=as_json)
    config = _job(job, hf, overrides)
    name, target = chosen_machine(machine or config.device.machine, gpu_memory, host_memory)
    if search:
        return _search(config, name, target, gpus, as_json=as_json)
    trace = None
    saved = config.offload.activations.mode == "offload_saved"
    if saved or config.hf is not None:  # those need torch, and parameters transformers
        config, trace = _described(config, target, gpus)
    counts = _counts(sweep) if sweep else [gpus]
    planned = suggest.planned(config, name, target, _fewest(counts, config), trace)
    if sweep:
        return _sweep(planned.job, name, target, counts, plot, as_json=as_json)
    rows = comparison.compare(planned, trace) if compare else []
    other = [] if planned.fits else suggest.nearest(planned.job, name, target, gpus, trace=trace)
    reasons = explain(planned, trace) if why and planned.fits else None
    _print(planned, other, rows, reasons, as_json=as_json)
    return 0 if planned.fits else DOES_NOT_FIT


def _print(
    planned: Plan,
    other: Sequence[Change],
    rows: Sequence[Row],
    reasons: Why | None,
    *,
    as_json: bool,
) -> None:
    """`rows`: of --compare; empty without it. `reasons`: of --why."""
    from offloadtrain.plan import report
    from offloadtrain.plan.search import compare as comparison
    from offloadtrain.plan.search import why as answers

    if as_json:
        result = report.as_json(planned, other)
        result |= {"compare": comparison.as_json(rows)} if rows else {}
        result |= {} if reasons is None else {"why": answers.as_json(reasons)}
        print(json.dumps(result))
        return
    print(report.text(planned, other))
    if rows:
        print(f"\n{comparison.table(rows, planned)}")
    if reasons is not None:
        print(f"\n{answers.text(reasons)}")


def _check_alone(
    what: str, requested: bool, model: str, sweep: str, overrides: tuple[str, ...]
) -> None:
    """Raises ConfigError if a search is combined with a model or with changes to one."""
    if requested and (model or sweep or overrides):
        raise ConfigError(f"{what}: leave out {model or '--sweep, --set'}")


def _job(job: str, hf: str, overrides: tuple[str, ...]) -> Config:
    """Return the job that is named, or the fine-tuning of the folder."""
    from offloadtrain.cli.commands.jobs import find_job, say_on_stderr
    from offloadtrain.config import job as jobs

    if bool(job) == bool(hf):
        raise ConfigError(
            "give a job file or the name of a shipped job (offloadtrain ls)"
            + (f", or --hf {hf}, not both" if hf else ", or --hf FOLDER")
        )
    if hf:
        folder = str(Path(hf).parent) if Path(hf).name == "config.json" else hf
        return jobs.loads(_HF_JOB.format(folder=json.dumps(folder)), "--hf", overrides)
    return jobs.load(find_job(job), overrides, say_on_stderr)


def _described(config: Config, machine: Machine, ranks: int) -> tuple[Config, Trace | None]:
    """Return the job with every parameter of its model known, and the trace of a microbatch. A
    model that cannot be traced is planned by its shape, with one message on stderr."""
    from offloadtrain.cli.commands.jobs import say_on_stderr
    from offloadtrain.config.batch_split import of_stage, shared
    from offloadtrain.plan.placement import resolved
    from offloadtrain.plan.tracing.step import TraceError
    from offloadtrain.train.build import described, tracer_of

    config = described(config)
    trace, of_rank = tracer_of(config, machine, ranks), shared(resolved(config, machine), ranks)
    stages = range(config.ranks.stages) if config.ranks.pipeline > 1 else ()
    # Whether stages can be traced does not depend on their numbers of layers.
    of_rank = replace(of_rank, ranks=replace(of_rank.ranks, layers_per_stage=()))
    try:
        for stage_job in [of_stage(of_rank, number) for number in stages] or [of_rank]:
            trace(stage_job)
    except TraceError as error:
        if config.offload.activations.mode == "offload_saved":
            raise  # its shape does not tell what moves
        say_on_stderr(f"{error}. Activations and times are estimates by its shape")
        return config, None
    return config, trace


def _fine_tune(
    size_text: str, name: str, machine: Machine, ranks: int, *, compare: bool, as_json: bool
) -> int:
    from offloadtrain.config.model_shape import SIZES
    from offloadtrain.plan import report
    from offloadtrain.plan.plan import make
    from offloadtrain.plan.search import compare as comparison
    from offloadtrain.plan.search import question, suggest

    size = question.sized(size_text)
    job = question.job_of(size, SIZES[size], ranks)
    placements = suggest.of_each_placement(job, name, machine, ranks)
    plan = placements[0].plan if placements else make(job, name, machine, ranks)
    other = placements[1:6] if placements else suggest.nearest(job, name, machine, ranks)
    if not as_json:
        print(question.verdict(job, size, placements, size_text))
    _print(plan, other, comparison.compare(plan) if compare else [], None, as_json=as_json)
    if other and placements and not as_json:
        print(f"\n{report.alternatives(other)}")
    return 0 if placements else DOES_NOT_FIT


def _largest(name: str, machine: Machine, gpus: int, *, as_json: bool) -> int:
    from offloadtrain.plan import report
    from offloadtrain.plan.search import largest

    rows = []

    def collected() -> Iterator[LargestRow]:
        for row in largest.largest(name, machine, gpus):
            rows.append(row)
            yield row

    lines = largest.table(collected(), machine, gpus)
    if as_json:
        list(lines)
        entries = [
            {"weights": row.working, "state": row.state, "model": row.model, "params": row.params}
            | ({"plan": report.as_json(row.plan)} if row.plan else {})
            for row in rows
        ]
        print(json.dumps({"machine": name, "ranks": gpus, "rows": entries}))
    else:
        print(f"{name}:")
        for line in lines:  # each as soon as it is known
            print(line, flush=True)
    return 0 if any(row.plan for row in rows) else DOES_NOT_FIT


def _search(config: Config, name: str, machine: Machine, gpus: int, *, as_json: bool) -> int:
    from offloadtrain.parallel.pipeline import search as pipeline_search
    from offloadtrain.plan.placement import resolved

    if config.hf is not None:
        raise ConfigError("--search divides the shipped transformer only: leave out model.hf")
    if config.ranks.shard:
        raise ConfigError(
            f"--search and ranks.shard = {config.ranks.shard}: the replicas of a stage that it "
            "tries share one copy of their state. Set ranks.shard = 0"
        )
    job = resolved(config, machine)
    if reason := pipeline_search.undivided(job):
        print(f"Replicas only: {reason}", file=sys.stderr)
    divisions = pipeline_search.search(job, name, machine, gpus)
    text = f"No division of {job.name} among {gpus} ranks fits {name}."
    if divisions:
        text = "\n".join((f"{job.name} on {gpus} x {name}:", *pipeline_search.table(divisions)))
    rows = pipeline_search.as_json(divisions)
    facts = {"machine": name, "job": job.name, "ranks": gpus, "rows": rows}
    print(json.dumps(facts) if as_json else text)
    return 0 if divisions else DOES_NOT_FIT


def _sweep(
    config: Config, name: str, machine: Machine, counts: list[int], plot: str, *, as_json: bool
) -> int:
    from offloadtrain.plan.search import sweep

    if plot:
        sweep.check_plot(plot)
    points = sweep.sweep(config, name, machine, counts)
    if plot:
        sweep.plot(points, plot, f"{config.name} on {name}")
    facts = {"machine": name, "job": config.name, "points": sweep.as_json(points)}
    print(json.dumps(facts) if as_json else sweep.table(points, name))
    return 0 if any(not point.problem for point in points) else DOES_NOT_FIT


def _fewest(counts: list[int], config: Config) -> int:
    """Return the fewest ranks that the table [ranks] can divide; if none, the fewest."""
    least = config.ranks.pipeline * config.ranks.tensor * config.ranks.expert
    return next((count for count in counts if count % least == 0), counts[0])


def _counts(text: str) -> list[int]:
    from offloadtrain.config.batch_split import parse_ranks

    key, _, values = text.partition("=")
    if key != "gpus":
        raise ConfigError(f"--sweep {text[:40]}: give, for example, gpus=1,2,4")
    return sorted({parse_ranks("--sweep gpus=1,2,4:", part) for part in values.split(",")})


def chosen_machine(name: str, gpu_memory: str, host_memory: str) -> tuple[str, Machine]:
    """Return the named machine, the file's, or this one, with the given memory sizes."""
    from offloadtrain.hardware.machine import find

    if name:
        title, machine = find(name)
    else:
        import torch

        from offloadtrain.runtime.detect_machine import here

        title, machine = here(on_gpu=torch.cuda.is_available())
        if gpu_memory and machine.on_cpu:
            title, machine = f"{STAND_IN}, since this machine has no GPU", find(STAND_IN)[1]
    if gpu_memory:
        if machine.on_cpu:
            raise ConfigError(f"--gpu-memory {gpu_memory}: {title} has no GPU: choose a --machine")
        machine = replace(machine, gpu_memory=_size("--gpu-memory", gpu_memory))
    if host_memory:
        machine = replace(machine, host_memory=_size("--host-memory", host_memory))
    return title, machine


def _size(flag: str, text: str) -> str:
    """Raises ConfigError for no size, or one that no memory has: a number without its unit."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if size < SMALLEST:
        raise ConfigError(f"{flag} {text}: give a size with its unit, such as 24GiB")
    return text
