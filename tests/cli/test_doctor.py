"""`offloadtrain doctor`: its lines, its JSON, its machine file. Never a wall time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offloadtrain.cli import main
from offloadtrain.cli.doctor import examine
from offloadtrain.cli.doctor.checks import Status
from offloadtrain.cli.exit_codes import USAGE
from offloadtrain.hardware.file_system import IN_MEMORY, kind_of
from offloadtrain.hardware.machine import Machine, dump, find, loads
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.plan.costs.disk import with_rates
from tests.hardware.test_telemetry import FakeNvml
from tests.small_buffers import small_doctor

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU real sizes are quick."""
    if request.node.get_closest_marker("gpu") is None:
        small_doctor(monkeypatch)


def doctor(*flags: object) -> int:
    return main.main(["doctor", *map(str, flags)])


def test_json_and_the_machine_file(tmp_path: Path, capsys: Captured) -> None:
    """A machine file that exists is replaced."""
    file = tmp_path / "mine.toml"
    file.write_text(dump(find("h100")[1], "old"))
    assert doctor("--quick", "--json", "--folder", tmp_path, "--save", file) in (0, 1)
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert {check["status"] for check in report["checks"]} <= set(Status)
    names = [check["name"] for check in report["checks"]]
    assert names[:2] == ["versions", "gpu"] and {"disk", "CPU kernels", "DRAM"} <= set(names)
    machine = Machine(**report["machine"])
    assert loads(dump(machine, "title"), "text") == machine == find(str(file))[1]
    assert machine.fp32_gparams == machine.disk_gbps == 0.0
    assert machine.fp32_tflops > 0 and machine.flash_share > 0 and machine.launch_us > 0
    assert machine.on_cpu is not torch.cuda.is_available()
    assert "wrote" in captured.err and file.read_text().startswith("# Quickly measured by")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode  # others may read it


@pytest.mark.slow
def test_lines(tmp_path: Path, capsys: Captured) -> None:
    """Adam in every format and the disk; the plan of state on it takes these rates."""
    file = tmp_path / "mine.toml"
    code = doctor("--folder", tmp_path, "--save", file)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert all(line.startswith(("PASS  ", "WARN  ", "FAIL  ", "      ")) for line in lines)
    assert code == any(line.startswith("FAIL") for line in lines)
    by_name = {line[6:20].strip(): line for line in lines if line[0] != " "}
    assert "split16" in by_name["Adam"] and "written at" in by_name["disk"]
    assert "measuring the bus" in captured.err and list(tmp_path.iterdir()) == [file]
    machine = find(str(file))[1]
    assert kind_of(tmp_path) in IN_MEMORY or with_rates(machine) == machine


def test_a_card_that_torch_has_no_kernels_for(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured, nothing written, and the exit code is 1."""
    v100 = examine.TorchGpu("Tesla V100-SXM2-32GB", (7, 0), 32 << 30, False, None)
    monkeypatch.setattr(examine, "torch_gpus", lambda: ((v100,), ""))
    monkeypatch.setattr(examine, "can_pin", lambda nbytes: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(examine, "Nvml", lambda: Nvml(lambda: FakeNvml(gpus=1)))
    file = tmp_path / "v100.toml"
    assert doctor("--quick", "--json", "--folder", tmp_path, "--save", file) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    by_name = {check["name"]: check for check in report["checks"]}
    assert report["machine"] is None and not file.exists() and "is not written" in captured.err
    assert by_name["torch kernels"]["status"] == "FAIL"
    assert "CUDA 12.6" in by_name["torch kernels"]["advice"]
    assert by_name["bf16"]["status"] == by_name["PCIe"]["status"] == "WARN"
    assert by_name["pinning"]["status"] == "PASS" and "DRAM" not in by_name


def test_a_gpu_that_torch_cannot_use_is_never_planned_as_a_cpu(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without CUDA; then a GPU without NVML that torch counts and cannot start."""
    monkeypatch.setattr(examine, "torch_gpus", lambda: ((), "all devices are busy"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(examine, "Nvml", lambda: Nvml(lambda: FakeNvml(gpus=1)))
    assert doctor("--quick", "--folder", tmp_path) == 1
    out = capsys.readouterr().out
    assert "FAIL  gpu             NVIDIA H200, but this torch is built without CUDA" in out
    assert "Install a CUDA build of torch" in out
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(examine, "Nvml", lambda: Nvml(lambda: FakeNvml(gpus=0)))
    assert doctor("--quick", "--json", "--folder", tmp_path) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["machine"] is None
    assert report["checks"][1]["found"] == ("a GPU, but torch cannot use it: all devices are busy")


def test_a_full_disk_fails_and_the_rest_is_measured(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> float:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(examine, "drive_rates", refuse)
        assert examine._drive(tmp_path) == "cannot be written: Permission denied"
    monkeypatch.setattr(examine, "free_bytes", lambda folder: 1000)
    assert doctor("--quick", "--json", "--folder", tmp_path) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["machine"] is not None
    assert {"name": "disk", "status": "FAIL"}.items() <= dict(report["checks"][-5]).items()


def test_one_clear_line_for_bad_arguments(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.toml").write_text("answer = 42\n")
    wrong = {
        ("--folder", str(tmp_path / "none")): "does not exist",
        ("--folder", str(tmp_path / "notes.toml")): "is not a folder",
        ("--save", str(tmp_path / "notes.toml")): "is not a machine file",
        ("--save", str(tmp_path / "mine.json")): "ends in .toml",
        ("--save", str(tmp_path / "none/mine.toml")): "create it",
    }
    for flags, message in wrong.items():
        assert doctor("--quick", *flags) == USAGE
        captured = capsys.readouterr()
        assert (
            captured.out == "" and message in captured.err and len(captured.err.splitlines()) == 1
        )
    assert (tmp_path / "notes.toml").read_text() == "answer = 42\n"


@pytest.mark.gpu(until="torch.cuda.get_device_name")
def test_a_gpu_is_measured(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        small_doctor(monkeypatch)
    doctor("--json", "--folder", tmp_path)
    report = json.loads(capsys.readouterr().out)
    machine = Machine(**report["machine"])
    assert machine.gpu == torch.cuda.get_device_name(0)
    assert machine.gpus == torch.cuda.device_count()
    assert 0 < machine.gpu_reserved_bytes < machine.gpu_memory_bytes
    assert machine.fp16_tflops > 1 and machine.h2d_gbps > 0.5 and machine.fp32_gparams > 0
    assert loads(dump(machine, "title"), "text") == machine
