"""The wheel: both packages, the command, and an install without a compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_both_packages_go_into_the_wheel() -> None:
    packages = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == ["offloadtrain", "tui/offloadtrain_tui"]
    assert all((ROOT / package / "py.typed").exists() for package in packages)


def test_every_dependency_is_pinned() -> None:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"] + extras["docs"] + extras["hf"]
    names = {re.split(r"\[|>=", requirement)[0] for requirement in wanted} - {"offloadtrain"}
    assert names <= set(_pinned())
    assert _pinned()["torch"] == "2.13.0"


def test_the_build_needs_no_torch() -> None:
    names = {requirement.split(">=")[0] for requirement in PYPROJECT["build-system"]["requires"]}
    assert names == {"scikit-build-core", "nanobind", "hatch-fancy-pypi-readme"}


def test_ci_runs_what_a_change_runs_and_then_the_rest() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if "make" in line] == ["exec make test-all"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_help_names_every_target() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert [line.split()[1] for line in shown.splitlines()] == [
        "demo",
        "test",
        "test-all",
        "test-long",
        "lint",
        "docs",
        "bench",
        "gpu",
        "sanitize",
        "clean",
    ]


@pytest.mark.slow
def test_a_wheel_without_a_compiler(tmp_path: Path) -> None:
    source = tmp_path / "a path with spaces"
    source.mkdir()
    shutil.copy(ROOT / "pyproject.toml", source)
    shutil.copy(ROOT / "README.md", source)
    shutil.copy(ROOT / "LICENSE", source)
    for folder in ("offloadtrain", "tui", "native"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, source]
    if importlib.util.find_spec("scikit_build_core"):  # else pip fetches it: half a minute more
        command.append("--no-build-isolation")
    environment = {**os.environ, "OFFLOADTRAIN_NATIVE": "0", "CXX": "/nonexistent"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    _run("check_wheel_contents", wheel)
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "offloadtrain/runtime/kernels/__init__.py",
        "offloadtrain/py.typed",
        "offloadtrain_tui/py.typed",
    ):
        assert name in names
    assert not [name for name in names if name.endswith(".so") or name.startswith("native")]


def _run(*command: object) -> str:
    """The output of a tool of this environment, which must succeed."""
    tool, *rest = map(str, command)
    done = subprocess.run(
        [sys.executable, "-m", tool, *rest], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_address_of_the_project_is_below_its_repository() -> None:
    urls = PYPROJECT["project"]["urls"]
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    readme = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    below = urls["Repository"].removeprefix("https://github.com")
    assert all(below in change["replacement"] for change in readme["substitutions"])


def test_the_extra_all_is_every_extra_for_users() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = everything.removeprefix("offloadtrain[").removesuffix("]").split(",")
    assert set(named) == set(extras) - {"all", "dev", "docs"}


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


@pytest.mark.slow
def test_the_files_of_the_repository_follow_their_schemas() -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    forms = [
        path
        for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")
        if "config" not in path.name
    ]
    assert workflows and forms
    for schema, files in (
        ("github-workflows", workflows),
        ("github-issue-forms", forms),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ):
        _run("check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_the_citation_has_the_version_of_the_package() -> None:
    assert f"\nversion: {PYPROJECT['project']['version']}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_the_container_file_has_no_known_fault() -> None:
    # DL3008 asks for versions of Debian's packages, which its archive drops within weeks.
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--ignore", "DL3008", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
