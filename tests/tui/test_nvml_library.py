"""The real pynvml over a library built here: every question, and each one refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILER = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

Answers = dict[str, dict[str, Any]]
QUESTIONS = {
    "nvmlInitWithFlags": "unsigned flags",
    "nvmlDeviceGetCount_v2": "unsigned *out",
    "nvmlDeviceGetHandleByIndex_v2": "unsigned index, void **out",
    "nvmlDeviceGetName": "void *gpu, char *out, unsigned length",
    "nvmlDeviceGetUUID": "void *gpu, char *out, unsigned length",
    "nvmlDeviceGetMemoryInfo": "void *gpu, unsigned long long *out",
    "nvmlDeviceGetUtilizationRates": "void *gpu, unsigned *out",
    "nvmlDeviceGetPowerUsage": "void *gpu, unsigned *out",
    "nvmlDeviceGetTemperature": "void *gpu, int sensor, unsigned *out",
    "nvmlDeviceGetTemperatureV": "void *gpu, void *out",
    "nvmlDeviceGetCurrPcieLinkGeneration": "void *gpu, unsigned *out",
    "nvmlDeviceGetMaxPcieLinkGeneration": "void *gpu, unsigned *out",
    "nvmlDeviceGetCurrPcieLinkWidth": "void *gpu, unsigned *out",
    "nvmlDeviceGetMaxPcieLinkWidth": "void *gpu, unsigned *out",
    "nvmlDeviceGetCurrentClocksEventReasons": "void *gpu, unsigned long long *out",
    "nvmlDeviceGetClockInfo": "void *gpu, int kind, unsigned *out",
    "nvmlDeviceGetMaxClockInfo": "void *gpu, int kind, unsigned *out",
    "nvmlDeviceGetComputeRunningProcesses_v3": "void *gpu, unsigned *count, struct process *out",
    "nvmlDeviceGetFieldValues": "void *gpu, int count, struct field *out",
    "nvmlSystemGetDriverVersion": "char *out, unsigned length",
}
ANSWERS = {
    "nvmlInitWithFlags": "",
    "nvmlDeviceGetCount_v2": "*out = 2;",
    "nvmlDeviceGetHandleByIndex_v2": "*out = (void *)(unsigned long)(index + 1);",
    "nvmlDeviceGetName": 'snprintf(out, length, "NVIDIA H200 \\x1b[31m");',
    "nvmlDeviceGetUUID": 'snprintf(out, length, "GPU-%lu", (unsigned long)gpu);',
    "nvmlDeviceGetMemoryInfo": "out[0] = 140ull << 30; out[1] = 99ull << 30; out[2] = 40ull << 30;",
    "nvmlDeviceGetUtilizationRates": "out[0] = 97; out[1] = 9;",
    "nvmlDeviceGetPowerUsage": "*out = 654321;",
    "nvmlDeviceGetTemperature": "*out = 61;",
    "nvmlDeviceGetTemperatureV": "return 3;",
    "nvmlDeviceGetCurrPcieLinkGeneration": "*out = 4;",
    "nvmlDeviceGetMaxPcieLinkGeneration": "*out = 5;",
    "nvmlDeviceGetCurrPcieLinkWidth": "*out = 8;",
    "nvmlDeviceGetMaxPcieLinkWidth": "*out = 16;",
    "nvmlDeviceGetCurrentClocksEventReasons": "*out = 0x44;",
    "nvmlDeviceGetClockInfo": "*out = kind == 1 ? 1410 : 7;",
    "nvmlDeviceGetMaxClockInfo": "*out = kind == 1 ? 1980 : 7;",
    "nvmlDeviceGetComputeRunningProcesses_v3": (
        "unsigned room = *count; *count = 2; if (room < 2) return 7;"
        " out[0].pid = 4000000000u; out[0].used = 1ull << 30;"
        " out[1].pid = (unsigned)getpid(); out[1].used = 39ull << 30;"
    ),
    "nvmlDeviceGetFieldValues": (
        "for (int i = 0; i < count; ++i) { static unsigned long long moved; moved += 5000000000ull;"
        " int is_link = out[i].id >= 138 && out[i].id <= 139;"
        " out[i].result = is_link && (out[i].scope != 0xFFFFFFFFu || gpu == (void *)2) ? 3 : 0;"
        " out[i].type = 3; out[i].value = moved; }"
    ),
    "nvmlSystemGetDriverVersion": 'snprintf(out, length, "610.47");',
}
_STRUCT = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int is_refused(const char *name) {
    const char *refused = getenv("REFUSED");
    return refused && !strcmp(refused, name);
}
struct field { unsigned id, scope; long long when, latency; int type, result;
               unsigned long long value; };
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
"""
_LOOK = """
import json, os, sys
from dataclasses import asdict
from offloadtrain.hardware.nvml import Nvml
from offloadtrain_tui.this_machine import sample
def look(refused):
    os.environ["REFUSED"] = refused
    times = [0.0]
    nvml = Nvml(clock=lambda: times[-1])
    sample(nvml)
    times.append(4.0)
    found = sample(nvml)
    told = {"pid": os.getpid(), "free": nvml.memory_free("GPU-2"), **asdict(found)}
    told["described"] = [asdict(gpu) for gpu in nvml.describe()]
    return {"state": nvml.state, "driver": nvml.driver(), **told}
answers = {}
for number, refused in enumerate(("", *sys.argv[1:])):
    os.environ["CODE"] = str((3, 4, 13, 15, 999)[number % 5])
    answers[refused] = look(refused)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1 that answers all questions but the one in $REFUSED."""
    folder = tmp_path_factory.mktemp("nvml")
    functions = [
        f'int {name}({QUESTIONS[name]}) {{ if (is_refused("{name}"))'
        ' return atoi(getenv("CODE"));'
        f" {answer} return 0; }}"
        for name, answer in ANSWERS.items()
    ]
    functions.append('const char *nvmlErrorString(int code) { return "refused"; }')
    source = folder / "nvml.c"
    source.write_text(_STRUCT + "\n".join(functions))
    library = folder / "libnvidia-ml.so.1"
    command = [COMPILER or "cc", "-shared", "-fPIC", "-w", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def answers(library: Path) -> Answers:
    """What the sampler gets from this library, by the question that is refused; "" is none."""
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, *QUESTIONS],
        env=os.environ | {"LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    by_refused: Answers = json.loads(done.stdout)
    return by_refused


def test_two_gpus_answer(answers: Answers) -> None:
    answer = answers[""]
    assert answer["state"] == "" and answer["driver"] == "610.47"
    gpus = answer["gpus"]
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-1", "GPU-2"]
    described = answer["described"][0]
    assert (described["index"], described["memory_bytes"]) == (0, 140 << 30)
    assert (described["pcie_generation"], described["pcie_generation_max"]) == (4, 5)
    gpu = gpus[0]
    assert gpu["memory_used_bytes"] == 40 << 30 and gpu["memory_total_bytes"] == 140 << 30
    assert gpu["utilization_percent"] == 97.0 and gpu["power_w"] == 654.321
    assert (gpu["pcie_generation"], gpu["pcie_width_max"]) == (4, 16)
    assert gpu["throttle"] == "power cap, hardware thermal slowdown"
    assert (gpu["clock_mhz"], gpu["clock_max_mhz"]) == (1410, 1980)
    # Each field moves the one counter of the library on by 5e9; the two GPUs ask for four each, and
    # again after 4 s.
    assert gpu["pcie_tx_bytes_per_s"] == gpu["pcie_rx_bytes_per_s"] == 1e10
    assert gpu["nvlink_tx_bytes_per_s"] == gpu["nvlink_rx_bytes_per_s"] == 1024e10
    assert gpus[1]["nvlink_tx_bytes_per_s"] is None, "it has no link"
    assert gpus[1]["pcie_tx_bytes_per_s"] == 1e10


def test_each_gpu_names_its_processes_and_its_free_memory(answers: Answers) -> None:
    """The largest first; a process not visible from here has neither user nor command."""
    answer = answers[""]
    largest, foreign = answer["gpus"][1]["processes"]
    assert largest["pid"] == answer["pid"] and largest["num_bytes"] == 39 << 30
    assert largest["user"] and "python" in largest["command"]
    assert foreign == {"pid": 4_000_000_000, "num_bytes": 1 << 30, "user": "", "command": ""}
    assert answer["free"] == 99 << 30
    assert answers["nvmlDeviceGetMemoryInfo"]["free"] is None
    assert answers["nvmlDeviceGetUUID"]["free"] is None


NEEDED = {"nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"}
ANSWERED_BY: dict[str, set[str]] = {
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetMemoryInfo": {"memory_bytes", "memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetUtilizationRates": {"utilization_percent"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation_max"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_width_max"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle"},
    "nvmlDeviceGetClockInfo": {"clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"clock_max_mhz"},
    "nvmlDeviceGetComputeRunningProcesses_v3": {"processes"},
    "nvmlDeviceGetFieldValues": {
        f"{link}_{way}_bytes_per_s" for link in ("pcie", "nvlink") for way in ("rx", "tx")
    },
}
"""Fields of a GPU; a text or a list is empty without its answer, a number None."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_may_be_refused(question: str, answers: Answers) -> None:
    """With any error; the others are answered."""
    assert bool(answers[question]["state"]) == (question in NEEDED)
    for table in ("gpus", "described"):
        refused, complete = answers[question][table], answers[""][table]
        assert len(refused) == (0 if question in NEEDED else 2)
        for gpu, expected in zip(refused, complete, strict=False):
            missing = ANSWERED_BY.get(question, set()) & gpu.keys()
            assert not any(gpu[name] for name in missing)
            assert gpu | dict.fromkeys(missing) == expected | dict.fromkeys(missing)


def test_the_monitor_shows_them(library: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offloadtrain", "tui", "--once", "--screen", "gpus"],
        env=os.environ | {"LD_LIBRARY_PATH": str(library)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "NVIDIA H200" in done.stdout and "40.0/140.0 GiB" in done.stdout
    assert "no run" in done.stdout
    assert "\x1b" not in done.stdout
