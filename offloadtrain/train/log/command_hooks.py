"""The job's commands at an alert and at the end of a start (`train.on_alert`, `train.on_end`).

A command is a list of arguments. It runs without a shell, in its own session, for at most
`LIMIT_S`. Facts about the event are in its environment, so that no text of a log becomes an
argument. One thread runs the commands one after another: training never waits for them, only the
end of the run does, for at most twice the limit. Output of a command is discarded.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from offloadtrain.boundary.sanitize import one_line
from offloadtrain.config.job import Config
from offloadtrain.events import schema

LIMIT_S = 10.0
"""Time limit of one command."""

_MOST_WAITING = 16
_MOST_CHARS = 2000


class CommandHooks:
    """Runs a job's commands. `close` waits for them."""

    def __init__(
        self,
        config: Config,
        run: Path,
        warn: Callable[[str], object],
        *,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`warn` is called, on any thread, once per key whose command fails or is dropped."""
        self._on_alert, self._on_end = config.train.on_alert, config.train.on_end
        self._facts = {"RUN": str(run.resolve()), "NAME": config.name}
        self._warn, self._limit_s = warn, limit_s
        self._failed_keys: set[str] = set()
        # Its thread starts with the first command.
        self._pool = ThreadPoolExecutor(1, "hooks")
        self._commands: list[Future[None]] = []

    def alert(self, alert: schema.Alert) -> None:
        """Run `train.on_alert` for an alert that is raised."""
        if alert.state == "raised":
            step = "" if alert.step is None else alert.step
            facts = {"EVENT": "alert", "CODE": alert.code, "LEVEL": alert.level, "STEP": step}
            self._add("train.on_alert", self._on_alert, facts | {"MESSAGE": alert.message})

    def end(self, ended: schema.RunEnded) -> None:
        """Run `train.on_end` after the commands of earlier alerts."""
        facts = {
            "EVENT": "end",
            "STATUS": ended.status,
            "STEP": ended.step,
            "MESSAGE": ended.message,
            "VAL_LOSS": "" if ended.val_loss is None else ended.val_loss,
            "DURATION_S": round(ended.duration_s, 1),
        }
        self._add("train.on_end", self._on_end, facts)

    def close(self) -> None:
        """Wait for the commands, for at most twice the limit; the others are dropped."""
        try:
            unfinished = wait(self._commands, 2 * self._limit_s).not_done
        finally:
            # Also after Ctrl-C: Python would run the waiting commands before it exits.
            self._pool.shutdown(wait=False, cancel_futures=True)
        if unfinished:
            self._fail("train.on_alert", "commands were still waiting at the end, and are dropped")

    def _add(self, key: str, command: tuple[str, ...], facts: Mapping[str, object]) -> None:
        if not command:
            return
        self._commands = [earlier for earlier in self._commands if not earlier.done()]
        if len(self._commands) > _MOST_WAITING:
            self._fail(key, f"{_MOST_WAITING} commands are waiting already: this one is dropped")
            return
        variables = {name: one_line(str(value))[:_MOST_CHARS] for name, value in facts.items()}
        submitted = self._pool.submit(self._run_one, key, list(command), self._facts | variables)
        self._commands.append(submitted)

    def _run_one(self, key: str, command: list[str], facts: Mapping[str, str]) -> None:
        if problem := _run(command, facts, self._limit_s):
            self._fail(key, f"{command[0]}: {problem}")

    def _fail(self, key: str, problem: str) -> None:
        if key not in self._failed_keys:
            self._failed_keys.add(key)
            self._warn(f"{key}: {problem}. It is not said again")


def _run(command: list[str], facts: Mapping[str, str], limit_s: float) -> str:
    """Run a command and wait for it; return the problem, or ""."""
    environment = os.environ | {f"OFFLOADTRAIN_{name}": value for name, value in facts.items()}
    quiet = subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a null character
        return f"cannot be run: {getattr(error, 'strerror', None) or error}"
    try:
        code = process.wait(limit_s)  # only this thread waits
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # killed: it ends at once
        return f"was ended after {limit_s:g} s"
    return f"exit code {code}" if code else ""
