"""`offloadtrain checkpoints`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offloadtrain.cli.exit_codes import DONE, FAILED
from offloadtrain.config.errors import ConfigError

MOST_PRINTED = 20
"""Most problems that are printed to stderr; `--json` has those of all checkpoints."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One checkpoint of a run.

    Attributes:
        state: "listed" (its files are there), "verified" (each byte was read), "damaged" or
            "newer" (of a later version of the format).
        ranks: those that wrote it.
    """

    name: str
    state: str
    num_bytes: int = 0
    ranks: int = 0
    problem: str = ""


def checkpoints(
    run: Path,
    /,
    *,
    verify: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """List the checkpoints of a run, the newest first: name, state, size, ranks.

    Exit code 1 if one of them is damaged.

    Parameters
    ----------
    run
        A run folder.
    verify
        Read every byte and compare it with its hash.
    as_json
        Print one JSON object per line.
    """
    from offloadtrain.train.checkpoint import checkpoint

    folder = run / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{run} is not a run folder: it has no folder checkpoints")
    damaged, problems = False, 0
    for path in checkpoint.find(folder):
        row = _row(path, verify=verify)
        damaged = damaged or row.state == "damaged"
        print(json.dumps(asdict(row)) if as_json else _line(row), flush=True)
        problems += bool(row.problem)
        if row.problem and problems <= MOST_PRINTED:
            print(row.problem, file=sys.stderr)
    if problems > MOST_PRINTED:
        print(f"{problems - MOST_PRINTED} more problems: --json has them all", file=sys.stderr)
    return FAILED if damaged else DONE


def _row(path: Path, *, verify: bool) -> _Row:
    from offloadtrain.train.checkpoint import checkpoint
    from offloadtrain.train.checkpoint.manifest import CheckpointError, DamagedCheckpointError

    try:
        opened = (checkpoint.verify if verify else checkpoint.open_checkpoint)(path)
    except DamagedCheckpointError as damage:
        return _Row(path.name, "damaged", problem=str(damage))
    except CheckpointError as error:
        return _Row(path.name, "newer", problem=str(error))
    manifest, state = opened.manifest, "verified" if verify else "listed"
    return _Row(path.name, state, manifest.num_bytes, len(manifest.sizes))


def _line(row: _Row) -> str:
    from offloadtrain.config.units import format_bytes

    return f"{row.name}\t{row.state}\t{format_bytes(row.num_bytes)}\t{row.ranks}"
