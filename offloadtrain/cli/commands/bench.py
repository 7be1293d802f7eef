"""`offloadtrain bench`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from typing import Any

from offloadtrain.cli.options import Count, Json
from offloadtrain.config.errors import ConfigError
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
        print(f"\r{count} threads, round {number}/{rounds} ", end="", file=sys.stderr, flush=True)

    rows = bench.run(numel, counts, rounds, chosen, tell)
    dispatch_us = bench.dispatch_us()
    facts = {
        "deepspeed": bench.deepspeed_version(),
        "n": numel,
        "rounds": rounds,
        "dispatch_us": dispatch_us,
        "rows": rows,
    }
    show(
        as_json,
        facts,
        f"{numel} parameters, medians of {rounds} rounds; DS: DeepSpeed\n",
        bench.table(rows),
        f"\ndispatch of one bucket: {dispatch_us:.1f} us",
    )


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

    rows = bench.run(folder, num_bytes, rounds, say)
    facts = {"disk": list(map(asdict, rows))}
    show(as_json, facts, f"medians of {rounds} rounds\n", bench.table(rows))


def say(text: str) -> None:
    print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def show(as_json: bool, facts: dict[str, Any], *text: str) -> None:
    """Print the facts and the machine as one JSON object, or the text; below the progress line."""
    print(file=sys.stderr)
    if as_json:
        print(json.dumps(_machine() | facts))
    else:
        print(*text, sep="\n")


def _machine() -> dict[str, Any]:
    import torch

    from offloadtrain.hardware.telemetry import probe
    from offloadtrain.runtime import kernels

    return {
        "machine": asdict(probe()),
        "kernels": asdict(kernels.backend()),
        "torch": torch.__version__,
    }


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
