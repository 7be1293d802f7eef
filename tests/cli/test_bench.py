"""`offloadtrain bench adam`: rows, ratios, verdicts. Never a wall time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from offloadtrain.cli.bench import resident, scale, thread
from offloadtrain.cli.bench import step as paced
from offloadtrain.cli.bench.adam import (
    DEEPSPEED_STEP,
    DEEPSPEED_ZERO2,
    LIMIT,
    ONE_PASS,
    TORCH_PATH,
    Label,
    Row,
    goals,
    rows_of,
    table,
)
from offloadtrain.cli.bench.rounds import measure, ratio
from offloadtrain.cli.bench.scale import CASES
from offloadtrain.cli.bench.step import MILLISECONDS
from offloadtrain.cli.exit_codes import USAGE
from offloadtrain.cli.main import main
from offloadtrain.runtime.lanes import Lane
from tests.small_buffers import small_demo

KEYS = {
    "case",
    "backend",
    "state",
    "n",
    "threads",
    "ns_per_param",
    "bytes_per_param",
    "gb_per_s",
    "x_limit",
    "x_deepspeed_zero2",
    "x_deepspeed_path",
    "x_deepspeed_step",
    "x_torch_path",
}
SMALL = ["bench", "adam", "--n", "4K", "--rounds", "1", "--threads", "1"]


def in_this_process(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def by_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "offloadtrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("run", [in_this_process, pytest.param(by_itself, marks=pytest.mark.slow)])
def test_json_is_one_object_with_a_row_per_case(
    run: Callable[[list[str], pytest.CaptureFixture[str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(run([*SMALL, "--json"], capsys))
    assert all(set(row) == KEYS for row in found["rows"])
    assert {row["n"] for row in found["rows"]} == {4096}
    native = [row for row in found["rows"] if row["backend"].startswith("native")]
    sizes = {row["state"]: row["bytes_per_param"] for row in native if row["case"] == ONE_PASS}
    if native:
        assert sizes == {"fp32": 28.0, "split16": 18.0, "int8": 12.125}
        lion = [row["bytes_per_param"] for row in native if row["case"] == f"{ONE_PASS}, Lion"]
        assert lion == [20.0, 14.0, 10.0625]
        others = {row["state"] for row in native if row["case"] == f"{ONE_PASS}, Adagrad"}
        assert others == {"fp32", "split16"}
        assert all(row["x_limit"] > 0 for row in found["rows"])
    assert all(row["x_torch_path"] > 0 for row in found["rows"])
    assert found["machine"]["cores_usable"] >= 1 and found["dispatch_us"] > 0


def test_the_table_and_the_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--states", "split16"]) == 0
    told = capsys.readouterr().out
    assert "split16" in told and "dispatch of one bucket" in told
    assert "int8" not in told.split("goal")[0]
    assert not [line for line in told.splitlines() if line.startswith(ONE_PASS) and "fp32" in line]


@pytest.mark.slow
def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    assert main(["bench", "adam", "--n", "64", "--rounds", "1", "--threads", str(before + 1)]) == 0
    assert torch.get_num_threads() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "said"),
    [("ModuleNotFoundError('no hjson', name='hjson')", "no hjson"), ("OSError('nvcc')", "nvcc")],
)
def test_a_peer_that_talks_and_fails_is_told_on_stderr(
    fails: str,
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """stdout stays data, also under what a peer's compiler writes straight to the descriptor."""
    peer = f"import os\nos.write(1, b'[1/2] ninja')\nprint('hello')\nraise {fails}\n"
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text(peer)
    monkeypatch.syspath_prepend(tmp_path)
    assert "deepspeed" not in sys.modules
    assert main([*SMALL, "--json"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["rows"]) > 3
    assert all(text in err for text in ("ninja", "hello", said))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--n", "64X"], "64M"),
        (["--n", "0"], "give a number such as 64M"),
        (["--threads", "1,0"], "at least 1, separated by commas"),
        (["--threads", "two"], "at least 1, separated by commas"),
        (["--rounds", "0"], "at least 1"),
        (["--states", "fp32,int4"], "fp32, split16, int8"),
    ],
)
def test_bad_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adam", *flags]) == USAGE
    assert said in capsys.readouterr().err


def test_more_than_the_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adam", "--n", "4096G"]) == 4
    assert "host memory" in capsys.readouterr().err


def test_ratios_are_medians_within_rounds() -> None:
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0
    assert ratio(None, [1.0]) is None


def test_the_first_round_is_not_counted() -> None:
    calls, told = [], []
    seconds = measure({"a": lambda: calls.append(1)}, 3, told.append)
    assert (len(calls), len(seconds["a"]), told) == (4, 3, [0, 1, 2, 3])


def label(case: str, state: str = "fp32", backend: str = "native avx512") -> Label:
    return Label(case, backend, state, 28.0)


def made(times: dict[Label, float], threads: int = 2) -> list[Row]:
    seconds = {key.key: [value, value] for key, value in times.items()}
    return rows_of(list(times), seconds, 100, threads)


def test_goals_are_judged_from_the_rows() -> None:
    rows = made(
        {
            label(LIMIT, "-"): 1.0,
            label(ONE_PASS): 1.05,
            label(ONE_PASS, "split16"): 0.9,
            label(ONE_PASS, "int8"): 1.1,
            label(ONE_PASS, backend="numba"): 1.8,
            label(DEEPSPEED_STEP, backend="deepspeed"): 1.3,
            label(DEEPSPEED_ZERO2, backend="deepspeed"): 2.1,
            label(TORCH_PATH, backend="torch"): 1.8,
        }
    )
    verdicts = {goal.what: str(goal) for goal in goals(rows, dispatch_us=8.0)}
    assert verdicts["fp32 against the traffic limit, 2 threads"].endswith("1.05  reached")
    assert verdicts["fp32, times ZeRO-2's path, 2 threads"].endswith("2.00  reached")
    assert verdicts["fp32, times torch's path, 2 threads"].endswith("1.71  not reached")
    assert verdicts["split16, times ZeRO-2's path, 2 threads"].endswith("2.33  reached")
    assert verdicts["int8, times ZeRO-2's path, 2 threads"].endswith("1.91  not reached")
    assert verdicts["Numba against native, fp32, 2 threads"].endswith("1.71  not reached")
    assert "DeepSpeed" in table(rows) or "DS" in table(rows)


def test_what_is_not_there_is_not_judged() -> None:
    rows = made({label(ONE_PASS): 1.2, label(TORCH_PATH, backend="torch"): 2.4})
    assert rows[0].x_deepspeed_path is None and rows[0].x_limit is None
    assert any(str(goal).endswith("not measured") for goal in goals(rows, 1.0))


@pytest.mark.slow
def test_a_step_against_its_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never faster than the schedule: it would not have taken the times it was given."""
    small_demo(monkeypatch)
    monkeypatch.setattr(paced, "WARM_STEPS", 1)
    for module in (paced, resident):  # once for JSON and for the tables
        monkeypatch.setattr(module, "run", cache(module.run))
    flags = ["--layers", "2", "--steps", "2", "--rounds", "1"]
    assert main(["bench", "step", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["paced"]) == 8 and found["machine"]["cores_usable"] >= 1
    for row in found["paced"]:
        assert row["busiest_ms"] <= row["schedule_ms"] * (1 + 1e-9)
        assert row["x_schedule"] > 0.95
    cases = {row["case"]: row for row in found["demo"]}
    assert cases["resident"]["x_resident"] == 1.0 and cases["exact"]["exposed_ms"] > 0
    assert main(["bench", "step", *flags]) == 0
    assert "schedule" in capsys.readouterr().out
    assert main(["bench", "step", "--layers", "0"]) == USAGE


def test_the_training_thread(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row per placement and depth; the engine takes no time away, and torch keeps its threads."""
    monkeypatch.setattr(thread, "LAYERS", (2, 3))
    threads = torch.get_num_threads()
    assert main(["bench", "step", "--thread", "--steps", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["thread"]
    assert [(row["case"], row["layers"]) for row in rows] == [
        (case, layers) for layers in (2, 3) for case in thread.OPTIONS
    ]
    assert all(row["plain_ms"] > 0 and row["engine_ms"] > 0 for row in rows)
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(thread, "run", lambda steps, say: [thread.ThreadRow(**row) for row in rows])
    assert main(["bench", "step", "--thread"]) == 0
    told = capsys.readouterr().out
    assert all(f"{row['engine_ms']:.3f} ms" in told for row in rows)


def test_idle_lanes_do_nothing() -> None:
    lanes, done = thread.IdleLanes(), list[str]()
    lanes.launch(Lane.HOST, "before", lambda: done.append("before"))
    lanes.idle = True
    lanes.launch(Lane.HOST, "after", lambda: done.append("after"))
    assert done == ["before"]


@pytest.mark.slow
def test_a_step_on_more_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Paced copies and Adam take half of their time on two ranks: never less than compute."""
    flags = ["--ranks", "2", "--layers", "2", "--steps", "2", "--rounds", "1"]
    assert main(["bench", "scale", *flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["ranks"] for row in rows} == {1, 2} and len(rows) == 8
    for row in rows:
        assert row["efficiency"] == 1.0 if row["ranks"] == 1 else row["efficiency"] > 0
        if row["case"].startswith("paced"):
            assert row["step_ms"] > 2 * (MILLISECONDS["forward"] + MILLISECONDS["backward"])


def test_ranks_beside_their_prediction() -> None:
    """One alone is whole; of two, each has half of the copies and of Adam, and sends the rest."""
    told = {case: [scale.predicted(case, count, layers=4) for count in (1, 2)] for case in CASES}
    assert told.pop("demo") == [None, None]
    for alone, two in told.values():
        assert alone == 1.0 and two is not None and 0.5 < two < 2.0
    found = {(case, count): [50.0, 40.0, 60.0] for case in CASES for count in (1, 2)}
    rows = [scale._row(case, 2, found, 4) for case in CASES]
    assert [(row.step_ms, row.efficiency) for row in rows] == [(50.0, 1.0)] * len(rows)
    assert all(case in scale.table(rows) for case in CASES)


@pytest.mark.slow
def test_the_disk_against_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["bench", "disk", "--folder", str(tmp_path), "--size", "1MiB", "--rounds", "2"]
    found = json.loads(in_this_process([*small, "--json"], capsys))
    one_way = 16 * 64 * 64 * 12  # 16 blocks of 64 x 64, fp32 state
    sizes = [row["num_bytes"] for row in found["disk"]]
    assert sizes == [one_way, one_way, 2 * one_way, 2 * one_way]
    assert [row["x_bound"] is None for row in found["disk"]] == [True, True, True, False]
    assert found["machine"]["cpu"] and list(tmp_path.iterdir()) == []
    told = in_this_process(small, capsys)
    assert "goal: the engine's update at 0.85" in told and "disk_both_gbps = " in told


@pytest.mark.slow
def test_the_disk_of_a_size_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disk", "--size", "much"]) == USAGE
    assert "--size much" in capsys.readouterr().err
