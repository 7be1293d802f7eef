"""`offloadtrain plan`."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from cyclopts import Parameter

from offloadtrain.boundary.output import say_on_stderr
from offloadtrain.cli.exit_codes import DOES_NOT_FIT
from offloadtrain.cli.options import Flag, Json, Overrides
from offloadtrain.config import toml
from offloadtrain.config.batch_split import of_stage, parse_ranks, shared
from offloadtrain.config.errors import ConfigError, OffloadTrainError, broken
from offloadtrain.config.units import format_bytes, format_count, parse_bytes, parse_count

if TYPE_CHECKING:
    from offloadtrain.config.job import Config
    from offloadtrain.hardware.machine import Machine
    from offloadtrain.plan.costs.microbatch import Trace
    from offloadtrain.plan.plan import Plan
    from offloadtrain.plan.run_cost import RunCost
    from offloadtrain.plan.search.largest import Row as LargestRow
    from offloadtrain.plan.search.question import Answer, Question
    from offloadtrain.plan.search.suggest import Change

SMALLEST = 1 << 20
"""Smallest memory size that is accepted, in bytes."""

FIRST_SAID_S = 1.0
"""Silence before the first progress line, in seconds."""

Several: TypeAlias = Annotated[
    tuple[str, ...], Parameter(consume_multiple=1, negative=(), show_default=False)
]

Traces: TypeAlias = dict[bool, tuple["Config", "Trace"]]
"""Traces of one model: True for a CPU, False for any GPU → its described job, and the trace."""

STAND_IN = "rtx4090"
"""Shipped machine whose rates are used if only the memory of a GPU is given."""


@contextmanager
def _planning() -> Iterator[None]:
    """Show progress on a terminal from 1 s on, and run garbage collection less often."""
    from offloadtrain.boundary.sanitize import unfiltered
    from offloadtrain.train.log.console import Console

    # A model has many small objects: by default Python scans them all after every 700 new
    # ones, which takes a quarter of the plan of a deep model.
    threshold = gc.get_threshold()
    gc.set_threshold(20_000)
    console = Console(quiet=not unfiltered(sys.stderr).isatty())
    try:
        with console.never_silent("planning", first_after_s=FIRST_SAID_S):
            yield
    finally:
        gc.set_threshold(*threshold)


@_planning()
def plan(
    job: str = "",
    /,
    *,
    overrides: Overrides = (),
    machine: Several = (),
    gpus: str = "",
    gpu_memory: Annotated[str, Parameter(name=("--gpu-memory", "--gpu"))] = "",
    host_memory: Annotated[str, Parameter(name=("--host-memory", "--host"))] = "",
    host_reserve: str = "",
    hf: Several = (),
    fine_tune: str = "",
    save: str = "",
    tokens: str = "",
    data: str = "",
    epochs: float = 0.0,
    price: str = "",
    largest: Flag = False,
    compare: Flag = False,
    search: Flag = False,
    sweep: str = "",
    why: Flag = False,
    as_json: Json = False,
) -> int:
    """Print the memory of a job by owner, the time of a step, and whether the job fits.

    Nothing is allocated. If the job does not fit, the exit code is 4 and the smallest changes that
    make it fit are printed, the fastest first. With --hf or --fine-tune the first line says whether
    the model can be fine-tuned, and the last ones are a job.

    Parameters
    ----------
    job
        A job file, or the name of a shipped job (`offloadtrain ls`).
    overrides
        KEY=VALUE ...: values that override the job's. A search (--hf, --fine-tune) leaves these
        keys alone.
    machine
        A machine file (`offloadtrain doctor --save FILE.toml`), or the name of a shipped one: dgx2,
        v100_32gb, t4, a10g, l4, a100_40gb, a100_80gb, h100, h100_16cores, h100_pcie, h200, gh200,
        b200, l40s, a6000, rtx2080ti, rtx3060, rtx3090, rtx4060ti, rtx4080, rtx4090, rtx5060ti,
        rtx5090, rtx_pro6000, mi300x (a plan only: the engine needs CUDA), cpu2. Default: the job's
        device.machine, else this machine, with the rates of the most similar shipped one.
        Several with --hf or --fine-tune: a table.
    gpus
        Number of ranks, one per GPU; default 1. They divide the job's batch.
    gpu_memory
        Memory of each GPU, such as 32GiB, instead of the machine's.
    host_memory
        Memory of each host, such as 128GiB, instead of the machine's.
    host_reserve
        Of that memory, what other programs use: 4GiB on the shipped desktops (their kernel, windows
        and a browser), else nothing.
    hf
        A folder with config.json, that file, a name in the cache of Hugging Face, or a published
        model (Qwen2.5, Qwen3, Llama 3, Gemma 3, Mistral, gpt-oss), without a network: whether this
        causal language model can be fine-tuned on the machine with 32,768 tokens per step in
        sequences of 2048, and the fastest placement, format and microbatch (no JOB). Several: a
        table.
    fine_tune
        The same for a number of parameters, such as 8B, or a published model.
    save
        With --hf or --fine-tune: write the job of the answer into this new file.
    tokens
        Tokens of the run, such as 10B, in the place of the job's steps.
    data
        A token file, or text or records as data.source takes them: the run has their tokens.
    epochs
        How often the run sees --data, default 1, or without it the job's data.
    price
        Price of a host's hour, such as 0.35/h or $0.35/h: print what the run costs.
    largest
        Print the largest published model that trains on the machine with 32,768 tokens per step,
        per placement and state format (no JOB).
    compare
        Also print what DeepSpeed's ZeRO-2 and ZeRO-3 offload, FSDP2's CPU offload and torchao need
        for the same step on this machine, their predicted speed, and how far such predictions were
        off.
    search
        With --gpus N: print the fastest divisions of the job's step into stages of a pipeline,
        replicas, microbatches and recompute, each simulated stage by stage and link by link.
        Matrices and experts stay divided as the job says (ranks.tensor, ranks.expert).
    sweep
        gpus=1,2,4,...: plan the job for each number of GPUs, each GPU with the whole batch of the
        job, with the optimizer state on the hosts (ZeRO stages 1 to 3) and on the GPUs (0 to 3).
    why
        Also print what bounds the step, and the three changes of one key that gain most.
    as_json
        Print one JSON object.
    """
    from offloadtrain.plan.run_cost import parse_price, run_cost

    models, machines = (*hf, fine_tune) if fine_tune else hf, machine or ("",)
    one_answer = len(models) == len(machines) == 1
    ranks, hourly = parse_ranks("--gpus", gpus or "1"), parse_price(price) if price else None
    searches = {"--search": search, "--largest": largest, "--sweep": sweep, "--gpus": gpus}
    _check_alone(searches | {"JOB": job, "--set": overrides, "--hf": hf, "--fine-tune": fine_tune})
    one_plan = (one_answer or not models) and not (largest or search or sweep)
    of_one_plan = not one_plan and (tokens or data or price or epochs or compare or why)
    _check_several(() if models else machine, "" if one_answer else save, bool(of_one_plan))
    chosen = partial(chosen_machine, sizes=(gpu_memory, host_memory, host_reserve))
    if largest:
        return _largest(*chosen(machines[0]), ranks, as_json=as_json)
    if models and not one_answer:
        return _table(hf, fine_tune, overrides, list(map(chosen, machines)), ranks, as_json=as_json)
    changed = (*overrides, *_with_data(data, hf[0] if hf else ""))
    question = _question(models[0], bool(hf), changed, ranks) if models else None
    config = question.job if question else _job(job, changed)
    count = _run_tokens(config, tokens, data, epochs)
    name, target = chosen(machines[0] or config.device.machine)
    if search:
        return _search(config, name, target, ranks, as_json=as_json)
    if sweep:
        return _sweep(config, name, target, _counts(sweep), as_json=as_json)
    answer = None
    if question is None:
        planned, alternatives, trace = _planned(config, name, target, ranks, compare=compare)
    else:
        answer, trace = _answer(question, name, target, ranks, count)
        planned, alternatives = answer.shown(as_json=as_json)
    run = run_cost(planned, tokens=count, price=hourly)
    _print(planned, alternatives, trace, answer, run, compare=compare, why=why, as_json=as_json)
    _save(answer, save)
    return 0 if (answer.fits if answer else planned.fits) else DOES_NOT_FIT


_ALONE: dict[str, tuple[str, tuple[str, ...]]] = {
    "--sweep": ("plans several numbers of GPUs", ("--gpus",)),
    "--search": ("tries the divisions of one job", ("--hf", "--fine-tune", "--sweep")),
    "--largest": ("searches over models", ("JOB", "--hf", "--fine-tune", "--sweep", "--set")),
    "--hf": ("asks for a model", ("JOB", "--sweep")),
    "--fine-tune": ("asks for a model", ("JOB", "--sweep")),
}
"""Flag → (its effect, for messages; the flags that it excludes)."""


def _check_alone(values: Mapping[str, object]) -> None:
    """Raise ConfigError if two flags exclude each other. `values`: flag → its value."""
    for flag, (does, excluded_flags) in _ALONE.items():
        for excluded in excluded_flags:
            if values[flag] and values[excluded]:
                surplus = values[excluded] if excluded == "JOB" else excluded
                raise ConfigError(f"{flag} {does}: leave out {surplus}")


def _check_several(machines: Sequence[str], save: str, of_one_plan: bool) -> None:
    """Raise ConfigError if several plans are requested with a flag for a single plan.

    Args:
        machines: values of --machine, with a JOB.
        save: value of --save; "" without it.
    """
    problems = broken(
        (save, f"--save {save}: it is for one --hf or --fine-tune and one --machine"),
        (
            len(machines) > 1,
            f"--machine {' '.join(machines)}: several are for --hf. A JOB comes before --machine",
        ),
        (of_one_plan, "--tokens, --data, --epochs, --price, --compare and --why are for one plan"),
    )
    if problems:
        raise ConfigError(problems[0])


def _run_tokens(job: Config, tokens: str, data: str, epochs: float) -> int:
    """Return the tokens of the run; 0: those of the job's steps.

    Raises:
        ConfigError, DataError: the number is invalid, or the data cannot be read.
    """
    if tokens and (data or epochs):
        raise ConfigError(f"--tokens {tokens}: leave out --data and --epochs")
    if not 0 <= epochs < float("inf"):
        raise ConfigError(f"--epochs {epochs}: give more than 0")
    if tokens:
        try:
            count = parse_count(tokens)
        except ValueError as error:
            raise ConfigError(f"--tokens: {error}") from None
    elif data or epochs:
        from offloadtrain.train.build import epoch_tokens

        count = (epochs or 1) * epoch_tokens(job)
    else:
        return 0
    if not 1 <= count <= 1e18:
        flag = f"--tokens {tokens[:40]}" if tokens else f"--epochs {epochs}"
        raise ConfigError(f"{flag}: give at least 1 token, and no more than any data have")
    return ceil(count)


def _planned(
    config: Config, name: str, target: Machine, ranks: int, *, compare: bool
) -> tuple[Plan, Sequence[Change], Trace | None]:
    """Plan a job; return (plan, changes that make it fit if it does not, trace of its model)."""
    from offloadtrain.plan.search import compare as comparison
    from offloadtrain.plan.search import suggest

    config, trace = _described(config, target, ranks)
    if compare:
        comparison.check(config, target)
    planned = suggest.planned(config, name, target, ranks, trace)
    if planned.fits:
        return planned, [], trace
    return planned, suggest.nearest(planned.job, name, target, ranks, trace=trace), trace


def _print(
    planned: Plan,
    alternatives: Sequence[Change],
    trace: Trace | None,
    answer: Answer | None,
    run: RunCost,
    *,
    compare: bool,
    why: bool,
    as_json: bool,
) -> None:
    """Print a plan; `answer` is the search for the model whose best plan this is, if any."""
    from offloadtrain.plan import report
    from offloadtrain.plan.search import compare as comparison
    from offloadtrain.plan.search import why as answers

    rows = comparison.compare(planned, trace) if compare else []
    reasons = answers.why(planned, trace) if why and planned.fits else None
    if as_json:
        result = report.as_json(planned, alternatives, run)
        result |= {"compare": comparison.as_json(rows)} if rows else {}
        result |= {} if reasons is None else {"why": answers.as_json(reasons)}
        result |= {} if answer is None else {"answer": answer.line, "job_file": answer.job_text}
        print(json.dumps(result))
        return
    if answer is not None:
        print(answer.line)
    print(report.text(planned, alternatives, run))
    if rows:
        print(f"\n{comparison.table(rows, planned)}")
    if reasons is not None:
        print(f"\n{answers.text(reasons)}")
    if answer is not None and planned.fits:
        if alternatives:
            print(f"\n{report.alternatives(alternatives)}")
        print(f"\nThe job (--save FILE.toml writes it):\n{answer.job_text}", end="")


def _job(job: str, overrides: tuple[str, ...]) -> Config:
    from offloadtrain.cli.commands.jobs import find_job
    from offloadtrain.config import job as jobs

    if not job:
        raise ConfigError(
            "give a job file or the name of a shipped job (offloadtrain ls), or --hf FOLDER"
        )
    return jobs.load(find_job(job), overrides, say_on_stderr)


def _question(model: str, is_hf: bool, overrides: tuple[str, ...], ranks: int) -> Question:
    """`model`: a folder or name of Hugging Face if `is_hf`, else a number of parameters."""
    from offloadtrain.config.hf_model import find_folder, published_name
    from offloadtrain.plan.search import question

    if known := published_name(model):
        is_hf = True
        try:
            find_folder(model)
        except FileNotFoundError:
            say_on_stderr(f"{model} is planned by its published sizes: hf download {known}")
    if is_hf:
        folder = str(Path(model).parent) if Path(model).name == "config.json" else model
        label = Path(folder).absolute().name
        return question.asked(label, "hf", folder, overrides, ranks, say_on_stderr)
    size = question.sized(model)
    label = model if model == size else f"{model} ({size})"
    return question.asked(label, "size", size, overrides, ranks, say_on_stderr)


def _answer(
    question: Question,
    name: str,
    machine: Machine,
    ranks: int,
    tokens: int = 0,
    *,
    traces: Traces | None = None,
    only_best: bool = False,
) -> tuple[Answer, Trace | None]:
    """Answer a question; for the arguments see `_described` and `question.answer`."""
    from offloadtrain.plan.search import question as questions

    config, trace = _described(question.job, machine, ranks, traces)
    described, most = replace(question, job=config), 1 if only_best else questions.SHOWN
    return questions.answer(described, name, machine, ranks, trace, tokens, most), trace


def _save(answer: Answer | None, path: str) -> None:
    """Write the job of a question's answer if a path is given.

    Raises:
        ConfigError: the file exists or cannot be written, or nothing fits.
    """
    if answer is None or not path:
        return
    if not answer.job_text:
        raise ConfigError(f"--save {path}: there is no job to save. {answer.line}")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(answer.job_text)
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror}") from None


def _table(
    hf: Sequence[str],
    fine_tune: str,
    overrides: tuple[str, ...],
    machines: Sequence[tuple[str, Machine]],
    ranks: int,
    *,
    as_json: bool,
) -> int:
    """Print one line per model and machine. If it cannot be planned, the line has the reason."""
    from offloadtrain.plan.search.suggest import text_of

    models = [(model, True) for model in hf] + [(fine_tune, False)] * bool(fine_tune)
    rows = []
    if not as_json:
        sizes = f"{'GPU':>9} {'host':>9} {'tokens/s':>8}"
        print(f"{'model':22} {'machine':14} {'fits':4} {sizes}  with")
    for model, is_hf in models:
        question, traces = None, Traces()
        for name, machine in machines:
            row = {"model": model, "machine": name, "fits": False}
            line = f"{Path(model).name:22} {name:14}"
            try:
                question = question or _question(model, is_hf, overrides, ranks)
                answer, _ = _answer(question, name, machine, ranks, traces=traces, only_best=True)
            except OffloadTrainError as error:
                row |= {"problem": str(error)}
                line = f"{line} -    {error}"
            else:
                best = answer.best
                device, host = sum(best.device.values()), max(best.host_peaks.values())
                rate = best.prediction.tokens_per_s if best.fits else 0.0
                row |= {"fits": answer.fits, "answer": answer.line, "job_file": answer.job_text}
                row |= {"device_bytes": device, "host_bytes": host, "tokens_per_s": rate}
                line = (
                    f"{line} {'yes' if answer.fits else 'no':4} {format_bytes(device):>9} "
                    f"{format_bytes(host):>9} {format_count(rate) if rate else '-':>8}  "
                    f"{text_of(answer.keys)}"
                )
            rows.append(row)
            if not as_json:
                print(line, flush=True)
    if as_json:
        print(json.dumps({"ranks": ranks, "rows": rows}))
    return 0 if any(row["fits"] for row in rows) else DOES_NOT_FIT


def _described(
    config: Config, machine: Machine, ranks: int, traces: Traces | None = None
) -> tuple[Config, Trace | None]:
    """Return the job with all parameters of its model, and the trace of a microbatch if one is
    needed: a trace takes torch, and parameters take transformers. A model that cannot be traced is
    planned by its shape, with a message on stderr.

    Args:
        traces: traces for the same job on other machines; this one is added.
    """
    if config.hf is None and config.offload.activations.mode != "offload_saved":
        return config, None
    from offloadtrain.plan.placement import resolved
    from offloadtrain.plan.tracing.step import TraceError
    from offloadtrain.train.build import described, tracer_of

    if not machine.on_cpu:
        machine.check_has(ranks)
    traces = {} if traces is None else traces
    if machine.on_cpu not in traces:
        config = described(config)
        traces[machine.on_cpu] = config, tracer_of(config, machine, ranks)
    config, trace = traces[machine.on_cpu]
    of_rank = shared(resolved(config, machine), ranks)
    stages = range(config.ranks.stages) if config.ranks.pipeline > 1 else ()
    # Whether a stage can be traced does not depend on its number of layers.
    of_rank = replace(of_rank, ranks=replace(of_rank.ranks, layers_per_stage=()))
    try:
        for stage_job in [of_stage(of_rank, number) for number in stages] or [of_rank]:
            trace(stage_job)
    except TraceError as error:
        if config.offload.activations.mode == "offload_saved":
            raise  # the shape does not determine which saved tensors move
        say_on_stderr(f"{error}. Activations and times are estimates by its shape")
        return config, None
    return config, trace


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
        for line in lines:  # print each as soon as it is known
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
    lines = [f"No division of {job.name} among {gpus} ranks fits {name}."]
    if divisions:
        lines = [f"{job.name} on {gpus} x {name}:", *pipeline_search.table(divisions)]
    rows = pipeline_search.as_json(divisions)
    facts = {"machine": name, "job": job.name, "ranks": gpus, "rows": rows}
    print(json.dumps(facts) if as_json else "\n".join(lines))
    return 0 if divisions else DOES_NOT_FIT


def _sweep(config: Config, name: str, machine: Machine, counts: list[int], *, as_json: bool) -> int:
    from offloadtrain.plan.search import suggest, sweep

    # Describe it for the fewest ranks that [ranks] can divide; if there are none, the fewest.
    least = config.ranks.pipeline * config.ranks.tensor * config.ranks.expert
    fewest = next((count for count in counts if count % least == 0), counts[0])
    described, trace = _described(config, machine, fewest)
    config = suggest.planned(described, name, machine, fewest, trace).job
    points = sweep.sweep(config, name, machine, counts)
    facts = {"machine": name, "job": config.name, "points": list(map(asdict, points))}
    print(json.dumps(facts) if as_json else sweep.table(points, name))
    return 0 if any(not point.problem for point in points) else DOES_NOT_FIT


def _counts(text: str) -> list[int]:
    key, _, values = text.partition("=")
    if key != "gpus":
        raise ConfigError(f"--sweep {text[:40]}: give, for example, gpus=1,2,4")
    return sorted({parse_ranks(f"--sweep {text[:40]}: gpus =", part) for part in values.split(",")})


def _with_data(data: str, hf: str) -> tuple[str, ...]:
    """Return overrides for a token file, or for text or records, which a transformers model reads
    with its own tokenizer."""
    from offloadtrain.data.tokens import is_token_file

    if not data or is_token_file(data):
        return (f"data.train={toml.text_of(data)}",) if data else ()
    overrides = (f"data.source={toml.text_of(data)}", 'data.train=""')
    return (*overrides, f"data.tokenizer={toml.text_of(hf)}") if hf else overrides


def chosen_machine(name: str, sizes: tuple[str, str, str]) -> tuple[str, Machine]:
    """Return the named machine, the machine of a file, or this one, with the given memory sizes: of
    a GPU, of a host, and reserved on the host for other programs; "" keeps the machine's."""
    from offloadtrain.hardware.machine import find

    gpu_memory, host_memory, host_reserve = sizes
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
    if host_reserve:
        reserve = "" if host_reserve == "0" else _size("--host-reserve", host_reserve)
        machine = replace(machine, host_reserved=reserve)
    return title, machine


def _size(flag: str, text: str) -> str:
    """Return the text if it is a valid size with a unit; raise ConfigError otherwise."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if size < SMALLEST:
        raise ConfigError(f"{flag} {text}: give a size with its unit, such as 24GiB")
    return text
