"""The GPU's one command at toy size on a CPU: it measures, keeps, goes on; the README's table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import convergence, largest
from benchmarks.gpu.__main__ import test_files as gpu_test_files
from benchmarks.gpu.planned import planned
from benchmarks.gpu.results import Results
from benchmarks.gpu.spec import SYSTEMS, Spec
from benchmarks.gpu.step import measure
from benchmarks.gpu.suite import GIB, items
from offloadtrain import results_table
from offloadtrain.cli import main
from offloadtrain.plan.machine import find

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


def test_a_run_is_kept_and_goes_on(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--toy", "--budget-minutes", "30", "--only", "resident"]
    first = command(*arguments)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    found = json.loads(path.read_text())
    assert found["machine"]["torch"] and "--toy" in found["command"]
    names = list(found["measurements"])
    measured = found["measurements"]
    assert [name.split()[0] for name in names] == ["resident", "offloadtrain", "offloadtrain"]
    for one in measured.values():
        assert one["figures"]["tokens_per_s"] > 0 and len(one["samples"]) == 2
        assert one["losses"][-1] < one["losses"][0]
    assert json.loads((tmp_path / f"{path.stem}-trace.json").read_text())["traceEvents"]
    again = command(*arguments)
    assert again.stderr.count("measured before") == 3
    assert json.loads(path.read_text())["measurements"] == found["measurements"]


def test_the_largest_and_the_curves(tmp_path: Path) -> None:
    found = largest.train(1 << 30, toy=True)
    assert found["planned"]["params"] > 1e8 and found["figures"]["tokens_per_s"] > 0
    losses = {
        case: convergence.curve(case, tmp_path, toy=True)["losses"] for case in convergence.CASES
    }
    for curve in losses.values():
        assert curve[-1] < curve[0] and curve == pytest.approx(losses["resident"], rel=1e-3)


def test_what_the_time_does_not_allow_is_left_out(tmp_path: Path) -> None:
    done = command("--out", str(tmp_path), "--toy", "--budget-minutes", "0")
    assert done.returncode == 0 and "left out" in done.stderr
    assert json.loads(Path(done.stdout.strip()).read_text())["measurements"] == {}
    assert command("--out", str(tmp_path), "--toy", "--only", "all").returncode != 0


def test_a_failure_is_told_and_tried_again(tmp_path: Path) -> None:
    results = Results(tmp_path, "Some GPU 80GB")
    assert results.path.name.startswith("some-gpu-80gb-")
    results.add("one", {"error": "out of memory"})
    results.add("two", {"missing": "deepspeed is not installed"})
    again = Results(tmp_path, "Some GPU 80GB")
    assert not again.has("one") and again.has("two") and not again.has("three")


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


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another system it is a finding, of ours a failure."""
    import benchmarks.gpu.step as step_module

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(step_module, "make", full)
    assert "does not fit" in measure(replace(TINY, system="resident"))["missing"]
    with pytest.raises(torch.OutOfMemoryError):
        measure(TINY)


def test_peers_that_are_not_installed_are_told() -> None:
    for system in ("deepspeed", "torchao"):
        found = measure(replace(TINY, system=system))
        assert "figures" in found or "not installed" in found["missing"]


def test_the_suite() -> None:
    """Names are unique, specs survive their text, goals come first, and a cap reaches all."""
    for toy in (True, False):
        found = items(toy=toy, gpu_memory=0, host_memory=128 * GIB, card=139 * GIB)
        names = [item.name for item in found]
        assert len(set(names)) == len(names)
        specs = [item.spec for item in found if item.spec]
        assert {spec.system for spec in specs} == set(SYSTEMS)
        for spec in specs:
            assert Spec.loads(spec.dumps()) == spec and spec.shape.num_layers > 0
        assert [item.group for item in found][:3] == ["tests", "machine", "resident"]
    capped = items(toy=False, gpu_memory=24 * GIB, host_memory=64 * GIB, card=39 * GIB)
    assert all(i.spec.gpu_memory in (24 * GIB, 32 * GIB) for i in capped if i.spec)
    assert next(i.name for i in capped if i.group == "largest") == "largest 32 GiB"
    assert "largest 80 GiB" not in [i.name for i in capped]
    assert not any(i.spec.grad_accum_steps == 16 for i in capped if i.spec and i.group == "13b")


def test_every_measurement_has_a_plan() -> None:
    machine = find("h200")[1]
    for item in items(toy=False, gpu_memory=0, host_memory=128 * GIB, card=139 * GIB):
        if item.spec is not None and item.spec.system == "offloadtrain" and item.group != "grid":
            found = planned(item.spec, machine)
            assert found["step_s"] > 0
            assert found["fits"] or item.spec.options.get("update") == "speculative", item.name


def test_the_tests_of_a_gpu_are_found() -> None:
    marked, left_out = gpu_test_files()
    assert {"tests/gpu/test_engine_cuda.py", "tests/gpu/test_plan_cuda.py"} <= set(marked)
    assert left_out == []


# ---- the README's table


def results_file(folder: Path, gpu: str = "NVIDIA X") -> None:
    resident = {"figures": {"step_s": 1.0, "tokens_per_s": 1000.0, "mfu": 0.5}}
    offloaded = {
        "figures": {"step_s": 1.08, "tokens_per_s": 925.9, "mfu": 0.46, "device_peak_bytes": 2**33},
        "reports": [{"exposed_ms": 30.0}, {"exposed_ms": 20.0}, {"exposed_ms": 25.0}],
    }
    values = {
        "schema": 1,
        "device": gpu,
        "machine": {"gpu": gpu},
        "measurements": {
            "machine": {"machine": {}},
            "resident llama-3b 4x2048x1 bf16": resident,
            "offloadtrain llama-3b 4x2048x1 bf16 state=split16": offloaded,
            "deepspeed llama-3b 4x2048x1 bf16": {"missing": "deepspeed is not installed"},
        },
    }
    (folder / "x-20261121.json").write_text(json.dumps(values))


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results_file(tmp_path)
    (tmp_path / "other.json").write_text('{"rows": []}')
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[3] == (
        "| NVIDIA X | offloadtrain llama-3b 4x2048x1 bf16 state=split16 | 1.080 s | 926 | 46.0 % | "
        "1.08 | 25 ms | 8.0 GiB | `x-20261121.json` |"
    )


def test_a_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == results_table.NOTHING
    assert main(["report", str(tmp_path / "absent")]) == 1
    (tmp_path / "broken.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_readme_has_what_the_results_say() -> None:
    text = (ROOT / "README.md").read_text()
    (told,) = re.findall(r"<!-- results -->\n(.*?)\n<!-- /results -->", text, re.DOTALL)
    assert told == results_table.table(results_table.read(ROOT / "benchmarks" / "results"))


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
