"""`offloadtrain report`: results files, and nothing else, become tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.spec import Spec
from offloadtrain.cli import results_tables
from offloadtrain.cli.main import main

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
WIDE = Spec(size="llama-3b", seq_len=2048, micro_batch=16)
USUAL = replace(WIDE, micro_batch=4)
SPLIT = replace(USUAL, options={"state": "split16"})
LARGE = Spec(size="gpt-13b", micro_batch=4, grad_accum_steps=16, gpu_memory=32 << 30)


def steps(spec: Spec, step_s: float, **figures: Any) -> dict[str, Any]:
    speed = {
        "params": 3.2e9,
        "step_tokens": spec.step_tokens,
        "step_s": step_s,
        "tokens_per_s": spec.step_tokens / step_s,
        "tflops": 400.0,
        "mfu": 0.42,
        "mfu_6p": 0.4,
        "device_peak_bytes": 1 << 35,
    }
    if spec.system == "offloadtrain":
        speed |= {
            "exposed_ms": 12.4,
            "exposed_by_lane": {"h2d": 9.1, "host": 3.1, "d2h": 0.2},
            "host_bytes": 40 << 30,
            "anonymous_bytes": 44 << 30,
            "host_bytes_per_param": 14.4,
            "bus_bytes_per_param": 4.0,
        }
    return {"group": "resident", "spec": asdict(spec), "figures": speed | figures}


def write(folder: Path, gpu: str = "NVIDIA X", **more: Any) -> Path:
    """A file with something for every section."""
    resident, deepspeed = replace(WIDE, system="resident"), replace(USUAL, system="deepspeed")
    speculative = replace(SPLIT, options={"state": "split16", "update": "speculative"})
    runs = [
        *((WIDE, 2.16), (resident, 2.0), (USUAL, 0.8), (deepspeed, 2.0)),
        *((speculative, 0.6), (SPLIT, 0.66)),
    ]
    measurements = {
        "tests": {"group": "tests", "summary": "357 passed"},
        "machine": {
            "group": "machine",
            "machine": {"dram_gbps": 350.0, "int8_gparams": 6.71, "int8_copying_gparams": 5.55},
            "bus_gbps": {"h2d": 55.0, "d2h": 54.0, "both": 98.0, "pinned": 1.0},
            "adam_gparams": {"1": {"fp32": 0.7}, "16": {"fp32": 7.1, "split16": 11.0}},
        },
        **{spec.name: steps(spec, step_s) for spec, step_s in runs},
        LARGE.name: steps(LARGE, 20.0, mfu_6p=0.31, host_bytes_per_param=9.3)
        | {"planned": {"step_s": 16.0}},
        "torchao": {"group": "peers", "missing": "torchao is not installed"},
    }
    values = {"schema": 1, "device": gpu, "machine": {"gpu": gpu}, "measurements": measurements}
    path = folder / f"{gpu.lower().replace(' ', '-')}-20261121.json"
    path.write_text(json.dumps(values | more))
    return path


def report(folder: Path, capsys: Captured, *arguments: str) -> list[str]:
    assert main(["report", str(folder), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_goals(tmp_path: Path, capsys: Captured) -> None:
    """Each with what was measured, and whether that is enough."""
    write(tmp_path)
    lines = report(tmp_path, capsys, "--all")
    goals = [line for line in lines if "≤" in line or "≥" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in goals]
    assert [row[2:4] for row in cells] == [
        ["1.08", "yes"],
        ["not measured", "-"],
        ["2.50", "yes"],
        ["1.10", "no"],
        ["31 %", "yes"],
        ["4.00", "yes"],
        ["14.40", "yes"],
        ["14.40", "no"],
        ["not measured", "-"],
    ]


def test_runs_of_other_settings_do_not_count_for_a_goal(tmp_path: Path) -> None:
    """Another model, other options, fewer tokens: the goal of 3B is about fp32 at 32k tokens."""
    write(tmp_path)
    (file,) = results_tables.read(tmp_path)
    wide, _ = results_tables.GOALS[:2]
    assert wide.worst(file) == pytest.approx(1.08)
    for ours in (
        replace(WIDE, size="llama-7b"),
        replace(WIDE, options={"state_on": "device"}),
        USUAL,
    ):
        other = replace(ours, system="resident", options={})
        runs = {ours.name: steps(ours, 9.0), other.name: steps(other, 1.0)}
        write(tmp_path, measurements=runs)
        (file,) = results_tables.read(tmp_path)
        assert wide.worst(file) is None


def test_every_step_with_its_plan_and_memory(tmp_path: Path, capsys: Captured) -> None:
    write(tmp_path, note="one socket")
    text = "\n".join(report(tmp_path, capsys, "--all"))
    assert text.startswith("`nvidia-x-20261121.json`: one socket")
    ours, resident = WIDE.name, replace(WIDE, system="resident").name
    figures = "`resident` | 2.160 s | 15.2k | 92.6 % | 42.0 % | 32.0 GiB | 40.0 GiB |"
    assert f"| {ours} | {figures}" in text
    assert (
        f"| {resident} | `resident` | 2.000 s | 16.4k | 100.0 % | 42.0 % | 32.0 GiB | - |" in text
    )
    assert f"| {USUAL.name} | `resident` | 0.800 s | 10.2k | - |" in text
    assert f"| {LARGE.name} | 16.000 s | 20.000 s | 1.25 | 12 ms (h2d 9, host 3) | - |" in text
    assert f"| {LARGE.name} | 40.0 GiB | 44.0 GiB | 1.10 |" in text
    assert "| pinned copies, both | 98.0 GB/s |" in text
    assert "| Adam, threads: 16 | fp32 7.10, split16 11.00 Gparam/s |" in text
    assert "| Adam of an update, alone | int8 6.71 Gparam/s |" in text
    assert "| Adam of an update, while pinned copies run both ways | int8 5.55 Gparam/s |" in text
    assert "| tests | 357 passed |" in text
    assert "| torchao | torchao is not installed |" in text


COMPILED = {"compile_blocks": True, "activation": "selective", "activation_budget": 0.15}


def test_layers_that_compute_otherwise_are_not_compared(tmp_path: Path) -> None:
    """Compiled layers, FP8 and what is saved change what a resident run takes, too. Where state is
    and what it is stored in do not, nor offloaded inputs of recomputed layers."""
    runs = [
        (replace(WIDE, system="resident"), 2.0),
        (replace(WIDE, system="resident", options=COMPILED), 1.0),
        (replace(WIDE, options={"state": "split16", "activation": "offload"}), 4.0),
        (replace(WIDE, options=COMPILED | {"state": "int8"}), 3.0),
        (replace(WIDE, options=COMPILED | {"fp8": "tensorwise"}), 0.9),
        (replace(WIDE, options=COMPILED | {"activation_budget": 0.3}), 0.9),
        (replace(WIDE, options={"compile_blocks": True}), 0.9),
        (replace(WIDE, recompute=False), 0.9),
    ]
    write(tmp_path, measurements={spec.name: steps(spec, seconds) for spec, seconds in runs})
    (file,) = results_tables.read(tmp_path)
    shares = [file.rate_over_resident(each) for each in file.steps]
    assert shares == [1.0, 1.0, 0.5, pytest.approx(1 / 3), *[None] * 4]


def test_the_newest_measurement_of_each_card_counts(tmp_path: Path, capsys: Captured) -> None:
    """Each compared with the resident run of its own file: hosts differ from day to day."""
    write(tmp_path)
    resident, never = replace(WIDE, system="resident"), replace(SPLIT, options={"clip_norm": 1e9})
    chosen = replace(WIDE, options=COMPILED | {"state": "int8", "extra": 3})
    again = [(WIDE, 3.0), (resident, 1.5), (chosen, 1.0), (never, 1.0)]
    older = tmp_path / "nvidia-x-20261121.json"
    older.rename(tmp_path / "nvidia-x-20261101.json")
    measurements = {spec.name: steps(spec, seconds) for spec, seconds in again}
    write(tmp_path, note="another socket", measurements=measurements)
    write(tmp_path, "NVIDIA Y", measurements={LARGE.name: steps(LARGE, 20.0)})
    lines = report(tmp_path, capsys)
    assert lines[0] == "`nvidia-x-20261101.json`, `nvidia-x-20261121.json`: another socket"
    rows = [[cell.strip() for cell in line.strip("|").split("|")][:5] for line in lines]
    table = [row for row in rows if len(row) == 5 and " s" in row[2]]
    assert table == [
        ["llama-3b, 8k", "offloadtrain", "0.800 s", "10.2k", "-"],
        ["llama-3b, 8k", "offloadtrain, 16-bit state", "0.660 s", "12.4k", "-"],
        [
            "llama-3b, 8k",
            "offloadtrain, 16-bit state, speculative updates",
            "0.600 s",
            "13.7k",
            "-",
        ],
        ["llama-3b, 8k", "DeepSpeed ZeRO-2 offload", "2.000 s", "4.1k", "-"],
        ["llama-3b, 32k", "torch, all on the GPU", "1.500 s", "21.8k", "100.0 %"],
        ["llama-3b, 32k", "offloadtrain", "3.000 s", "10.9k", "50.0 %"],
        [
            "llama-3b, 32k",
            "offloadtrain, keeps 15 % of activations, compiled, extra=3, 8-bit state",
            "1.000 s",
            "32.8k",
            "-",
        ],
        ["gpt-13b, 64k", "offloadtrain, cap of 32.0 GiB", "20.000 s", "3.28k", "-"],
        ["gpt-13b, 64k", "offloadtrain, cap of 32.0 GiB", "20.000 s", "3.28k", "-"],
    ]


def test_only_what_was_measured_on_a_gpu(tmp_path: Path, capsys: Captured) -> None:
    assert report(tmp_path, capsys) == [results_tables.NOTHING]
    write(tmp_path, machine={"cores": 2})
    (tmp_path / "other.json").write_text('{"rows": []}')
    (tmp_path / "list.json").write_text("[]")
    assert report(tmp_path, capsys) == [results_tables.NOTHING]
    write(tmp_path, gpu="NVIDIA Y", measurements={})
    assert report(tmp_path, capsys) == [results_tables.NOTHING]


def test_damaged_files_and_a_report_of_nothing(tmp_path: Path, capsys: Captured) -> None:
    gpu = '"schema": 1, "machine": {"gpu": "X"}'
    damaged = {
        "{": "cannot be read",
        f"{{{gpu}}}": "not as make gpu writes it",
        f'{{{gpu}, "device": "X", "measurements": 3}}': "not as",
    }
    for text, reason in damaged.items():
        (tmp_path / "broken.json").write_text(text)
        assert main(["report", str(tmp_path)]) == 2
        assert reason in capsys.readouterr().err
    assert main(["report", str(tmp_path / "absent")]) == 2
    assert "is no folder: give that of the results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "printed"),
    [("README.md", results_tables.summary), ("docs/gpu.md", results_tables.everything)],
)
def test_pages_have_the_tables_of_the_results(
    page: str, printed: Callable[[Sequence[results_tables.ResultsFile]], str]
) -> None:
    text = (ROOT / page).read_text()
    (table,) = re.findall(r"<!-- results -->\n(.*?)\n<!-- /results -->", text, re.DOTALL)
    assert table == printed(results_tables.read(ROOT / "benchmarks" / "results"))
