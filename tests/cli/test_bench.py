"""`offloadtrain bench`: rows and ratios. Never a wall time."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from offloadtrain.cli.bench import step as paced
from offloadtrain.cli.bench.adam import DEEPSPEED_ZERO2, LIMIT, ONE_PASS, Label, rows_of, table
from offloadtrain.cli.bench.rounds import measure, ratio
from offloadtrain.cli.bench.step import MILLISECONDS
from offloadtrain.cli.exit_codes import USAGE
from offloadtrain.cli.main import main
from tests.conftest import Command
from tests.small_buffers import small_demo

KEYS = set(
    "case backend state n threads ns_per_param bytes_per_param gb_per_s x_limit x_deepspeed_zero2 "
    "x_deepspeed_path x_deepspeed_step x_torch_path".split()
)
SMALL = ["bench", "adam", "--n", "4K", "--rounds", "1", "--threads", "1"]
Captured = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_adam_as_json_and_as_a_table(capsys: Captured, command: Command) -> None:
    """A row per case; torch has its number of threads afterwards."""
    threads = torch.get_num_threads()
    values = json.loads(command(*SMALL, "--json").out)
    assert all(set(row) == KEYS for row in values["rows"])
    assert {row["n"] for row in values["rows"]} == {4096}
    native = [row for row in values["rows"] if row["backend"].startswith("native")]
    if native:
        sizes = {(row["case"], row["state"]): row["bytes_per_param"] for row in native}
        adam, lion, into_copy = (
            [sizes[f"{ONE_PASS}{case}", state] for state in ("fp32", "split16", "int8")]
            for case in ("", ", Lion", ", into a second copy")
        )
        assert adam == into_copy == [28.0, 18.0, 12.125] and lion == [20.0, 14.0, 10.0625]
        assert (f"{ONE_PASS}, Adagrad", "split16") in sizes
        assert (f"{ONE_PASS}, Adagrad", "int8") not in sizes
        assert all(row["x_limit"] > 0 for row in values["rows"])
    assert all(row["x_torch_path"] > 0 for row in values["rows"])
    assert values["machine"]["cores_usable"] >= 1 and values["dispatch_us"] > 0
    small = ["bench", "adam", "--n", "64", "--rounds", "1", "--threads", str(threads + 1)]
    assert main([*small, "--states", "split16"]) == 0
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert "split16" in out and "dispatch of one bucket" in out
    assert "int8" not in out
    assert not [line for line in out.splitlines() if line.startswith(ONE_PASS) and "fp32" in line]


@pytest.mark.slow
def test_a_peer_that_prints_and_fails_is_reported_on_stderr(
    tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stdout has only data, even if a peer's compiler writes straight to the descriptor."""
    peer = "import os\nos.write(1, b'[1/2] ninja')\nprint('hello')\nraise OSError('nvcc')\n"
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/__init__.py").write_text(peer)
    monkeypatch.syspath_prepend(tmp_path)
    assert "deepspeed" not in sys.modules
    assert main([*SMALL, "--json"]) == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)["rows"]) > 3
    assert all(text in err for text in ("ninja", "hello", "nvcc"))


BAD_FLAGS = [
    (["adam", "--n", "64X"], "64M"),
    (["adam", "--n", "0"], "give a number such as 64M"),
    (["adam", "--threads", "1,0"], "at least 1, separated by commas"),
    (["adam", "--threads", "two"], "at least 1, separated by commas"),
    (["adam", "--rounds", "0"], "Must be >= 1"),
    (["adam", "--states", "fp32,int4"], "fp32, split16, int8"),
    (["step", "--layers", "0"], "Must be >= 1"),
    (["disk", "--size", "much"], "--size much"),
]


def test_bad_flags_and_sizes_beyond_the_memory_are_refused(command: Command) -> None:
    for flags, message in BAD_FLAGS:
        assert message in command("bench", *flags, code=USAGE).err
    assert "host memory" in command("bench", "adam", "--n", "4096G", code=4).err


def test_ratios_are_medians_of_rounds_without_the_first() -> None:
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0 and ratio(None, [1.0]) is None
    calls: list[int] = []
    rounds: list[int] = []
    seconds = measure({"a": lambda: calls.append(1)}, 3, rounds.append)
    assert (len(calls), len(seconds["a"]), rounds) == (4, 3, [0, 1, 2, 3])


def printed(arguments: list[str], capsys: Captured) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_a_case_is_compared_with_the_peers_of_its_run() -> None:
    times = {LIMIT: 1.0, ONE_PASS: 1.05, DEEPSPEED_ZERO2: 2.1}
    seconds = {Label(case, "native", "fp32", 28.0): [t] * 2 for case, t in times.items()}
    _, ours, _ = rows = rows_of(seconds, 100, threads=2)
    assert [ours[x] for x in ("x_limit", "x_deepspeed_zero2", "x_torch_path")] == [1.05, 2.0, None]
    assert ours["ns_per_param"] == pytest.approx(1.05e7)
    assert f"{ONE_PASS:30} native" in table(rows)


@pytest.mark.slow
def test_a_step_against_its_schedule(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never faster than the schedule: it would not have taken the times it was given."""
    small_demo(monkeypatch)
    monkeypatch.setattr(paced, "WARM_STEPS", 1)
    for name in ("run", "run_demo"):  # once for JSON and for the tables
        monkeypatch.setattr(paced, name, cache(getattr(paced, name)))
    flags = ["--layers", "2", "--steps", "2", "--rounds", "1"]
    values = json.loads(command("bench", "step", *flags, "--json").out)
    assert len(values["paced"]) == 8 and values["machine"]["cores_usable"] >= 1
    for row in values["paced"]:
        assert row["busiest_ms"] <= row["schedule_ms"] * (1 + 1e-9)
        assert row["x_schedule"] > 0.95
    cases = {row["case"]: row for row in values["demo"]}
    assert cases["resident"]["x_resident"] == 1.0 and cases["exact"]["exposed_ms"] > 0
    assert "schedule" in command("bench", "step", *flags).out


@pytest.mark.slow
def test_a_step_on_more_ranks(command: Command) -> None:
    """Paced copies and Adam take half of their time on two ranks: never less than compute."""
    flags = ["--ranks", "2", "--layers", "2", "--steps", "2", "--rounds", "1"]
    rows = json.loads(command("bench", "scale", *flags, "--json").out)["rows"]
    assert {row["ranks"] for row in rows} == {1, 2} and len(rows) == 8
    for row in rows:
        assert row["efficiency"] == 1.0 if row["ranks"] == 1 else row["efficiency"] > 0
        if row["case"].startswith("paced"):
            assert row["step_ms"] > 2 * (MILLISECONDS["forward"] + MILLISECONDS["backward"])


@pytest.mark.slow
def test_the_disk_against_its_bound(tmp_path: Path, capsys: Captured) -> None:
    small = ["bench", "disk", "--folder", str(tmp_path), "--size", "1MiB", "--rounds", "2"]
    values = json.loads(printed([*small, "--json"], capsys))
    one_way = 16 * 64 * 64 * 12  # 16 blocks of 64 x 64, fp32 state
    sizes = [row["num_bytes"] for row in values["disk"]]
    assert sizes == [one_way, one_way, 2 * one_way, 2 * one_way]
    assert [row["x_bound"] is None for row in values["disk"]] == [True, True, True, False]
    assert values["machine"]["cpu"] and list(tmp_path.iterdir()) == []
    out = printed(small, capsys)
    assert "goal: the engine's update at 0.85" in out and "disk_both_gbps = " in out
