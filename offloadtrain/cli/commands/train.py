"""`offloadtrain train`."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from offloadtrain.boundary.output import say_on_stderr
from offloadtrain.cli.commands.jobs import find_job
from offloadtrain.cli.exit_codes import DOES_NOT_FIT, DONE, HUNG, STOPPED, of_error
from offloadtrain.cli.options import Flag, Overrides
from offloadtrain.config import job as jobs
from offloadtrain.config import toml
from offloadtrain.config.batch_split import parse_ranks, roles, shared
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.hf_model import require_folder
from offloadtrain.config.job import Config
from offloadtrain.config.sections import check_packages
from offloadtrain.hardware import cgroup, wait_policy
from offloadtrain.hardware.host_memory import require_threads_room
from offloadtrain.runtime import launcher_link
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.runtime.heartbeat import HEARTBEAT, Watchdog
from offloadtrain.runtime.launcher_link import Link
from offloadtrain.train.signals import StoppedEarlyError, StopRequests, told_early

ALONE = RankInfo()


def train(
    job: str,
    /,
    *,
    overrides: Overrides = (),
    run_dir: Path | None = None,
    resume: str = "never",
    nproc: str = "1",
    max_restarts: int = 0,
    dry_run: Flag = False,
) -> int:
    """Train a job and print the run folder.

    Ctrl-C, SIGTERM or SIGHUP stops after the current step with a checkpoint (exit code 75). A
    second one ends the process at once (exit code 1); the last checkpoint stays intact. SIGUSR1
    saves a checkpoint after the current step.

    Parameters
    ----------
    job
        A job file, or the name of a shipped job (`offloadtrain ls`).
    overrides
        KEY=VALUE ...: values that override the job's, for example optim.lr=3e-4. Keys of the job
        that no longer apply (a warm-up longer than the run) are adapted, and the change is printed.
    run_dir
        Folder of this run. Default: runs/<UTC time>-<name>.
    resume
        never: start a new run. auto: resume the newest run of this job with a valid checkpoint;
        start a new run if there is none, or if that run is complete. auto with --run-dir: resume
        in that folder, or start over in it if it has no checkpoint yet. A run folder: resume it.
    nproc
        Ranks on this host: a number, or auto (one per GPU). The global batch stays as set in the
        job. With --dry-run: plan for this number of ranks. On several hosts: torchrun ... -m
        offloadtrain train JOB.
    max_restarts
        With --nproc: number of restarts from the newest checkpoint after a rank has failed or
        hung.
    dry_run
        Do not train. Print the plan, lay out every buffer without allocating it, prove the program
        of a step free of races, and print the resolved job. Exit code 4 if the job does not fit.
    """
    link = launcher_link.attach()
    path = find_job(job)
    rank_info = RankInfo.of(os.environ)
    if rank_info.size > 1:
        # Otherwise torch prints forty lines of C++ for each rank that has ended.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # With several ranks, only rank 0 reports keys changed by overrides; its launcher is silent.
    says = rank_info.rank == 0 and (nproc == "1" or dry_run)
    config = jobs.load(path, overrides, say_on_stderr if says else lambda line: None)
    if rank_info.size > 1:
        rank_info = replace(rank_info, roles=roles(config, rank_info.size))
    if dry_run:
        return _preview(config, _ranks_wanted(nproc, config))
    require_folder(config.hf)
    if rank_info.rank == 0:
        check_packages(config.log)
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: give 0 or more")
    # Before torch is loaded, so that an impossible division among ranks is refused at once.
    count = _ranks_wanted(nproc, config) if rank_info.size == 1 else rank_info.size
    waiting = _choose_waiting(config, rank_info)
    if rank_info.size == 1 and nproc != "1":
        from offloadtrain.cli.supervisor import launch

        if waiting:
            print(f"torch's threads: {waiting}", file=sys.stderr)
        arguments = ["train", str(path), *(["--set", *overrides] if overrides else [])]
        opening = ["--resume", resume, *(["--run-dir", str(run_dir)] if run_dir else [])]
        timeout_s, named = config.train.hang_timeout_s, roles(config, count)
        return launch(count, max_restarts, arguments, opening, timeout_s, named)
    if rank_info.size == 1 and max_restarts:
        raise ConfigError("--max-restarts restarts ranks: it needs --nproc")
    text = toml.read(path)
    require_threads_room()
    try:
        return run_job(
            config, text, rank_info, link, run_dir=run_dir, resume=resume, waiting=waiting
        )
    except StoppedEarlyError as error:  # including a rank that is not connected yet
        if rank_info.rank == 0:
            print(told_early(error), file=sys.stderr)
        return STOPPED if rank_info.size == 1 else _code_of_rank(error)


def _choose_waiting(config: Config, rank_info: RankInfo) -> str:
    """Choose the wait policy before torch is loaded. For ranks, which would measure each other's
    load, the launcher chooses."""
    alone = rank_info.size == 1 and "torch" not in sys.modules
    look = wait_policy.look if alone else None
    return wait_policy.choose(config.device.threads, os.environ, look, cgroup.cpu_quota())


def _preview(config: Config, ranks: int) -> int:
    from offloadtrain.train.dry_run import preview

    text, fits, resolved = preview(config, ranks)
    print(text, file=sys.stderr)
    print(jobs.dump(resolved), end="")
    return DONE if fits else DOES_NOT_FIT


def _ranks_wanted(nproc: str, config: Config) -> int:
    """Return the number of ranks, after a check that they can divide the batch."""
    if nproc == "auto":
        import torch

        count = torch.cuda.device_count() if config.device.kind != "cpu" else 0
        if not count:
            raise ConfigError(
                "--nproc auto takes one rank per GPU, and this torch sees none: give a number"
            )
    else:
        count = parse_ranks("--nproc", nproc)
    shared(config, count)
    return count


def _code_of_rank(error: BaseException) -> int:
    """Return the exit code of a rank; 0 for a stop under torchrun, which restarts on other
    codes."""
    code = of_error(error)
    return DONE if code == STOPPED and not launcher_link.is_attached() else code


def run_job(
    config: Config,
    job_text: str,
    rank_info: RankInfo = ALONE,
    link: Link | None = None,
    *,
    run_dir: Path | None,
    resume: str,
    waiting: str = "",
) -> int:
    """Open the run folder, train in it, report the end; return the exit code. Signals and hangs are
    watched from the beginning, before torch is loaded.

    Args:
        rank_info: rank, local rank and sizes of this process.
        link: connection to this rank's launcher, which detects hangs and ends the rank after a
            second stop; None without offloadtrain's launcher.

    Raises:
        StoppedEarlyError: a stop was requested before the first step.
    """
    from offloadtrain.train.log.console import Console

    alone, is_quiet = rank_info.size == 1, rank_info.rank > 0
    console = Console(every_s=config.train.log_every_s, quiet=is_quiet)
    stop = StopRequests(aborts=link is None, quiet=is_quiet)
    limit_s = config.train.hang_timeout_s
    watchdog = Watchdog(HEARTBEAT, least_limit_s=limit_s, hung_code=HUNG, link=link, judges=alone)
    with ExitStack() as stack:
        stack.enter_context(stop)
        stack.enter_context(watchdog)
        distributed = None
        if not alone:
            from offloadtrain.train.distributed_run import DistributedRun

            judge = watchdog if link is None else None
            ranks = DistributedRun(rank_info, config, _code_of_rank, stop, judge)
            distributed = stack.enter_context(ranks)
        stack.enter_context(console.never_silent("loading torch"))
        from offloadtrain.train.run import run

        status = run(
            config,
            job_text,
            run_dir=run_dir,
            resume=resume,
            distributed=distributed,
            waiting=waiting,
            console=console,
            stop=stop,
            watchdog=watchdog,
        )
    if status != "stopped":
        return DONE
    return STOPPED if alone else _code_of_rank(StoppedEarlyError())
