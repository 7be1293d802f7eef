"""A run that the kernel killed for memory: what its cgroup counts, and what may be read for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offloadtrain.events import oom_kills
from offloadtrain.hardware import cgroup
from tests.tui.recordings import plain, write


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(oom_kills, "_PLACES", (str(tmp_path),))
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 9\n")
    return tmp_path / "memory.events"


def test_a_counter_that_has_risen_is_noticed(counter: Path) -> None:
    known = oom_kills.count([counter, counter.with_name("none")])
    assert known == {str(counter): 2} and not oom_kills.risen(known)
    counter.write_text("oom 3\noom_kill 3\n")
    assert oom_kills.risen(known)
    counter.unlink()  # the group is gone: nothing can be said
    assert not oom_kills.risen(known)


HOSTILE: list[object] = [None, 1, [], {}, {"/etc/passwd": -1}]
HOSTILE.append({"/sys/fs/cgroup/../../../etc/passwd": -1})


def test_no_other_file_is_read_for_a_hostile_run(
    counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other value than a number is compared with the counter."""
    for value in ("1", None, 10**30):
        assert not oom_kills.risen({str(counter): value})
    monkeypatch.setattr(oom_kills, "_read", lambda path: pytest.fail(f"{path} was read"))
    assert not any(map(oom_kills.risen, HOSTILE))


def test_the_counters_of_both_versions_and_of_the_machine(tmp_path: Path) -> None:
    mount, members = tmp_path / "cgroup", tmp_path / "membership"
    members.write_text("4:memory:/box\n0::/job\n")
    assert cgroup.oom_counters(mount, members) == [Path("/proc/vmstat")]
    for name in ("job/memory.events", "memory/box/memory.oom_control"):
        (mount / name).parent.mkdir(parents=True)
        (mount / name).write_text("oom_kill 0\n")
    counters = cgroup.oom_counters(mount, members)
    assert [str(path.relative_to(mount)) for path in counters] == [
        "job/memory.events",
        "memory/box/memory.oom_control",
    ]
    assert oom_kills.count(counters) == dict.fromkeys(map(str, counters), 0)


def test_status_reports_that_a_killed_run_was_probably_out_of_memory(
    counter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from offloadtrain.cli.main import main

    run = write(tmp_path / "run", plain(20))
    log = run / "events/rank000.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(line for line in lines if b"run_ended" not in line))
    (run / "run.json").write_text(json.dumps({"oom_kills": {str(counter): 2}}))
    assert main(["status", str(run)]) == 1
    assert "out of memory" not in capsys.readouterr().out
    counter.write_text("oom_kill 3\n")
    assert main(["status", str(run)]) == 1
    out = capsys.readouterr().out
    assert "killed, probably out of memory" in out and "last logged: " in out
    assert "GiB available" in out and "held by rank 0" in out
    assert main(["status", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["out_of_memory"] is True
    assert main(["tui", str(run), "--once"]) == 0
    assert "killed, probably out of memory" in capsys.readouterr().out
