"""SIGKILL at calls of `offloadtrain convert` that have an effect: to a file or a folder of torch,
and from one to a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.filesystem import FileSystemReader

from offloadtrain.config.job import Config
from offloadtrain.convert import run_import
from offloadtrain.convert.reader import open_foreign
from offloadtrain.convert.torch_export import to_dcp, to_torch
from offloadtrain.train import trained_model
from offloadtrain.train.build import described, empty_model
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.log.console import Console
from tests.train.storage.exports import Convert, Direction, briefly_trained, cases_of
from tests.train.storage.saves import Case, none_unfinished, refuse_damage

EVERY = {"to dcp": 24}
"""Direction → every so many calls are tried: torch's writer of folders has thousands of them."""


def cases(scratch: Path) -> list[Case]:
    """Every call, of conversions of a small run and back."""
    job, trained = briefly_trained(scratch)
    to_torch(trained_model.open_saved(trained), scratch / "source.pt")
    longer = replace(job, train=replace(job.train, steps=9))
    directions = {
        "to torch": Direction(lambda out: to_torch(trained_model.open_saved(trained), out), _file),
        "to dcp": Direction(lambda out: to_dcp(trained_model.open_saved(trained), out), _folder),
        "to a run": Direction(_from_file(longer, scratch / "source.pt"), _run),
    }
    return [
        case
        for name, direction in directions.items()
        for case in cases_of(name, direction, scratch, EVERY.get(name, 1))
    ]


def _file(out: Path, expected_path: Path) -> bool:
    assert not out.exists() or out.read_bytes() == expected_path.read_bytes()
    return out.exists()


def _folder(out: Path, expected_path: Path) -> bool:
    if not out.exists():
        return False
    assert {p.name for p in out.iterdir()} == {p.name for p in expected_path.iterdir()}
    for path in expected_path.glob("*.distcp"):
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    # The index holds the folder's own path, too.
    written, expected = (FileSystemReader(at).read_metadata() for at in (out, expected_path))
    assert written.state_dict_metadata == expected.state_dict_metadata
    assert written.storage_data == expected.storage_data
    return True


def _run(out: Path, expected_path: Path) -> bool:
    newest = checkpoint.newest_good(out / "checkpoints", refuse_damage)
    if newest is None:
        return False
    name = f"{newest.path.name}/rank-000.bin"
    expected = expected_path / "checkpoints" / name
    assert (out / "checkpoints" / name).read_bytes() == expected.read_bytes()
    none_unfinished(out / "checkpoints")
    return True


def _from_file(job: Config, source: Path) -> Convert:
    """A conversion to a run, whose reader's process has answered before: it writes nothing."""
    wanted = list(run_import.model_tensors(empty_model(described(job))))
    with open_foreign(source, None, wanted) as foreign:
        tensors = list(foreign.tensors())
        recorded = SimpleNamespace(
            **{key: getattr(foreign, key) for key in ("kind", "step", "groups", "notes")},
            tensors=lambda: iter(tensors),
        )

    @contextmanager
    def opened(*arguments: Any) -> Iterator[Any]:
        yield recorded

    def to_run(out: Path) -> None:
        with mock.patch.object(run_import, "open_foreign", opened):
            quiet = Console(quiet=True)
            run_import.to_run(job, "", source, optimizer=None, run_dir=out, console=quiet)

    return to_run
