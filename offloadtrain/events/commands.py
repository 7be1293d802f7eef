"""Commands for the user to copy, as printed by the trainer's console and by the monitor."""

from __future__ import annotations

import shlex
from pathlib import Path


def train_command(run: Path, nproc: int = 1) -> str:
    """Return the command that trains the job of a run folder."""
    ranks = f" --nproc {nproc}" if nproc > 1 else ""
    return f"offloadtrain train {shlex.quote(str(run / 'resolved.toml'))}{ranks}"


def resume_command(run: Path, nproc: int = 1, steps: int = 0) -> str:
    """Return the command that resumes a run; `steps`: new last step, 0: the job's last step."""
    longer = f" --set train.steps={steps}" if steps else ""
    return f"{train_command(run, nproc)} --resume {shlex.quote(str(run))}{longer}"
