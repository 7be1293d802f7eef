"""Facts about this machine and installation: `offloadtrain doctor` and `offloadtrain version`."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

from offloadtrain.cli.exit_codes import FAILED
from offloadtrain.cli.options import Flag, Json
from offloadtrain.config.errors import ConfigError

if TYPE_CHECKING:
    from offloadtrain.cli.doctor.examine import Examination


def doctor(
    *,
    save: Path | None = None,
    quick: Flag = False,
    as_json: Json = False,
    folder: Path = Path(),
) -> int:
    """Check and benchmark this machine: PASS, WARN or FAIL per line, with the remedy.

    The exit code is 1 if a check is FAIL.

    Parameters
    ----------
    save
        Write the measurements to this machine file, for `offloadtrain plan --machine FILE`.
    quick
        Skip measurements that take more than a second: Adam and the disk.
    as_json
        Print one JSON object instead of the lines.
    folder
        Folder for checkpoints; its free space and speed are checked.
    """
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"--folder {folder} {kind}: give the folder for checkpoints")
    if save is not None:
        _check_target(save)

    from offloadtrain.cli.doctor.examine import examine

    # With --json, all checks are printed together at the end.
    report = examine(folder, quick=quick, tell=lambda check: as_json or print(check), say=_say)
    if as_json:
        machine = None if report.machine is None else asdict(report.machine)
        print(json.dumps({"checks": [asdict(c) for c in report.checks], "machine": machine}))
    if save is not None:
        _save(save, report, quick)
    return FAILED if report.failed else 0


def _check_target(path: Path) -> None:
    """Before any measurement, refuse a file that could not be written afterwards.

    Raises:
        ConfigError: the path is not a machine file, or its folder does not exist.
    """
    from offloadtrain.hardware.machine import MachineError, find

    if path.suffix != ".toml":
        raise ConfigError(f"--save {path}: a machine file ends in .toml")
    if not path.parent.is_dir():
        raise ConfigError(f"--save {path}: the folder {path.parent} does not exist: create it")
    if not os.path.lexists(path):
        return
    try:
        find(str(path))
    except MachineError:
        raise ConfigError(
            f"--save {path}: it exists and is not a machine file: remove it, or give another name"
        ) from None


def _save(path: Path, report: Examination, quick: bool) -> None:
    from offloadtrain.hardware.machine import dump

    if report.machine is None:
        print(f"{path} is not written: a failed check stops the measurements", file=sys.stderr)
        return
    what = "quickly measured" if quick else "measured"
    text = dump(report.machine, f"{what} by offloadtrain doctor on {date.today()}".capitalize())
    try:
        _replace(path, text)
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be written: {error.strerror}") from None
    print(f"wrote {path}", file=sys.stderr)


def _replace(path: Path, text: str) -> None:
    """Write atomically: the previous machine file stays until the new one is durable."""
    from offloadtrain.hardware.atomic_io import sync_folder, write_file

    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(fresh, text.encode(), 0o666)  # readable by other users, who may plan with it
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def _say(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def version() -> None:
    """Print the versions to include in a bug report."""
    print(f"offloadtrain {package_version()}")
    print(f"python       {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "numba"):
        print(f"{package:12} {package_version(package)}")
    from offloadtrain.runtime import kernels

    chosen = kernels.backend()
    print(f"{'kernels':12} {chosen.name} {chosen.isa}: {chosen.why}")


def package_version(package: str = "offloadtrain") -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "not installed"
