"""SIGKILL at every call of a save, before it and half-way through what it writes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from offloadtrain.runtime.process_group import ALONE
from tests.train.faulty_os import FaultyOs, kill, through
from tests.train.storage.linked_ranks import LinkedRanks, Links, close, linked, on_threads
from tests.train.storage.saves import ASYNC, KINDS, MODES, NEW, Case, Kind, in_fork

WRITES = ("pwrite", "write")


def cases(scratch: Path) -> list[Case]:
    """Every call of every kind of save; of several ranks, in each of them in turn.

    Args:
        scratch: the folder whose new folders the cases are run in.
    """
    for trained in (ASYNC, *MODES):
        trained.make_reference(scratch)
    made = []
    for kind in (*KINDS, ASYNC, *MODES):
        calls = calls_of(kind, scratch)
        for at, name in enumerate(calls):
            for tear in (False, True) if name in WRITES else (False,):
                for whom in _whom(kind, at):
                    how = "half-way through" if tear else "before"
                    title = f"{kind.name}: {how} call {at} ({name}), {whom}"
                    made.append(Case(title, partial(_killed, kind, at, tear, whom)))
    return made


def _whom(kind: Kind, at: int) -> Iterator[str]:
    """A process alone; else one rank, or all of them once one gets there."""
    if kind.ranks == 1:
        yield "alone"
        return
    yield f"rank {at % kind.ranks}"
    yield f"all, by rank {(at // 2) % kind.ranks}"


def calls_of(kind: Kind, scratch: Path) -> list[str]:
    """Return the names of the calls of one rank; of several, rank 0, which has more of them."""
    counters = [FaultyOs() for _ in range(kind.ranks)]
    root = scratch / f"count-{kind.name}"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    folder = kind.prepare(root)
    if kind.ranks == 1:
        with through(counters[0]):
            kind.perform(folder)
        return [name for name, _ in counters[0].calls]
    with through(counters[0]):
        raised = on_threads(kind.ranks, lambda ranks: kind.perform(folder, ranks))
    assert raised == [None] * kind.ranks
    share = len(counters[0].calls) // kind.ranks
    return [name for name, _ in counters[0].calls[: share + share // 2]]


def _killed(kind: Kind, at: int, tear: bool, whom: str, root: Path) -> str:
    folder = kind.prepare(root)
    together = whom.startswith("all")
    fault = FaultyOs(at, _kill_group if together else kill)
    fault.tear_writes = tear
    victim = 0 if kind.ranks == 1 else int(whom.split()[-1])
    codes = _forked(kind, folder, victim, fault)
    assert -signal.SIGALRM not in codes, f"it hangs: {codes}"
    if kind.ranks == 1:
        assert codes == [-signal.SIGKILL], codes
    # A rank may have fewer calls than that: then nobody was killed, and all is saved.
    ended = codes == [0] * kind.ranks
    newest = kind.check(folder, {NEW} if ended else {kind.newest, NEW})
    return "saved" if newest == NEW else "the one before"


def _kill_group(name: str) -> None:
    os.killpg(0, signal.SIGKILL)


def _forked(kind: Kind, folder: Path, victim: int, fault: FaultyOs) -> list[int]:
    """Save on forked ranks, of which one meets the fault; return how each has ended: its exit code,
    or the signal's number, negative."""
    links = linked(kind.ranks)
    pids: list[int] = []
    for rank in range(kind.ranks):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)  # one kill may end all of them
            in_fork(partial(_rank, kind, folder, rank, links, fault if rank == victim else None))
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    close(links)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _rank(kind: Kind, folder: Path, rank: int, links: Links, fault: FaultyOs | None) -> None:
    close(links, but=rank)
    ranks = ALONE if kind.ranks == 1 else LinkedRanks(rank, links[rank])
    with through(fault or FaultyOs()):
        kind.perform(folder, ranks)
