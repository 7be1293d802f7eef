"""The process that reads a checkpoint of another trainer.

    python -m offloadtrain.convert.reader_process SOURCE [OPTIMIZER]

It reads the model's tensors as JSON from stdin. It writes one line of JSON to stdout, the facts or
an error, then the tensors in the model's order. It writes no file, starts no process, and its
memory is limited to twice the bytes of the files plus `_SPARE_BYTES`: see [Note: The reader
process] in `reader.py`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from offloadtrain.convert import dcp_folder, deepspeed_folder
from offloadtrain.convert.checkpoint import (
    ForeignCheckpoint,
    ForeignError,
    MatchedTensors,
    ModelTensor,
)
from offloadtrain.convert.nested_state import read_trees
from offloadtrain.convert.safe_load import load

_SPARE_BYTES = 4 << 30
_CPU_S, _BYTES_PER_CPU_S = 300, 10_000_000


def main(arguments: Sequence[str]) -> int:
    out = sys.stdout.buffer
    try:
        sources = [Path(argument) for argument in arguments]
        wanted = [_wanted(entry) for entry in json.load(sys.stdin)]
        _limit(sum(map(_num_bytes, sources)))
        ordered, facts = read(sources, wanted)
        _send(out, facts)
        for tensor in ordered.tensors():
            out.write(tensor.contiguous().view(torch.uint8).numpy().data)
        out.flush()
    except ForeignError as error:
        _send(out, {"error": str(error)})
        return 1
    except MemoryError:
        _send(out, {"error": f"{arguments[0]}: reading it takes more memory than its files have"})
        return 1
    except Exception as error:  # hostile content may raise any class
        why = f"{type(error).__name__} {error}".partition("\n")[0]
        _send(out, {"error": f"{arguments[0]}: its content is not as expected: {why}"[:300]})
        return 1
    return 0


def _wanted(entry: list[Any]) -> ModelTensor:
    name, shape, aliases, *rest = entry
    return ModelTensor(name, tuple(shape), tuple(aliases), *rest)


def _limit(num_bytes: int) -> None:
    """Limit the resources of this process by the size of the files that it reads."""
    torch.set_num_threads(1)
    seconds = _CPU_S + num_bytes // _BYTES_PER_CPU_S
    data = 2 * num_bytes + _SPARE_BYTES
    for kind, most in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, data),
    ):
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def _num_bytes(source: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if not source.is_dir():
        return source.stat().st_size if source.exists() else 0
    return sum(
        os.stat(os.path.join(folder, name), follow_symlinks=False).st_size
        for folder, _, names in os.walk(source)
        for name in names
    )


def read(
    sources: Sequence[Path], wanted: Sequence[ModelTensor]
) -> tuple[MatchedTensors, dict[str, Any]]:
    """Return the tensors, which are read later, and the facts for the first line.

    Raises:
        ForeignError: a source cannot be read, or is of another model.
    """
    try:
        checkpoint, kind = _recognized(sources, wanted)
        ordered = MatchedTensors(checkpoint, wanted)
    except ForeignError as error:
        text = str(error)
        origin = str(sources[0])
        raise ForeignError(text if text.startswith(origin) else f"{origin}: {text}") from None
    groups = [[list(group.names), dict(group.values)] for group in checkpoint.groups]
    return ordered, {
        "kind": kind,
        "step": checkpoint.step,
        "groups": groups,
        "notes": ordered.notes,
    }


def _recognized(
    sources: Sequence[Path], wanted: Sequence[ModelTensor]
) -> tuple[ForeignCheckpoint, str]:
    for source in sources:
        if not source.exists():
            raise ForeignError(f"{source} is not there")
    if len(sources) == 1 and (folder := deepspeed_folder.checkpoint_in(sources[0])):
        return deepspeed_folder.read_folder(folder, wanted), "DeepSpeed's ZeRO"
    trees, kinds = [], []
    for source in sources:
        is_dcp = (source / dcp_folder.INDEX).is_file()
        if source.is_dir() and not is_dcp:
            raise ForeignError(
                f"{source} has neither .metadata (torch.distributed.checkpoint) nor "
                "*_optim_states.pt (DeepSpeed)"
            )
        trees.append(dcp_folder.read_folder(source) if is_dcp else load(source))
        kinds.append("torch.distributed.checkpoint" if is_dcp else "torch")
    return read_trees(trees, wanted), kinds[0]


def _send(out: IO[bytes], facts: dict[str, Any]) -> None:
    out.write(json.dumps(facts).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
