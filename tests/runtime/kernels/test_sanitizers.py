"""The kernels under AddressSanitizer and UBSan, the pool and the queue under
ThreadSanitizer; and proof that the runs see a fault. The pool where threads are refused. The bits
of each instruction set, NEON's under QEMU where a compiler for aarch64 is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "native/sanitize/run.sh"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@lru_cache
def has_sanitizer(name: str) -> bool:
    """Whether a program built with it also runs here."""
    if COMPILER is None:
        return False
    program = f"echo 'int main() {{}}' | '{COMPILER}' -fsanitize={name} -x c++ - -o $0/a && $0/a"
    folder = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True)
    path = folder.stdout.strip()
    done = subprocess.run(["bash", "-c", program, path], capture_output=True)
    shutil.rmtree(path)
    return done.returncode == 0


def run(part: str, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command, env = ["bash", str(SCRIPT), part, *flags], os.environ | env
    return subprocess.run(command, capture_output=True, text=True, env=env)


needs_asan = pytest.mark.skipif(not has_sanitizer("address,undefined"), reason="no ASan and UBSan")
needs_tsan = pytest.mark.skipif(not has_sanitizer("thread"), reason="no ThreadSanitizer")


@pytest.mark.slow
@needs_asan
def test_kernels_stay_inside_their_buffers() -> None:
    """And a buffer that is too short by one is seen. Unoptimized: every access of the source is
    checked, and the checks of optimized code take three times as long to compile."""
    done = run("kernels", "-O0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "baseline: clean" in done.stdout or "neon: clean" in done.stdout
    assert "planted fault: seen" in done.stdout


@pytest.mark.slow
@needs_tsan
@pytest.mark.parametrize("part", ["pool", "queue"])
def test_pool_and_queue_have_no_race(part: str) -> None:
    done = run(part)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{part}: clean" in done.stdout


@pytest.mark.slow
@needs_tsan
@pytest.mark.parametrize("part", ["pool", "queue"])
def test_a_race_is_seen(part: str) -> None:
    done = run(part, "-DPLANT_RACE")
    assert done.returncode != 0
    assert "data race" in done.stderr


@pytest.mark.skipif(COMPILER is None, reason="no compiler")
@pytest.mark.slow
def test_a_pool_that_cannot_have_its_threads_throws() -> None:
    done = run("refused")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: clean" in done.stdout


@pytest.mark.skipif(COMPILER is None, reason="no compiler")
@pytest.mark.long
def test_every_instruction_set_has_the_same_bits() -> None:
    done = run("bits")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "baseline: 450 cases" in done.stdout


@pytest.mark.skipif(not (COMPILER and CROSS and QEMU), reason="no compiler for aarch64, or no QEMU")
@pytest.mark.long
def test_neon_has_the_same_bits() -> None:
    done = run("bits", CROSS=str(CROSS), QEMU=str(QEMU))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "neon: 450 cases" in done.stdout


@pytest.mark.skipif(not (COMPILER and CROSS and QEMU), reason="no compiler for aarch64, or no QEMU")
@pytest.mark.long
def test_other_bits_are_seen() -> None:
    """Multiply-adds that are fused where the source does not say so: aarch64 has them, SSE2 not."""
    done = run("bits", "-ffp-contract=fast", CROSS=str(CROSS), QEMU=str(QEMU))
    assert done.returncode != 0
    assert "writes other bits than baseline" in done.stderr
