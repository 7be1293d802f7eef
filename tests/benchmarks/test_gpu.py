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

from benchmarks.gpu import bus, convergence, largest
from benchmarks.gpu.__main__ import main, with_plans
from benchmarks.gpu.__main__ import test_files as gpu_test_files
from benchmarks.gpu.pair import ROUNDS, compare
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


@pytest.mark.parametrize("options", [{}, {"state_on": "device"}])
def test_ours_and_the_resident_one_in_turn(options: dict[str, str]) -> None:
    found = compare(replace(TINY, options=options), replace(TINY, system="resident"))
    ours, theirs = found["systems"].values()
    assert [ours["spec"]["system"], theirs["spec"]["system"]] == ["offloadtrain", "resident"]
    assert len(found["ratios"]) == ROUNDS and found["ratio"] == sorted(found["ratios"])[1]
    count = len(theirs["losses"])  # the norm that clips is fp64 in one, fp32 in the other
    assert ours["losses"][:count] == pytest.approx(theirs["losses"], rel=1e-3)
    assert len(ours["samples"]) == len(theirs["samples"]) == 2 * ROUNDS


@pytest.mark.slow
def test_the_largest_and_the_curves() -> None:
    found = largest.train(1 << 30, toy=True)
    assert found["planned"]["params"] > 1e8 and found["figures"]["tokens_per_s"] > 0
    losses = {case: convergence.curve(case, toy=True)["losses"] for case in convergence.CASES}
    for curve in losses.values():
        assert curve[-1] < curve[0] and curve == pytest.approx(losses["resident"], rel=1e-3)


def test_what_the_time_does_not_allow_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["gpu", "--out", str(tmp_path), "--toy"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--budget-minutes", "0"])
    assert main() == 0
    out, err = capsys.readouterr()
    assert "left out" in err and json.loads(Path(out.strip()).read_text())["measurements"] == {}
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


def test_ours_have_the_plan_s_word_beside_them(tmp_path: Path) -> None:
    """Alone and in a pair, once the machine is measured; others have no plan."""
    ours, theirs = TINY, replace(TINY, system="resident")
    item = Item(group="peers", name="a pair", seconds=1, specs=(ours, theirs))
    results = Results(tmp_path, "cpu")
    measured = {"figures": {"step_s": 1.0}}
    assert with_plans(item, results, {"systems": {ours.name: dict(measured)}}) == {
        "systems": {ours.name: measured}
    }
    results.add("machine", {"machine": asdict(find("h200")[1])})
    systems = {spec.name: dict(measured) for spec in item.specs}
    found = with_plans(item, results, {"systems": systems})["systems"]
    assert found[ours.name]["planned"]["step_s"] > 0 and "planned" not in found[theirs.name]
    alone = with_plans(replace(item, specs=(ours,)), results, dict(measured))
    assert alone["planned"] == found[ours.name]["planned"]


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


@pytest.mark.parametrize(
    ("too_large", "told"),
    [("resident", "resident does not fit"), ("offloadtrain", "both do not fit")],
)
def test_what_does_not_fit_beside_the_other(
    too_large: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is ours a failure then: alone it may fit."""

    def full(running: Running, spec: Spec, device: torch.device) -> None:
        if spec.system == too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        begin(running, spec, device)

    begin = Running.__init__
    monkeypatch.setattr(Running, "__init__", full)
    assert told in compare(TINY, replace(TINY, system="resident"))["missing"]


@pytest.mark.slow
def test_a_pair_on_smaller_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own: what it takes beyond it would be the other's."""
    specs = [replace(TINY, gpu_memory=GIB), replace(TINY, system="resident", gpu_memory=GIB)]
    real = Running.found

    def found(running: Running, samples: list[float], peak: int | None) -> dict[str, Any]:
        took = 2 * GIB if running.spec.system == too_large else GIB
        return real(running, samples, took)

    monkeypatch.setattr(Running, "found", found)
    too_large = "neither"
    assert compare(*specs)["ratio"] > 0
    too_large = "resident"
    assert (
        "resident debug 2x16x1 bf16 1GiB does not fit: it took 2.0 GiB"
        in (compare(*specs)["missing"])
    )


def test_the_copies_go_through_the_engines_lanes() -> None:
    found = bus.rates(torch.device("cpu"), 1 << 20)
    assert found.keys() == {"h2d", "d2h", "both", "pinned"}
    assert min(found["h2d"], found["d2h"], found["both"]) > 0 and found["pinned"] == 0


def test_the_suite() -> None:
    """Names are unique, specs survive their text, goals come first, and a cap reaches all."""
    for toy in (True, False):
        found = items(Here(card=139 * GIB, flops=989e12), toy=toy)
        names = [item.name for item in found]
        assert len(set(names)) == len(names)
        specs = [spec for item in found for spec in item.specs]
        assert {spec.system for spec in specs} == set(SYSTEMS)
        for spec in specs:
            assert Spec.loads(spec.dumps()) == spec and spec.shape.num_layers > 0
        assert [item.group for item in found][:3] == ["tests", "machine", "resident"]
    capped = items(Here(card=39 * GIB, cap=24 * GIB), toy=False)
    assert all(s.gpu_memory in (24 * GIB, 32 * GIB) for i in capped for s in i.specs)
    assert next(i.name for i in capped if i.group == "largest") == "largest 32 GiB"
    assert "largest 80 GiB" not in [i.name for i in capped]


def test_a_card_without_bf16_is_measured_in_fp16() -> None:
    found = items(Here(card=32 * GIB, precision="fp16"), toy=False)
    assert {spec.precision for item in found for spec in item.specs} == {"fp16"}
    assert not any("split16" in item.name for item in found)
    assert len([item for item in found if item.group == "grid"]) == 216


@pytest.mark.parametrize(("has_bf16", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_the_precision_of_a_card(
    has_bf16: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16)
    assert precision_of(torch.device("cuda", 0)) == chosen
    assert precision_of(torch.device("cpu")) == "bf16"


def test_the_grid_is_whole() -> None:
    """Every size, mode, format, accumulation and length, under 32 GB; near the usual first."""
    here = Here(card=139 * GIB, flops=989e12)
    grid = [item for item in items(here, toy=False) if item.group == "grid"]
    assert sum(item.seconds for item in grid) < 14 * 3600
    found = [item.specs[0] for item in grid]
    cells = {
        (s.size, s.options["update"], s.options["state"], s.grad_accum_steps, s.seq_len)
        for s in found
    }
    assert len(cells) == len(found) == 4 * 3 * 3 * 3 * 3
    assert all(spec.gpu_memory == 32 * GIB for spec in found)
    first = [spec for spec in found if spec.size == found[0].size][:5]
    assert {s.grad_accum_steps for s in first} | {s.options["state"] for s in first} >= {1, 4, 16}


def test_what_a_goal_is_about_is_measured_within_three_calls_of_ten_minutes() -> None:
    """On an H200, by the allowances, which are long: the tests, then pairs, then 13B."""
    found = items(Here(card=139 * GIB, flops=989e12), toy=False)
    first = found[: next(n for n, item in enumerate(found) if item.group == "modes") + 1]
    assert {item.group for item in first} == {
        "tests",
        "machine",
        "resident",
        "peers",
        "13b",
        "modes",
    }
    assert sum(item.seconds for item in first) < 3 * 540


@pytest.mark.slow
def test_every_measurement_has_a_plan() -> None:
    machine = find("h200")[1]
    for item in items(Here(card=139 * GIB), toy=False):
        for spec in item.specs if item.group != "grid" else ():
            if spec.system == "offloadtrain":
                found = planned(spec, machine)
                assert found["step_s"] > 0
                assert found["fits"] or spec.options.get("update") == "speculative", item.name


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
import benchmarks.gpu.__main__, benchmarks.gpu.largest, benchmarks.gpu.machine
import benchmarks.gpu.convergence
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
