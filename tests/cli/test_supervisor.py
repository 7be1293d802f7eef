"""The launcher of ranks, over processes that import no torch: exit codes, labels, restarts,
signals, hangs, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadtrain.train.signals import REPEAT_S
from tests.distributed.rank_faults import ROOT, listening, none_left

_LAUNCHER = """
import sys
from pathlib import Path
from offloadtrain.cli.supervisor import Supervisor
from offloadtrain.events import oom_kills
from offloadtrain.hardware import cgroup
rank, folder, limit_s, restarts = sys.argv[1:]
if (group := Path(folder, "job")).exists():  # a unified hierarchy that is not this machine's
    counters, oom_kills._PLACES = cgroup.oom_counters, (folder,)
    cgroup.oom_counters = lambda: counters(Path(folder), Path(folder, "membership"))
command = lambda run: [sys.executable, "-c", rank, folder, run]
limits = {"max_restarts": int(restarts), "least_limit_s": float(limit_s)}
print("code", Supervisor(2, command, **limits).run())
"""

_RANK = """
import os, signal, sys, threading, time
from pathlib import Path
from offloadtrain.runtime import launcher_link
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.heartbeat import Watchdog
link = launcher_link.attach()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder, run = sys.argv[1:]
watchdog = Watchdog(HEARTBEAT, least_limit_s=3.0, hung_code=70, link=link, judges=False)
watchdog.__enter__()

def until_stopped(numbers=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
    for number in numbers:
        signal.signal(number, lambda *_: os._exit(75))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    Path(folder, f"ready{rank}").write_text("")
    while True:
        HEARTBEAT.beat()
        time.sleep(0.05)

"""


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(does: str, limit_s: float = 0.0, restarts: int = 0) -> subprocess.Popen[str]:
        arguments = [_RANK + does, str(tmp_path), str(limit_s), str(restarts)]
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER, *arguments],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


Start = Callable[..., "subprocess.Popen[str]"]


def result(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return its output without what ranks add, and its messages."""
    out, err = process.communicate(timeout=300)
    return out, err


def ready(folder: Path, process: subprocess.Popen[str], word: str = "ready") -> None:
    """Wait until each rank has said so, by a file."""
    while not all((folder / f"{word}{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        time.sleep(0.02)


def test_done_and_the_others_output_is_labelled(launched: Start) -> None:
    out, err = result(launched("print('hello of', rank, flush=True)"))
    assert out == "hello of 0\ncode 0\n"
    assert err == "[rank 1] hello of 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "does", ["until_stopped() if rank else until_stopped(())", "until_stopped(())"]
)
def test_a_stop_before_the_run_begins_waits_for_no_rank(
    launched: Start, tmp_path: Path, does: str
) -> None:
    """Rank 0, or both, are in a call that handles no signal; the other one ends as asked."""
    process = launched(does)
    ready(tmp_path, process)
    process.terminate()
    out, err = result(process)
    assert out == "code 75\n" and "stopped before the first step" in err


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("os._exit(2 if rank else 1)", 2),
        pytest.param("os._exit(4)", 4, marks=pytest.mark.slow),
        pytest.param("os._exit(75)", 75, marks=pytest.mark.slow),
        pytest.param("os._exit(rank)", 1, marks=pytest.mark.slow),
    ],
)
def test_the_code_is_that_of_the_rank_with_an_error_of_its_own(
    launched: Start, does: str, code: int
) -> None:
    assert result(launched(does, restarts=0))[0] == f"code {code}\n"


@pytest.mark.slow
def test_what_a_restart_cannot_mend_is_not_restarted(launched: Start) -> None:
    out, err = result(launched("os._exit(2)", restarts=3))
    assert out == "code 2\n" and "restart" not in err


@pytest.mark.slow
def test_a_killed_rank_is_named_and_all_start_again_in_the_run(
    launched: Start, tmp_path: Path
) -> None:
    does = """
if attempt == 0:
    watchdog.run = "the-run"
    Path(folder, f"told{rank}").write_text("")
    def busy(): HEARTBEAT.beat(); time.sleep(0.02)
    while not all(Path(folder, f"told{r}").exists() for r in (0, 1)): busy()
    for _ in range(50): busy()
    if rank: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
print("goes on in", run, flush=True)
"""
    out, err = result(launched(does, restarts=1))
    assert "rank 1 (pid" in err and "was killed by SIGKILL" in err
    assert out == "goes on in the-run\ncode 0\n"
    assert "[rank 1] goes on in the-run" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hangs", "doing"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
        ("threading.Event().wait()", "running"),
        ("os.read(os.pipe()[0], 1)", "running"),
        ("import ctypes; ctypes.PyDLL(None).pause()", "it does not answer"),
    ],
)
def test_a_rank_that_hangs_is_named_with_all_stacks(
    launched: Start, hangs: str, doing: str
) -> None:
    does = f"""
HEARTBEAT.enter("step 3")
time.sleep(0.6)
if rank:
    {hangs}
with HEARTBEAT.collective():
    time.sleep(600)
"""
    out, err = result(launched(does, limit_s=3.0))
    assert out == "code 70\n"
    first = next(line for line in err.splitlines() if "makes no progress" in line)
    assert first.startswith("rank 1 (pid") and f"{doing}" in first and "phase: step 3" in first
    assert "): waiting for other ranks" in err
    assert "most recent call first" in err


@pytest.mark.slow
def test_a_slow_rank_is_no_hung_one(launched: Start) -> None:
    """Three times the limit: rank 1 computes, rank 0 waits for it."""
    does = """
began, computed = time.monotonic(), Path(folder, "computed")
if rank == 0:
    with HEARTBEAT.collective():
        while not computed.exists(): time.sleep(0.05)
else:
    while time.monotonic() - began < 9: sum(range(1000))
    computed.write_text("")
    while time.monotonic() - began < 11: sum(range(1000))  # it ends behind rank 0
"""
    assert result(launched(does, limit_s=3.0))[0] == "code 0\n"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_a_stop_reaches_all_ranks(launched: Start, tmp_path: Path, number: int) -> None:
    process = launched("until_stopped()")
    ready(tmp_path, process)
    process.send_signal(number)
    assert result(process) == ("code 75\n", "")


@pytest.mark.slow
def test_a_stop_while_ranks_start_is_kept_for_them(launched: Start, tmp_path: Path) -> None:
    """They are started with signals blocked."""
    process = launched("Path(folder, 'up').write_text(''); time.sleep(0.7); until_stopped()")
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    process.terminate()
    assert result(process) == ("code 75\n", "")


def test_a_second_stop_ends_all_at_once(launched: Start, tmp_path: Path) -> None:
    does = """
def stopped(*_): Path(folder, f"stopped{rank}").write_text("")
signal.signal(signal.SIGTERM, stopped)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
until_stopped(numbers=())
"""
    process = launched(does)
    ready(tmp_path, process)
    process.terminate()
    ready(tmp_path, process, "stopped")  # the launcher has heard the first one
    time.sleep(REPEAT_S)
    process.terminate()
    _, err = result(process)
    assert process.returncode == 1 and "ended at once" in err
    assert none_left(tmp_path)


@pytest.mark.slow
def test_usr1_goes_to_rank_0(launched: Start, tmp_path: Path) -> None:
    does = "signal.signal(signal.SIGUSR1, lambda *_: Path(folder, f'usr1-{rank}').write_text(''))\n"
    process = launched(
        does + "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\nuntil_stopped()"
    )
    ready(tmp_path, process)
    process.send_signal(signal.SIGUSR1)
    while not (tmp_path / "usr1-0").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert result(process)[0] == "code 75\n"
    assert not (tmp_path / "usr1-1").exists()


@pytest.mark.parametrize(
    "does",
    [
        "until_stopped()",
        pytest.param(
            "Path(folder, f'ready{rank}').write_text(''); time.sleep(600)", marks=pytest.mark.slow
        ),
    ],
)
def test_a_killed_launcher_leaves_no_rank(launched: Start, tmp_path: Path, does: str) -> None:
    process = launched(does)
    ready(tmp_path, process)
    process.kill()
    process.communicate()
    assert none_left(tmp_path)


@pytest.mark.slow
def test_a_rank_whose_launcher_ended_before_it_asked_ends_itself() -> None:
    """The kernel's signal is lost then."""
    code = "from offloadtrain.runtime import launcher_link; launcher_link.die_with(1234567)"
    done = subprocess.run([sys.executable, "-c", code], timeout=300)
    assert done.returncode == -signal.SIGKILL


def test_a_listening_socket_is_seen() -> None:
    """What the scan of a job looks for is found where it is."""
    code = "import socket; s = socket.create_server(('', 0)); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert listening([process.pid]) == {"00000000"}
        process.kill()
