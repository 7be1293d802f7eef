"""Requests: taken once, in order, and only if they are what they should be."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offloadtrain.events import schema
from offloadtrain.events.control import Request, Requests, send
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.trainer import AbortedError
from tests.train.small_job import events_of, run, small_job


def test_none_is_missed_however_fast_they_come(tmp_path: Path) -> None:
    """Each is returned once, in their order; a folder that is gone contains none."""
    inbox, received = Requests(tmp_path), list[Request]()
    ids: list[str] = []
    writer = threading.Thread(
        target=lambda: ids.extend(send(tmp_path, "note", str(n)) for n in range(200))
    )
    writer.start()
    until = time.monotonic() + 120
    while len(received) < 200 and time.monotonic() < until:
        received += inbox.poll()
    writer.join()
    assert [(request.id, request.message) for request in received] == [
        (ids[n], str(n)) for n in range(200)
    ]
    assert len(list((tmp_path / "control/done").iterdir())) == 200
    shutil.rmtree(tmp_path / "control")
    assert inbox.poll() == []


def put(folder: Path, name: str, data: bytes) -> None:
    (folder / "control").mkdir(exist_ok=True)
    (folder / "control" / name).write_bytes(data)


def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    inbox = Requests(tmp_path)
    for number, (data, why) in enumerate(
        (
            (b"", "cannot be read"),
            (b"not json", "cannot be read"),
            (b"[1]", "not a JSON object"),
            (b'{"action": "rm -rf /"}', "the actions are checkpoint"),
            (b'{"action": 3}', "the actions are checkpoint"),
            (b'{"action": "note", "message": "' + b"x" * 70_000 + b'"}', "at most 65,536 are read"),
            (b"[" * 50_000, "cannot be read"),
        )
    ):
        put(tmp_path, f"{number}-a.json", data)
        (request,) = inbox.poll()
        assert why in request.refused
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"action": "abort"}))
    (tmp_path / "control/1-link.json").symlink_to(secret)
    (tmp_path / "control/2-folder.json").mkdir()
    os.mkfifo(tmp_path / "control/3-pipe.json")
    refused = inbox.poll()
    assert len(refused) == 3 and all(request.refused for request in refused)
    assert inbox.poll() == []


def control_events(folder: Path) -> list[tuple[str, str]]:
    return [(event.action, event.state) for event in events_of(folder, schema.Control)]


@pytest.fixture
def when_started(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is to be done when a run is about to take its first step."""
    todo: list[Callable[[], object]] = []
    started = RunLog.started

    def then_ask(self: RunLog, *arguments: object) -> None:
        started(self, *arguments)  # type: ignore[arg-type]
        for do in todo:
            do()

    monkeypatch.setattr(RunLog, "started", then_ask)
    return todo


def test_a_run_answers(tmp_path: Path, when_started: list[Callable[[], object]]) -> None:
    job, folder = small_job(tmp_path), tmp_path / "run"
    (folder / "control").mkdir(parents=True)
    send(folder, "stop")
    when_started += [
        lambda: send(folder, "note", "hello"),
        lambda: send(folder, "checkpoint"),
        lambda: put(folder, "9-odd.json", b'{"action": "dance"}'),
        lambda: send(folder, "stop"),
    ]
    assert run(job, folder) == 75
    assert control_events(folder) == [
        ("stop", "refused"),
        ("note", "done"),
        ("checkpoint", "accepted"),
        ("checkpoint", "done"),
        ("stop", "accepted"),
        ("stop", "done"),
        ("dance", "refused"),
    ]
    saved = [event.step for event in events_of(folder, schema.Checkpoint)]
    assert saved == [1], "asked for after the first step, and not saved twice for the stop"
    assert events_of(folder, schema.RunEnded)[-1].status == "stopped"


def test_an_abort_saves_nothing(tmp_path: Path, when_started: list[Callable[[], object]]) -> None:
    job, folder = small_job(tmp_path), tmp_path / "run"
    when_started.append(lambda: send(folder, "abort"))
    with pytest.raises(AbortedError, match="nothing was saved"):
        run(job, folder)
    assert control_events(folder) == [("abort", "done")]
    assert events_of(folder, schema.Checkpoint) == []
    ended = events_of(folder, schema.RunEnded)[-1]
    assert ended.status == "failed" and "aborted on request" in ended.message
