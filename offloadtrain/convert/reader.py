"""Reads a checkpoint of another trainer in a separate process.

[Note: The reader process]
Such checkpoints are pickles. torch reads them with `weights_only`, which resolves only names of
tensors, and the index of torch.distributed.checkpoint is read without resolving any name. A
defect in either would run with the rights of the process. So a separate process reads them: it
has no environment, can write no file and start no process, and its memory and time are bounded.
It returns over a pipe one line of JSON, then bytes whose number is known in advance. The
reader has the user's rights to read files; against a hostile file that exploits a defect in torch,
use a separate user as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import offloadtrain
from offloadtrain.convert.checkpoint import MOMENTS, ForeignError, Group, ModelTensor

_MOST_FACTS_BYTES = 64 << 20
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
"""Environment variables with which Python and torch find their libraries."""


@dataclass(frozen=True, slots=True)
class CheckpointStream:
    """The tensors of a checkpoint that matches the job's model, as sent by the reader.

    Attributes:
        kind: the library that wrote it.
        step: number of completed optimizer steps.
        groups: hyperparameters of its training.
        notes: sentences for the user.
    """

    kind: str
    step: int
    groups: Sequence[Group]
    notes: Sequence[str]
    _wanted: Sequence[ModelTensor]
    _pipe: IO[bytes]
    _source: Path

    def tensors(self) -> Iterator[tuple[ModelTensor, dict[str, Tensor]]]:
        """Yield every tensor of the model once, in order: fp32 "master" and moments of a trained
        parameter, "weight" of other tensors.

        Raises:
            ForeignError: the reader ended before the last tensor.
        """
        for target in self._wanted:
            kinds = ("master", *MOMENTS) if target.trained else ("weight",)
            dtype = torch.float32 if target.trained else getattr(torch, target.dtype)
            yield target, {kind: self._tensor(target, dtype) for kind in kinds}

    def _tensor(self, target: ModelTensor, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(target.shape, dtype=dtype, device="cpu")
        rest = tensor.view(-1).view(torch.uint8).numpy().data
        while len(rest):
            count = self._pipe.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise ForeignError(
                    f"{self._source}: the reader ended in the midst of '{target.name}'"
                )
            rest = rest[count:]
        return tensor


@contextmanager
def open_foreign(
    source: Path, optimizer: Path | None, wanted: Sequence[ModelTensor]
) -> Iterator[CheckpointStream]:
    """Start the reader, which compares a checkpoint with the model; tensors are read later.

    Args:
        source: a file of `torch.save`, a folder of torch.distributed.checkpoint or of DeepSpeed.
        optimizer: file or folder of the optimizer's state, if not in `source`.

    Raises:
        ForeignError: it cannot be read, or is not of this model.
    """
    paths = [os.path.abspath(path) for path in (source, optimizer) if path is not None]
    command = [sys.executable, "-P", "-m", "offloadtrain.convert.reader_process", *paths]
    with subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # the reader has ended; `_facts` reports why
                process.stdin.write(json.dumps(wanted).encode())
                process.stdin.close()
            facts = _facts(source, process)
            groups = [Group(tuple(names), values) for names, values in facts["groups"]]
            yield CheckpointStream(
                str(facts["kind"]),
                int(facts["step"]),
                groups,
                [str(note) for note in facts["notes"]],
                wanted,
                process.stdout,
                source,
            )
        finally:
            process.kill()


def _environment() -> Mapping[str, str]:
    variables = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
    root = str(Path(offloadtrain.__file__).parent.parent)
    return variables | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _facts(source: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Read the reader's first line.

    Raises:
        ForeignError: it is an error, or is missing.
    """
    assert process.stdout is not None
    line = process.stdout.readline(_MOST_FACTS_BYTES)
    try:
        facts: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ForeignError(f"{source}: the reader ended with {_end(process)}") from None
    if "error" in facts:
        raise ForeignError(str(facts["error"]))
    return facts


def _end(process: subprocess.Popen[bytes]) -> str:
    process.kill()
    code = process.wait()
    if code >= 0:
        return f"exit code {code}"
    named = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"{named}, and has no checkpoint to tell of"
