"""The choice of a command's run folder: a new one, or one to resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.offload import Precision
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.train import run_folder
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.saved_state import require_run_state

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResumedSettings:
    """Settings a resumed run takes from the checkpoint unless the job sets them, since its bits
    depend on them.

    Attributes:
        precision: of the working weights.
        ranks: number of ranks.
        threads: torch's threads on each rank; 0: not recorded.
    """

    precision: Precision
    ranks: int
    threads: int


@dataclass(slots=True)
class Opened:
    """A run folder, locked and not yet changed: see [Note: Nothing before it begins].

    Attributes:
        found: the checkpoint to resume from, whose tensors are verified when they are loaded; None:
            the run begins at step 0.
        damaged: newer checkpoints that were skipped, and the problem of each.
    """

    run: RunFolder
    found: checkpoint.Checkpoint | None = None
    damaged: list[tuple[Path, DamagedCheckpointError]] = field(default_factory=list)

    @property
    def settings(self) -> ResumedSettings | None:
        """None: a new run."""
        if self.found is None:
            return None
        state = self.found.state
        parts = state["config"].get("ranks", {}).get("tensor", 1)
        ranks = len(state["rng"]) * (parts if type(parts) is int else 1)
        return ResumedSettings(state["precision"], ranks, state.get("threads", 0))

    def fall_back(self, damage: DamagedCheckpointError, ranks: Ranks) -> None:
        """`found` is damaged: choose the checkpoint before it. Every rank calls this.

        Raises:
            CheckpointError: there is no other.
        """
        assert self.found is not None
        self._skip(self.found.path, damage)
        folder, before = self.found.path.parent, self.found.step
        self.found = checkpoint.newest_good(
            folder, self._skip, ranks, whole=False, before=before, accept=require_run_state
        )
        if self.found is None:
            raise CheckpointError(_nothing_good(folder.parent, self))

    def _skip(self, path: Path, damage: DamagedCheckpointError) -> None:
        self.damaged.append((path, damage))

    def begin(self, *, job: str, resolved: str, ranks: Ranks = ALONE) -> list[str]:
        """Begin the run after its checkpoint was accepted: from here on the folder is written.
        Every rank calls this.

        Args:
            job: text of the job as given; a resumed run keeps its own.
            resolved: text of the job as resolved.

        Returns:
            A sentence on each damaged checkpoint.

        Raises:
            RunFolderError: the folder cannot be made, or another start has begun in it meanwhile.
        """
        if ranks.rank == 0:
            self.run.begin(resolved, None if self.found else job)
        path = Path(ranks.broadcast_object(str(self.run.path.resolve())))
        if ranks.rank:
            self.run.join(path)
            return []
        return [
            f"{why}. It is kept as {checkpoint.set_aside(at).name}." for at, why in self.damaged
        ]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The meaning of `--resume` and `--run-dir`, before any checkpoint is opened.

    Attributes:
        candidates: run folders with checkpoints; the first valid one is used.
        required: fail if none of them is valid.
        skipped: newer runs without a checkpoint.
        over: a run without a checkpoint to start over in its folder.
    """

    candidates: tuple[Path, ...] = ()
    required: bool = False
    skipped: tuple[str, ...] = ()
    over: Path | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as JSON's types; `of` reads them."""
        over = None if self.over is None else str(self.over)
        return asdict(self) | {"candidates": list(map(str, self.candidates)), "over": over}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> _Choice:
        over = None if plain["over"] is None else Path(plain["over"])
        candidates = tuple(map(Path, plain["candidates"]))
        return cls(candidates, plain["required"], tuple(plain["skipped"]), over)


def open_run(
    job: Config, *, run_dir: Path | None, resume: str, say: Say, ranks: Ranks = ALONE
) -> Opened:
    """Find the run folder and lock it; nothing is written. Every rank calls this; rank 0 decides.

    Args:
        run_dir: the requested folder.
        resume: "never", "auto" or a run folder.

    Raises:
        ConfigError: `resume` and `run_dir` contradict each other, or there is no such run.
        CheckpointError: the requested run has checkpoints, and none of them is valid.
        RunFolderError: the folder is in use, or contains a run that must not be mixed with a new
            one.
    """
    local = _choose(job, run_dir, resume, say) if ranks.rank == 0 else _Choice()
    choice = _Choice.of(ranks.broadcast_object(local.plain()))
    skipped = list(choice.skipped)
    for path in choice.candidates:
        opened = _opened(path, ranks)
        if opened.found is not None:
            if skipped:
                say(f"resume auto: skipped {', '.join(skipped)}; resuming {path.name}")
            return opened
        opened.run.close()
        if choice.required:
            raise CheckpointError(_nothing_good(path, opened))
        skipped.append(f"{path.name} (no valid checkpoint)")
    if resume == "auto" and choice.over is None:
        nothing = f"skipped {', '.join(skipped)}" if skipped else f"no checkpoint of {job.name}"
        say(f"resume auto: {nothing} in {run_dir or job.runs_dir}, a new run")
    if ranks.rank:
        return Opened(RunFolder.of_rank_0())
    if choice.over is not None:
        return Opened(RunFolder(choice.over))
    return Opened(RunFolder.new(Path(job.runs_dir), job.name, run_dir))


def _opened(path: Path, ranks: Ranks) -> Opened:
    """Lock the folder, and open its checkpoints until one is valid."""
    opened = Opened(RunFolder(path) if ranks.rank == 0 else RunFolder.of_rank_0(path))
    try:
        opened.found = checkpoint.newest_good(
            opened.run.checkpoints, opened._skip, ranks, whole=False, accept=require_run_state
        )
    except BaseException:
        opened.run.close()
        raise
    return opened


def _nothing_good(path: Path, opened: Opened) -> str:
    reasons = "".join(f"\n  {why}" for _, why in opened.damaged)
    return (
        f"{path / 'checkpoints'} has no valid checkpoint to resume from; it was not changed. To "
        f"start over, use another --run-dir.{reasons}"
    )


def _choose(job: Config, run_dir: Path | None, resume: str, say: Say) -> _Choice:
    if resume == "never":
        return _Choice()
    if resume != "auto":
        return _Choice((_named(run_folder.itself(Path(resume)), run_dir),), required=True)
    if run_dir is not None:
        return _of_folder(run_folder.itself(run_dir), say)
    candidates, skipped = [], []
    for path in run_folder.of_job(Path(job.runs_dir), job.name):
        saved = checkpoint.find(path / "checkpoints")
        if saved and checkpoint.step_of(saved[0]) >= job.train.steps:
            skipped.append(f"{path.name} (complete)")
            break
        if saved:
            candidates.append(path)
        elif not candidates:
            skipped.append(f"{path.name} (no checkpoint)")
    return _Choice(tuple(candidates), skipped=tuple(skipped))


def _of_folder(path: Path, say: Say) -> _Choice:
    """Resume in this folder; a run without a checkpoint is started over there, and its log is
    continued."""
    if checkpoint.find(path / "checkpoints"):
        return _Choice((path,), required=True)
    if not run_folder.holds_run(path):
        return _Choice()
    say(f"resume auto: {path} has no checkpoint: starting over in it; its log is kept")
    return _Choice(over=path)


def _named(path: Path, run_dir: Path | None) -> Path:
    if run_dir is not None and run_dir.resolve() != path.resolve():
        raise ConfigError(
            f"--resume {path} and --run-dir {run_dir} are different folders; give one"
        )
    if checkpoint.find(path / "checkpoints"):
        return path
    problem = f"--resume {path}: no checkpoint in {path / 'checkpoints'}; "
    if run_folder.holds_run(path):
        raise ConfigError(problem + run_folder.how_to_go_on(path))
    raise ConfigError(problem + 'give a run folder, "auto" or "never"')
