"""The GPU's one command at toy size on a CPU: it measures, keeps, goes on; the README's table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as suite_command
from benchmarks.gpu import bus, job
from benchmarks.gpu.__main__ import main, with_plan
from benchmarks.gpu.__main__ import test_files as gpu_test_files
from benchmarks.gpu.planned import planned
from benchmarks.gpu.results import Results
from benchmarks.gpu.running import Running
from benchmarks.gpu.spec import SYSTEMS, Spec
from benchmarks.gpu.step import measure
from benchmarks.gpu.suite import GIB, Here, Item, items
from benchmarks.gpu.systems import cap, precision_of
from offloadtrain.hardware.machine import find

ROOT = Path(__file__).resolve().parents[2]
TINY = Spec(size="debug", seq_len=16, micro_batch=2, warm=1, steps=2)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_a_run_is_kept_and_goes_on(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--toy", "--budget-minutes", "30"]
    arguments += ["--only", "machine,13b"]
    first = command(*arguments)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] and "--toy" in found["command"]
    machine, alone = found["measurements"].values()
    assert machine["bus_gbps"]["both"] > 0 and machine["adam_gparams"]["1"]["fp32"] > 0
    assert alone["figures"]["tokens_per_s"] > 0 and alone["losses"][-1] < alone["losses"][0]
    assert alone["figures"]["exposed_by_lane"].keys() == {"d2h", "host", "h2d"}
    assert alone["planned"]["step_s"] > 0 and len(alone["samples"]) == 2
    assert "in the Ledger" in first.stderr
    assert json.loads((tmp_path / f"{path.stem}-trace.json").read_text())["traceEvents"]
    again = command(*arguments)
    assert again.stderr.count("measured before") == 2
    assert json.loads(path.read_text())["measurements"] == found["measurements"]


def test_only_usual_steps_tell_what_compute_waits() -> None:
    """Not the first, none after a rest, none whose sampling waits for the lanes at its end."""
    running = Running(TINY, torch.device("cpu"))
    running.steps(2)
    running.measured(3)
    running.sample()
    found = running.found([1.0], None)
    running.system.close()
    waits = [report["exposed_ms"] for report in found["reports"]]
    assert len(waits) == 6 and found["figures"]["exposed_ms"] == sorted(waits[2:5])[1]


def test_a_step_counts_guesses_and_the_memory_of_its_process() -> None:
    """With a norm that never clips all guesses are right, with one that always does none."""
    options = {"update": "speculative"}
    right = measure(replace(TINY, options=options | {"clip_norm": 1e9}))["figures"]
    wrong = measure(replace(TINY, options=options | {"clip_norm": 1e-6}))["figures"]
    assert right["right_guesses"] == 1.0 and wrong["right_guesses"] == 0.0
    found = measure(replace(TINY, size="gpt2-124m"))["figures"]
    assert found["right_guesses"] is None
    assert 0.9 < found["anonymous_bytes"] / found["host_bytes"] < 3.0


def test_ours_and_the_resident_one_from_the_same_weights() -> None:
    ours, theirs = (measure(replace(TINY, system=name)) for name in ("offloadtrain", "resident"))
    count = len(theirs["losses"])  # the norm that clips is fp64 in one, fp32 in the other
    assert ours["losses"][:count] == pytest.approx(theirs["losses"], rel=1e-3)


@pytest.mark.slow
def test_a_job_with_its_run_folder(tmp_path: Path) -> None:
    found = job.train(tmp_path / "run", toy=True)
    assert len(found["losses"]) == 4 and found["checkpoints"] > 0 and found["tokens_per_s"] > 0
    assert "4 steps" in found["summary"] and (tmp_path / "run" / "resolved.toml").exists()


def test_what_the_time_does_not_allow_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["gpu", "--out", str(tmp_path), "--toy"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--budget-minutes", "0"])
    assert main() == 0
    out, err = capsys.readouterr()
    assert "left out" in err and json.loads(Path(out.strip()).read_text())["measurements"] == {}
    assert "fsdp2" not in err
    monkeypatch.setattr(sys, "argv", [*arguments, "--budget-minutes", "0", "--list", "2"])
    assert main() == 0
    assert "fsdp2" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "all"])
    with pytest.raises(SystemExit, match="'all' is not one of"):
        main()


def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    results = Results(tmp_path, "Some GPU 80GB")
    assert results.path.name.startswith("some-gpu-80gb-")
    results.add("one", {"error": "out of memory"})
    results.add("two", {"missing": "deepspeed is not installed"})
    again = Results(tmp_path, "Some GPU 80GB")
    assert not again.has("one") and again.has("two") and not again.has("three")


def test_midnight_begins_no_new_file(tmp_path: Path) -> None:
    """But a day later the machine may be another one."""
    late = datetime(2026, 11, 21, 23, 50, tzinfo=UTC)
    first = Results(tmp_path, "Some GPU", late)
    first.add("one", {"figures": {}})
    after = Results(tmp_path, "Some GPU", late + timedelta(minutes=20))
    assert after.path == first.path and after.has("one")
    other = Results(tmp_path, "Some GPU Ti", late + timedelta(minutes=20))
    assert other.path != first.path and not other.has("one")
    assert not Results(tmp_path, "Some GPU", late + timedelta(hours=25)).has("one")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"system": "resident", "grad_accum_steps": 2},
        {"system": "fsdp2", "precision": "fp32"},
        {"options": {"state_on": "device"}, "recompute": False},
        {"options": {"working": "host", "activation": "offload", "state": "int8"}},
    ],
)
def test_every_system_trains_the_same_model(keys: dict[str, Any]) -> None:
    """From the same weights on the same tokens: the first losses agree in their precision."""
    found = measure(replace(TINY, **keys))
    assert found["losses"][0] == pytest.approx(measure(TINY)["losses"][0], rel=2e-3)
    assert found["losses"][-1] < found["losses"][0]


def test_ours_have_a_plan(tmp_path: Path) -> None:
    """Once the machine is measured; other systems have none."""
    ours, theirs = (
        Item(group="peers", list=1, name=system, seconds=1, spec=replace(TINY, system=system))
        for system in ("offloadtrain", "resident")
    )
    results = Results(tmp_path, "cpu")
    measured = {"figures": {"step_s": 1.0}}
    assert with_plan(ours, results, measured) == measured
    results.add("machine", {"machine": asdict(find("h200")[1])})
    assert with_plan(ours, results, measured)["planned"]["step_s"] > 0
    assert with_plan(theirs, results, measured) == measured
    assert with_plan(ours, results, {"error": "killed"}) == {"error": "killed"}


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another system it is a finding, of ours a failure."""
    import benchmarks.gpu.running as running_module

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(running_module, "make", full)
    assert "does not fit" in measure(replace(TINY, system="resident"))["missing"]
    with pytest.raises(torch.OutOfMemoryError):
        measure(TINY)


def test_peers_that_are_not_here_are_told() -> None:
    for system in ("deepspeed", "torchao"):
        found = measure(replace(TINY, system=system))
        told = found.get("missing", "")
        assert "figures" in found or "not installed" in told or "needs a GPU" in told


def test_the_copies_go_through_the_engines_lanes() -> None:
    found = bus.rates(torch.device("cpu"), 1 << 20)
    assert found.keys() == {"h2d", "d2h", "both", "pinned"}
    assert min(found["h2d"], found["d2h"], found["both"]) > 0 and found["pinned"] == 0


def test_the_suite() -> None:
    """Names are unique, specs survive their text, the tests come first, and a cap reaches all."""
    for toy in (True, False):
        found = items(Here(flops=989e12), toy=toy)
        names = [item.name for item in found]
        assert len(set(names)) == len(names)
        specs = [item.spec for item in found if item.spec is not None]
        assert {spec.system for spec in specs} == set(SYSTEMS)
        for spec in specs:
            assert Spec.loads(spec.dumps()) == spec and spec.shape.num_layers > 0
        assert [item.group for item in found][:3] == ["tests", "machine", "resident"]
        assert [item.list for item in found] == sorted(item.list for item in found)
    capped = items(Here(cap=20 * GIB), toy=False)
    caps = {item.spec.gpu_memory for item in capped if item.spec is not None}
    assert caps == {20 * GIB, 24 * GIB, 32 * GIB}


def test_every_system_has_a_resident_run_to_be_compared_with() -> None:
    """In the same list or the one before: but for what does not fit resident."""
    specs = [item.spec for item in items(Here(), toy=False) if item.spec is not None]
    resident = {(spec.size, spec.step_tokens) for spec in specs if spec.system == "resident"}
    others = {spec.size for spec in specs if (spec.size, spec.step_tokens) not in resident}
    assert others == {"llama-8b", "gpt-13b"}


def test_a_card_without_bf16_is_measured_in_fp16() -> None:
    found = items(Here(precision="fp16"), toy=False)
    assert {item.spec.precision for item in found if item.spec is not None} == {"fp16"}
    assert not any("split16" in item.name for item in found)


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_the_first_list_ends_within_six_minutes_and_everything_fits(card: str) -> None:
    """A host as it is rented with one card: 16 cores and 125 GiB."""
    machine = replace(find(card)[1], host_memory="118GiB", cores=16)
    found = items(Here(flops=989e12), toy=False)
    assert sum(item.seconds for item in found if item.list == 1) <= 360
    for item in found:
        if item.spec is not None and item.spec.system == "offloadtrain":
            plan = planned(item.spec, machine)
            assert plan["fits"] and plan["step_s"] > 0, item.name
            assert plan["host_bytes"] < 110 * GIB, item.name


@pytest.mark.parametrize(("has_bf16", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_the_precision_of_a_card(
    has_bf16: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    assert precision_of(torch.device("cuda", 0)) == chosen
    assert precision_of(torch.device("cpu")) == "bf16"


@pytest.mark.parametrize("installed", [True, False])
def test_the_tests_run_on_ten_processes(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pytest-xdist is there; without it on one."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "480 passed", "")

    monkeypatch.setattr(suite_command, "find_spec", lambda name: installed or name != "xdist")
    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["gpu", "--out", str(tmp_path), "--only", "tests"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    assert ("-n" in asked[-1]) == installed and "tests/gpu/test_engine_cuda.py" in asked[-1]
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["measurements"]["tests"]["summary"] == "480 passed"


def test_the_tests_of_a_gpu_are_found() -> None:
    marked, left_out = gpu_test_files()
    assert {"tests/gpu/test_engine_cuda.py", "tests/gpu/test_plan_cuda.py"} <= set(marked)
    assert left_out == []


@pytest.mark.slow
def test_nothing_that_a_bare_machine_may_lack_is_needed() -> None:
    absent = ["textual", "cyclopts", "orjson", "rich", "deepspeed", "torchao", "numba"]
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import benchmarks.gpu.__main__, benchmarks.gpu.machine, benchmarks.gpu.job
from benchmarks.gpu.spec import Spec
from benchmarks.gpu.step import measure
tiny = Spec(size="debug", seq_len=16, micro_batch=2, warm=1, steps=2)
assert measure(tiny)["figures"]["tokens_per_s"] > 0
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_smaller_card_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's allocator, for this process: the fraction of the card that the cap is."""
    card, told = SimpleNamespace(total_memory=80 * GIB), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *asked: told.append(asked)
    )
    gpu = torch.device("cuda", 0)
    cap(32 * GIB, gpu)
    cap(96 * GIB, gpu)
    cap(0, gpu)
    cap(32 * GIB, torch.device("cpu"))
    assert told == [(0.4, gpu), (1.0, gpu)]
