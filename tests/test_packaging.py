"""The wheel: both packages, the command, and an install without a compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import package_metadata

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_every_dependency_is_pinned() -> None:
    """And the extra `all` is every extra for users; a build needs no torch."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    users = everything.removeprefix("offloadtrain[").removesuffix("]").split(",")
    assert set(users) == set(extras) - {"all", "dev", "docs"}
    required = {name.split(">=")[0] for name in PYPROJECT["build-system"]["requires"]}
    assert required == {"scikit-build-core", "nanobind"}
    wanted = project["dependencies"] + extras["dev"] + extras["docs"] + extras["hf"]
    names = {re.split(r"\[|>=", requirement)[0] for requirement in wanted} - {"offloadtrain"}
    assert names <= set(_pinned())
    assert _pinned()["torch"] == "2.13.0"


def _build_wheel(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the wheel of a copy without what was compiled here, and with a compiler that fails."""
    source = tmp_path / "a path with spaces"
    source.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("offloadtrain", "tui", "native", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source]
    if importlib.util.find_spec("scikit_build_core"):  # else pip fetches it: half a minute more
        command.append("--no-build-isolation")
    inherited = {name: x for name, x in os.environ.items() if name != "OFFLOADTRAIN_NATIVE"}
    variables = {**inherited, "CXX": "/nonexistent", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


OUTSIDE = """
import runpy, sys
sys.path[:0] = sys.argv[1:3]
sys.argv[:] = ["offloadtrain", "train", "debug"]
import offloadtrain
assert offloadtrain.__file__.startswith(sys.path[0]), offloadtrain.__file__
runpy.run_module("offloadtrain", run_name="__main__")
"""
"""Without .pth files, so that the clone's own package is not found."""


@pytest.mark.slow
def test_a_wheel_built_without_a_compiler_trains_outside_of_a_clone(tmp_path: Path) -> None:
    """In an environment that holds it and what it needs."""
    done = _build_wheel(tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    _run("check_wheel_contents", wheel)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"offloadtrain/py.typed", "offloadtrain_tui/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith(".so") or name.startswith("native")]
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    _run("pip", "install", "--quiet", "--no-deps", "--target", installed, wheel)
    elsewhere.mkdir()
    bare = {"PATH": "", "HOME": str(elsewhere), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", OUTSIDE, installed, sysconfig.get_path("platlib")],
        cwd=elsewhere,
        env=bare,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "numba" in done.stderr + done.stdout
    assert list(elsewhere.glob("runs/*/resolved.toml"))


@pytest.mark.slow
def test_a_published_wheel_is_not_built_without_the_extension(tmp_path: Path) -> None:
    built = PYPROJECT["tool"]["cibuildwheel"]
    assert built["environment"] == {"OFFLOADTRAIN_NATIVE": "1"}
    assert "OFFLOADTRAIN_NATIVE=1 pip install" in (ROOT / "Dockerfile").read_text()
    done = _build_wheel(tmp_path, OFFLOADTRAIN_NATIVE="1")
    assert done.returncode != 0 and "/nonexistent" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def _run(*command: object) -> str:
    """The output of a tool of this environment, which must succeed."""
    tool, *rest = map(str, command)
    done = subprocess.run(
        [sys.executable, "-m", tool, *rest], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_address_of_the_project_is_written_once() -> None:
    """Every address of the package and of the site is below it."""
    base = package_metadata.repository()
    assert base == PYPROJECT["tool"]["offloadtrain"]["repository"]
    files = ("pyproject.toml", "mkdocs.yml", "README.md", "CITATION.cff", "Dockerfile")
    texts = [(ROOT / file).read_text() for file in files]
    assert sum(text.count("github.com/OWNER") for text in texts) == 1
    elsewhere = package_metadata.urls("https://example.org/us/it")
    assert {"Repository", "Issues"} <= elsewhere.keys()
    assert all(url.startswith("https://example.org/us/it") for url in elsewhere.values())
    shown = package_metadata.readme("https://example.org/us/it")["text"]
    assert "](https://example.org/us/it/raw/main/docs/monitor.svg)" in shown
    assert "[docs/plan.md](https://example.org/us/it/blob/main/docs/plan.md)" in shown


@pytest.mark.slow
def test_the_source_package_is_ready_for_an_index(tmp_path: Path) -> None:
    """It checks, holds what the build needs, and its README has no link that only a clone has."""
    _run("build", "--sdist", "--outdir", tmp_path, ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    _run("twine", "check", "--strict", sdist)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = (name for name in archive.getnames() if name.endswith("PKG-INFO"))
        metadata = archive.extractfile(info)
        assert metadata is not None
        readme = metadata.read().decode()
    assert {"LICENSE", "native/CMakeLists.txt", "offloadtrain/py.typed"} <= names
    assert "License-Expression: Apache-2.0" in readme
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets and not [t for t in targets if not t.startswith(("https://", "#"))]
