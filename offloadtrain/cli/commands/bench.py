"""`offloadtrain bench`, and `offloadtrain report` on results of `make gpu`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offloadtrain.cli.options import Count, Json
from offloadtrain.config.errors import ConfigError, InputError
from offloadtrain.config.units import parse_bytes

STATES = ("fp32", "split16", "int8")


def adam(
    *,
    n: str = "64M",
    threads: str = "1,2",
    rounds: Count = 11,
    states: str = ",".join(STATES),
    as_json: Json = False,
) -> None:
    """Compare CPU Adam and the other rules with the memory limit, torch and DeepSpeed if installed.

    All cases alternate in one process; ratios are medians of ratios within a round.

    Parameters
    ----------
    n
        Number of parameters: 64M is 64 * 2^20. Each takes about 55 bytes of host memory.
    threads
        Numbers of threads to measure, separated by commas.
    rounds
        Number of times every case runs.
    states
        State formats to measure, separated by commas: fp32, split16, int8.
    as_json
        Print one JSON object instead of the tables.
    """
    numel, counts = _numel(n), _counts("--threads", threads)
    chosen = _states(states)

    from offloadtrain.cli.bench import adam as bench

    def tell(count: int, number: int) -> None:
        _say(f"{count} thread{'s' if count > 1 else ''}, round {number}/{rounds}")

    rows = bench.run(numel, counts, rounds, chosen, tell)
    dispatch_us = bench.dispatch_us()
    facts = {
        "deepspeed": bench.deepspeed_version(),
        "n": numel,
        "rounds": rounds,
        "dispatch_us": dispatch_us,
        "rows": rows,
    }
    title = f"{numel} parameters, medians of {rounds} rounds; DS: DeepSpeed"
    dispatch = f"dispatch of one bucket: {dispatch_us:.1f} us"
    _show(as_json, facts, f"{title}\n", bench.table(rows), "", dispatch)


def step(
    *,
    layers: Count = 12,
    steps: Count = 10,
    rounds: Count = 5,
    as_json: Json = False,
) -> None:
    """Compare a step with its schedule, and with the same model in plain torch.

    The first part runs on threads, with a fixed time for every operation, and measures the engine's
    overhead. The second part alternates the demo model offloaded and resident on the device.

    Parameters
    ----------
    layers
        Blocks of the paced model.
    steps
        Measured steps of the paced model.
    rounds
        Number of times the demo model runs, offloaded and resident.
    as_json
        Print one JSON object instead of the tables.
    """
    from offloadtrain.cli.bench import step as bench

    rows, demo = bench.run(layers, steps, _say), bench.run_demo(rounds, _say)
    _show(
        as_json,
        {"paced": rows, "demo": demo},
        f"{layers} paced blocks on threads, medians of {steps} steps\n",
        bench.table(rows),
        "\nthe demo model, medians of ratios within a round\n",
        bench.demo_table(demo),
    )


def scale(
    *,
    ranks: str = "1,2,4",
    layers: Count = 8,
    steps: Count = 10,
    rounds: Count = 3,
    as_json: Json = False,
) -> None:
    """Measure how a step scales with ranks at constant work per rank.

    The first part runs on threads, with a fixed time for every operation, and measures the cost of
    ranks. The second part trains the demo model, one rank per GPU; without a GPU, one thread each.

    Parameters
    ----------
    ranks
        Numbers of ranks, at least 1, separated by commas.
    layers
        Blocks of the paced model.
    steps
        Measured steps of each case.
    rounds
        Number of times every number of ranks runs.
    as_json
        Print one JSON object instead of the table.
    """
    counts = sorted({1, *_counts("--ranks", ranks)})

    import torch

    from offloadtrain.cli.bench import scale as scaling

    gpus = torch.cuda.device_count()
    if gpus and counts[-1] > gpus:
        raise ConfigError(f"--ranks {ranks}: there are {gpus} GPUs, one for each rank")
    rows = scaling.run(counts, layers=layers, steps=steps, rounds=rounds, say=_say)
    _show(as_json, {"rows": rows}, scaling.table(rows))


def disk(
    *,
    folder: str = ".",
    size: str = "1GiB",
    rounds: Count = 5,
    as_json: Json = False,
) -> None:
    """Compare an update of state on the disk with what the drive reads and writes at once.

    Four cases alternate in one process: O_DIRECT read, write, both at once, and the update of a
    model with state in a file there.

    Parameters
    ----------
    folder
        Folder on the drive to measure. The files have no name and end with the process.
    size
        Size of the state, such as 4GiB; the drive needs room for twice as much, and every round
        writes it three times.
    rounds
        Number of times every case runs.
    as_json
        Print one JSON object instead of the table.
    """
    try:
        num_bytes = parse_bytes(size)
    except ValueError as error:
        raise ConfigError(f"--size {size}: {error}") from None

    from offloadtrain.cli.bench import disk as bench

    rows = bench.run(folder, num_bytes, rounds, _say)
    title = f"medians of {rounds} rounds\n"
    _show(as_json, {"disk": rows}, title, bench.table(rows))


def report(folder: Path = Path("benchmarks/results"), /, *, all: bool = False) -> None:
    """Print the steps measured on GPUs as a table, from results files only.

    Parameters
    ----------
    folder
        Folder with the results files of `make gpu`.
    all
        Also print plans, goals, the machine's rates and what was not measured.
    """
    from offloadtrain.cli import results_tables

    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder: give that of the results, benchmarks/results in a clone of "
            "the repository, where `make gpu` writes them"
        )
    files = results_tables.read(folder)
    print(results_tables.everything(files) if all else results_tables.summary(files))


def _say(text: str) -> None:
    """Print the progress: a line that is rewritten on a terminal, new lines elsewhere."""
    line, end = (f"\r{text:60}", "") if sys.stderr.isatty() else (text, "\n")
    print(line, end=end, file=sys.stderr, flush=True)


def _show(as_json: bool, facts: dict[str, Any], *text: str) -> None:
    """Print the facts and the machine as one JSON object, or the text; below the progress line."""
    import torch

    from offloadtrain.hardware.telemetry import probe
    from offloadtrain.runtime import kernels

    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        here = {"machine": asdict(probe()), "kernels": asdict(kernels.backend())}
        print(json.dumps(here | {"torch": torch.__version__} | facts))
    else:
        print(*text, sep="\n")


_NUMEL = re.compile(r"([1-9][0-9]*)([KMG]?)", re.IGNORECASE)


def _numel(text: str) -> int:
    match = _NUMEL.fullmatch(text)
    if match is None:
        raise ConfigError(f"--n {text}: give a number such as 64M (64 * 2^20), 1G or 1000")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _counts(flag: str, text: str) -> list[int]:
    counts = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise ConfigError(f"{flag} {text}: give numbers of at least 1, separated by commas")
    return counts


def _states(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [state for state in chosen if state not in STATES]
    if unknown:
        raise ConfigError(f"--states {text}: {unknown[0]!r} is not one of {', '.join(STATES)}")
    return chosen
