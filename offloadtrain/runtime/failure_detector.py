"""The processes of one job, started by torchrun or a scheduler: their ranks, their store, and the
detection of failed ranks.

[Note: Who failed]
If a rank dies, the others wait in a collective, for minutes or forever. Each rank
therefore has a thread that checks twice a second, through the store and not through collectives:
whether a failing rank has written an error; whether processes of the same host have ended; whether
hosts have stopped sending heartbeats. The thread determines the failed rank, gives the training
thread a few seconds to end by itself, and then ends the process.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from offloadtrain.config.errors import ConfigError
from offloadtrain.runtime.heartbeat import NO_PROGRESS, Watchdog, judge
from offloadtrain.runtime.launcher_link import Pulse

LOOK_EVERY_S = 0.5
SILENT_S = 20.0
"""Longest accepted silence of a rank on another host."""
GRACE_S = 5.0
"""Time for the training thread to end after another rank has failed."""
LISTEN_S = 3.0
"""Time after a failed collective for another rank's error to arrive."""
_FAILED = "failed"
_STOPPED_EARLY = "stopped early"


class Store(Protocol):
    """Key-value store shared by all ranks, such as torch's TCPStore."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank and address of this process, from the environment.

    Attributes:
        attempt: number of restarts.
        roles: role of each rank in a pipeline, for messages; empty without a pipeline.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    roles: tuple[str, ...] = ()

    def described(self, rank: int, pid: int, host: str = "") -> str:
        """Return a rank's name for messages; `host`: set if it is another host."""
        role, where = f"{self.roles[rank]}, " if self.roles else "", f" on {host}" if host else ""
        return f"rank {rank} ({role}pid {pid}{where})"

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read torchrun's variables; a single rank if they are not set.

        Raises:
            ConfigError: the variables are incomplete, or not as torchrun sets them.
        """
        if (size := _number(environ, "WORLD_SIZE", 1, least=1)) == 1:
            return cls(attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0))
        for key in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(key):
                raise ConfigError(
                    f"WORLD_SIZE = {size} in the environment, and {key} is not set: ranks are "
                    "started by --nproc or torchrun, which set both; for one process, unset "
                    "WORLD_SIZE"
                )
        _number(environ, "MASTER_PORT", 0, least=1, most=65535)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", size, least=1, most=size)
        return cls(
            rank=_number(environ, "RANK", 0, most=size - 1),
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", 0, most=local_size - 1),
            local_size=local_size,
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        )


def _number(
    environ: Mapping[str, str], key: str, default: int, *, least: int = 0, most: int = 1 << 20
) -> int:
    text = environ.get(key, str(default))
    if text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= most:
        return int(text)
    raise ConfigError(
        f"{key} = {text[:40]!r} in the environment must be a number from {least} to {most}, as "
        "torchrun sets it"
    )


@dataclass(slots=True)
class _Peer:
    """Another rank.

    Attributes:
        life: readable once the process has ended; None on another host.
        beat, heard_s: its last heartbeat, and the time when it arrived.
    """

    rank: int
    pid: int
    host: str
    life: int | None
    beat: bytes = b""
    heard_s: float = field(default_factory=time.monotonic)


class FailureDetector:
    """Detects the failure of other ranks, and reports a failure of this rank."""

    def __init__(
        self,
        store: Store,
        rank_info: RankInfo,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        watchdog: Watchdog | None = None,
    ) -> None:
        """
        Args:
            on_lost: called with the cause if the training thread has not ended in time.
            watchdog: watchdog of this rank, which reports a hang of any rank and ends the process;
                None if the launcher of `--nproc` detects hangs.
        """
        self._store, self._rank_info, self._clock = store, rank_info, clock
        self._on_lost, self._watchdog = on_lost, watchdog
        self._closed = threading.Event()
        self._cause: str | None = None
        self._heard = threading.Event()
        self.stopped_early = self._hangs = False
        store.set(f"who{rank_info.rank}", json.dumps({"pid": os.getpid(), "home": _home()}))
        self._peers = [self._peer(rank) for rank in range(rank_info.size) if rank != rank_info.rank]
        self._thread = threading.Thread(target=self._run, name="ranks-watch", daemon=True)
        self._thread.start()

    def cause(self, wait_s: float = LISTEN_S) -> str | None:
        """Return why another rank has failed, or None; waits briefly for the report."""
        # The error of a collective may arrive before the failed rank's report of its cause.
        self._heard.wait(wait_s)
        return self._cause

    def fail(self, message: str) -> None:
        """Report that this rank has failed."""
        self._closed.set()
        _report(self._store, self._rank_info, message)

    def stop_early(self, message: str) -> None:
        """Report that this rank was asked to stop before the first step: the others stop too."""
        self._closed.set()
        say_stopped_early(self._store, self._rank_info, message)

    def close(self) -> None:
        """Report that this rank has completed, so that its end is not a failure."""
        self._closed.set()
        with suppress(Exception):
            self._store.set(f"done{self._rank_info.rank}", "1")
        # The thread reads the store, which the caller takes down next.
        self._thread.join()

    def _peer(self, rank: int) -> _Peer:
        facts = json.loads(self._store.get(f"who{rank}"))  # waits for the key
        pid, same_home = facts["pid"], facts["home"] == _home()
        return _Peer(rank, pid, facts["home"][0], _open_pid(pid) if same_home else None)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            self._cause = self._look()
            if self._cause is not None:
                self._heard.set()
                with suppress(Exception):
                    if not self._store.check([_FAILED]):
                        self._store.set(_FAILED, self._cause)
                if self._watchdog is not None and self._hangs:
                    self._watchdog.end_hung(self._cause)
                if not self._closed.wait(GRACE_S):
                    self._on_lost(self._cause)
                return

    def _look(self) -> str | None:
        try:
            pulse = self._watchdog.pulse() if self._watchdog is not None else None
            beat = {"at": time.time_ns(), "pulse": pulse and asdict(pulse)}
            self._store.set(f"beat{self._rank_info.rank}", json.dumps(beat))
            reported = self._reported_error()
            lost = [why for peer in self._peers if (why := self._lost(peer))]
            # A rank may have reported its error just before it ended.
            cause = reported or (lost and (self._reported_error() or lost[0])) or None
            return cause or (self._hung(pulse) if pulse is not None else None)
        except Exception as error:
            ended = [f"{self._name(peer)} has ended" for peer in self._peers if _has_ended(peer)]
            keeper = "rank 0, or the launcher that hosts it, has ended"
            return ended[0] if ended else f"the ranks' store does not answer: {keeper} ({error})"

    def _reported_error(self) -> str:
        """Return the error that a rank has reported; "" if there is none."""
        if not self._store.check([_FAILED]):
            return ""
        self.stopped_early = self._store.check([_STOPPED_EARLY])
        error = self._store.get(_FAILED).decode(errors="replace")
        self._hangs = NO_PROGRESS in error
        return error

    def _lost(self, peer: _Peer) -> str:
        """Return why a rank counts as lost; "" if it does not."""
        if self._store.check([f"done{peer.rank}"]):
            return ""
        # Time since its last new heartbeat.
        key = f"beat{peer.rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != peer.beat:
            peer.beat, peer.heard_s = beat, self._clock()
        silent_s = self._clock() - peer.heard_s
        if peer.life is not None:
            return f"{self._name(peer)} has ended" if _has_ended(peer) else ""
        return f"{self._name(peer)} is silent for {silent_s:.0f} s" if silent_s >= SILENT_S else ""

    def _name(self, peer: _Peer) -> str:
        host = peer.host if peer.life is None else ""
        return self._rank_info.described(peer.rank, peer.pid, host)

    def _hung(self, own_pulse: Pulse) -> str | None:
        """Return a message about the rank that hangs, or None; equal on every rank."""
        pulses = {self._rank_info.rank: own_pulse}
        own_rank = self._rank_info.rank
        names = {own_rank: self._rank_info.described(own_rank, os.getpid())}
        for peer in self._peers:
            if peer.beat and not self._store.check([f"done{peer.rank}"]):
                pulses[peer.rank] = _pulse(peer, self._clock())
                names[peer.rank] = self._name(peer)
        if not (hung := judge(pulses)):
            return None
        self._hangs, pulse = True, pulses[hung[0]]
        return f"{names[hung[0]]} {NO_PROGRESS} for {pulse.silent_s:.0f} s: {pulse.phase}"


def say_stopped_early(store: Store, rank_info: RankInfo, message: str) -> None:
    """Report that this rank was asked to stop before the first step; may be called before it has a
    detector."""
    with suppress(Exception):
        store.set(_STOPPED_EARLY, "1")
    _report(store, rank_info, message)


def _report(store: Store, rank_info: RankInfo, message: str) -> None:
    with suppress(Exception):  # the store may have ended with the rank that hosts it
        if not store.check([_FAILED]):
            role = f" ({rank_info.roles[rank_info.rank]})" if any(rank_info.roles) else ""
            store.set(_FAILED, f"rank {rank_info.rank}{role}: {message}")
            time.sleep(3 * LOOK_EVERY_S)  # this rank may host the store: let the others read it


def _pulse(peer: _Peer, now_s: float) -> Pulse:
    """Return a rank's last pulse; a stopped rank sends none, so its silence grows."""
    pulse = Pulse(**json.loads(peer.beat)["pulse"])
    silent_s = now_s - peer.heard_s
    if silent_s < SILENT_S / 2:
        return pulse
    return replace(pulse, silent_s=max(silent_s, pulse.silent_s), waits=False)


def _has_ended(peer: _Peer) -> bool:
    return peer.life is not None and bool(select.select([peer.life], [], [], 0)[0])


def _home() -> list[str]:
    """Return host, boot and pid namespace: equal for processes that see each other."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return [socket.gethostname(), boot, os.readlink("/proc/self/ns/pid")]


def _open_pid(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if the kernel does not
    support it."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
