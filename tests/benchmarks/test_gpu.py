"""The GPU's one command at toy size on a CPU: it measures, stores, resumes."""

from __future__ import annotations

import json
import re
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
from benchmarks.gpu import bus, job, stack
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
def test_a_run_is_stored_and_resumed(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--toy", "--budget-minutes", "30"]
    arguments += ["--only", "machine,13b"]
    first = command(*arguments)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    values = json.loads(path.read_text())
    assert values["machine"]["torch"] and "--toy" in values["command"]
    machine, alone = values["measurements"].values()
    assert machine["bus_gbps"]["both"] > 0 and machine["adam_gparams"]["1"]["fp32"] > 0
    assert alone["figures"]["tokens_per_s"] > 0 and alone["losses"][-1] < alone["losses"][0]
    assert alone["figures"]["exposed_by_lane"].keys() == {"d2h", "host", "h2d"}
    assert alone["planned"]["step_s"] > 0 and len(alone["samples"]) == 2
    assert "in the Ledger" in first.stderr
    assert json.loads((tmp_path / f"{path.stem}-trace.json").read_text())["traceEvents"]
    again = command(*arguments)
    assert again.stderr.count("measured before") == 2
    assert json.loads(path.read_text())["measurements"] == values["measurements"]


def test_waits_are_of_usual_steps_only() -> None:
    """Not the first, none after a rest, none whose sampling waits for the lanes at its end."""
    running = Running(TINY, torch.device("cpu"))
    running.steps(2)
    running.measured(3)
    running.sample()
    values = running.found([1.0], None)
    running.system.close()
    waits = [report["exposed_ms"] for report in values["reports"]]
    assert len(waits) == 6 and values["figures"]["exposed_ms"] == sorted(waits[2:5])[1]


@pytest.mark.slow
def test_a_step_counts_guesses_and_the_memory_of_its_process() -> None:
    """With a norm that never clips all guesses are right, with one that always does none."""
    options = {"update": "speculative"}
    right = measure(replace(TINY, options=options | {"clip_norm": 1e9}))["figures"]
    wrong = measure(replace(TINY, options=options | {"clip_norm": 1e-6}))["figures"]
    assert right["right_guesses"] == 1.0 and wrong["right_guesses"] == 0.0
    values = measure(replace(TINY, size="gpt2-124m"))["figures"]
    assert values["right_guesses"] is None
    assert 0.9 < values["anonymous_bytes"] / values["host_bytes"] < 3.0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch's compiler warns itself
def test_the_resident_run_computes_as_the_offloaded_one() -> None:
    """Compiled, with a budget for what layers save, and recomputed: the losses are the same."""
    fused = {"compile_blocks": True}
    for options in (fused, fused | {"activation": "selective", "activation_budget": 0.15}):
        resident, offloaded = (
            measure(replace(TINY, system=system, options=options))["losses"]
            for system in ("resident", "offloadtrain")
        )
        assert resident == offloaded[: len(resident)]
    eager = replace(TINY, system="resident", options={"activation": "selective"})
    assert "offloaded only" in measure(eager)["missing"]


@pytest.mark.slow
def test_a_job_with_its_run_folder(tmp_path: Path) -> None:
    values = job.train(tmp_path / "run", toy=True)
    assert len(values["losses"]) == 4 and values["checkpoints"] > 0 and values["tokens_per_s"] > 0
    assert "4 steps" in values["summary"] and (tmp_path / "run" / "resolved.toml").exists()


def test_measurements_that_the_time_does_not_allow_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["gpu", "--out", str(tmp_path), "--toy"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--budget-minutes", "0"])
    assert main() == 0
    out, err = capsys.readouterr()
    summary, path = out.splitlines()
    assert "left out, takes 20 s and 0 s are left" in err
    assert summary.startswith("left out: ") and "--only tests,machine,resident" in summary
    assert json.loads(Path(path).read_text())["measurements"] == {}
    assert "fsdp2" not in err
    monkeypatch.setattr(sys, "argv", [*arguments, "--budget-minutes", "0", "--list", "2"])
    assert main() == 0
    assert "fsdp2" in capsys.readouterr().err
    groups = ["state_on", "tests", "resident"]
    monkeypatch.setattr(
        sys, "argv", [*arguments, "--budget-minutes", "0", "--only", ",".join(groups)]
    )
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("--only state_on,tests,resident")
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "all"])
    with pytest.raises(SystemExit, match="'all' is not one of"):
        main()


def test_results_are_stored_per_card_and_failures_are_tried_again(tmp_path: Path) -> None:
    """Midnight begins no new file; a day later the machine may be another one."""
    late = datetime(2026, 11, 21, 23, 50, tzinfo=UTC)
    results = Results(tmp_path, "Some GPU 80GB", late)
    assert results.path.name.startswith("some-gpu-80gb-")
    results.add("failed", {"error": "out of memory"})
    results.add("missing", {"missing": "deepspeed is not installed"})
    after = Results(tmp_path, "Some GPU 80GB", late + timedelta(minutes=20))
    assert after.path == results.path and not after.has("failed") and after.has("missing")
    other = Results(tmp_path, "Some GPU Ti", late + timedelta(minutes=20))
    assert other.path != results.path and not other.has("missing")
    assert not Results(tmp_path, "Some GPU 80GB", late + timedelta(hours=25)).has("missing")


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
    values = measure(replace(TINY, **keys))
    assert values["losses"][0] == pytest.approx(measure(TINY)["losses"][0], rel=2e-3)
    assert values["losses"][-1] < values["losses"][0]


def test_ours_have_a_plan(tmp_path: Path) -> None:
    """Once the machine is measured; other systems have none."""
    ours, resident = (
        Item(group="peers", list=1, name=system, seconds=1, spec=replace(TINY, system=system))
        for system in ("offloadtrain", "resident")
    )
    results = Results(tmp_path, "cpu")
    measured = {"figures": {"step_s": 1.0}}
    assert with_plan(ours, results, measured) == measured
    results.add("machine", {"machine": asdict(find("h200")[1])})
    assert with_plan(ours, results, measured)["planned"]["step_s"] > 0
    assert with_plan(resident, results, measured) == measured
    assert with_plan(ours, results, {"error": "killed"}) == {"error": "killed"}


def test_a_model_that_does_not_fit_is_a_result_of_others_and_a_failure_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other systems may be missing; copies use the lanes of the engine."""
    import benchmarks.gpu.running as running_module

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(running_module, "make", full)
        assert "does not fit" in measure(replace(TINY, system="resident"))["missing"]
        with pytest.raises(torch.OutOfMemoryError):
            measure(TINY)
    for system in ("deepspeed", "torchao"):
        measured = measure(replace(TINY, system=system))
        missing = measured.get("missing", "")
        assert "figures" in measured or "not installed" in missing or "needs a GPU" in missing
    copies = bus.rates(torch.device("cpu"), 1 << 20)
    assert min(copies["h2d"], copies["d2h"], copies["both"]) > 0 and copies["pinned"] == 0


def test_the_suite() -> None:
    """Names are unique, specs survive their text, the tests come first, and a cap reaches all."""
    for toy in (True, False):
        values = items(Here(flops=989e12), toy=toy)
        names = [item.name for item in values]
        assert len(set(names)) == len(names)
        specs = [item.spec for item in values if item.spec is not None]
        assert {spec.system for spec in specs} == set(SYSTEMS)
        for spec in specs:
            assert Spec.loads(spec.dumps()) == spec and spec.shape.num_layers > 0
        assert [item.group for item in values][:3] == ["tests", "machine", "resident"]
        assert [item.list for item in values] == sorted(item.list for item in values)
    capped = items(Here(cap=20 * GIB), toy=False)
    caps = {item.spec.gpu_memory for item in capped if item.spec is not None}
    assert caps == {20 * GIB, 24 * GIB, 32 * GIB}


def test_the_page_names_every_group() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"^\| [12, ]+ \| `(\w+)` ", row)}
    assert named == {item.group for item in items(Here(), toy=False)}


def test_the_calls_of_the_page_take_the_time_that_it_gives() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    calls = re.findall(r"benchmarks\.gpu --only (\S+) --budget-minutes (\d+)", page)
    assert len(calls) == 2
    allowed = []
    for names, minutes in calls:
        groups = names.split(",")
        values = [item for item in items(Here(flops=989e12), toy=False) if item.group in groups]
        assert {item.group for item in values} == set(groups)
        allowed.append(sum(item.seconds for item in values))
        assert allowed[-1] <= 60 * int(minutes)
    assert f"allows {allowed[0]:.0f} s and {allowed[1]:.0f} s for them" in " ".join(page.split())


def test_every_system_has_a_resident_run_to_be_compared_with() -> None:
    """In the same list or the one before: but for what does not fit resident."""
    specs = [item.spec for item in items(Here(), toy=False) if item.spec is not None]
    resident = {(spec.size, spec.step_tokens) for spec in specs if spec.system == "resident"}
    alone = {spec.size for spec in specs if (spec.size, spec.step_tokens) not in resident}
    assert alone == {"llama-8b", "gpt-13b"}


def test_a_card_without_bf16_is_measured_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, precision in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda value=has_bf16, **_: value)
        assert precision_of(torch.device("cuda", 0)) == precision
    values = items(Here(precision="fp16"), toy=False)
    assert {item.spec.precision for item in values if item.spec is not None} == {"fp16"}
    assert not any("split16" in item.name for item in values)


@pytest.mark.slow
def test_the_first_list_ends_within_six_minutes_and_everything_fits() -> None:
    """A host as it is rented with one card, the smaller one: 16 cores and 125 GiB."""
    machine = replace(find("h100")[1], host_memory="118GiB", cores=16)
    values = items(Here(flops=989e12), toy=False)
    assert sum(item.seconds for item in values if item.list == 1) <= 360
    for item in values:
        if item.spec is not None and item.spec.system == "offloadtrain":
            plan = planned(item.spec, machine)
            assert plan["fits"] and plan["step_s"] > 0, item.name
            assert plan["host_bytes"] < 110 * GIB, item.name


@pytest.mark.parametrize("installed", [True, False])
def test_the_tests_run_on_ten_processes(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pytest-xdist is there; without it on one."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "480 passed", "")

    monkeypatch.setattr(suite_command, "find_spec", lambda name: installed or name != "xdist")
    monkeypatch.setattr(subprocess, "run", run)
    arguments = ["gpu", "--out", str(tmp_path), "--only", "tests"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    assert ("-n" in commands[-1]) == installed and "tests/gpu/test_engine_cuda.py" in commands[-1]
    marked, left_out = gpu_test_files()
    assert "tests/gpu/test_plan_cuda.py" in marked and left_out == []
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["measurements"]["tests"]["summary"] == "480 passed"


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
    card, caps = SimpleNamespace(total_memory=80 * GIB), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *cap: caps.append(cap)
    )
    gpu = torch.device("cuda", 0)
    cap(32 * GIB, gpu)
    cap(96 * GIB, gpu)
    cap(0, gpu)
    cap(32 * GIB, torch.device("cpu"))
    assert caps == [(0.4, gpu), (1.0, gpu)]


def test_ways_over_a_stack_of_layers() -> None:
    """Of one loss each, and of documents that are apart, whichever way."""
    by_loss, by_attention = stack.losses(toy=True), stack.packed(toy=True)
    assert by_loss["step_ms"].keys() >= {"whole logits", "in parts"}
    assert ("liger" in by_loss["step_ms"]) != ("liger" in by_loss.get("without", ""))
    of_whole_logits, *losses = by_loss["losses"].values()
    assert losses == [pytest.approx(of_whole_logits, rel=1e-2)] * len(losses)
    mask, varlen, rows = by_attention["losses"].values()
    assert varlen == pytest.approx(mask, rel=1e-3) and abs(rows - mask) > 1e-5
    assert by_attention["documents"] > by_attention["rows"]
    for result in (by_loss, by_attention):
        assert min(result["step_ms"].values()) > 0 and " ms" in result["summary"]
