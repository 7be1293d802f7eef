"""The documentation as a site: built without a warning; its reference has what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from offloadtrain.config.job import Config, as_tables, load
from offloadtrain.config.model_shape import SIZES
from offloadtrain.config.offload import OPTIONS
from offloadtrain.events import schema

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built],
        cwd=ROOT,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.slow
def test_every_key_of_a_job_is_in_the_reference(site: Path) -> None:
    page = (site / "reference/keys/index.html").read_text()
    job: Config = load(ROOT / "examples/gpt_13b_32gb.toml")
    keys = {key for table in as_tables(job).values() if isinstance(table, dict) for key in table}
    assert len(keys) > 50
    assert [key for key in sorted(keys) if f"<code>{key}</code>" not in page] == []
    rows = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>", page, re.DOTALL)
    assert len(rows) > 90
    assert [key for key, rest in rows if rest.rstrip().endswith("<td></td>")] == []


@pytest.mark.slow
def test_every_option_of_offload_is_in_the_reference(site: Path) -> None:
    page = (site / "reference/python/index.html").read_text()
    for name, option in OPTIONS.items():
        row = f"<td><code>{name}</code></td>\n<td><code>config.{'.'.join(option.path)}</code></td>"
        assert page.count(row) == 1
        words = option.doc.partition("`")[0].partition('"')[0].partition("^")[0]
        assert words in page


@pytest.mark.slow
def test_sizes_and_commands_are_in_the_reference(site: Path) -> None:
    sizes = (site / "reference/sizes/index.html").read_text()
    assert all(f"<code>{name}</code>" in sizes for name in SIZES)
    commands = (site / "reference/cli/index.html").read_text()
    assert all(f"offloadtrain {name}" in commands for name in ("train", "plan", "tui", "export"))


@pytest.mark.slow
def test_every_event_is_in_the_reference(site: Path) -> None:
    page = (site / "reference/events/index.html").read_text()
    kinds = [kind for kind in vars(schema).values() if getattr(kind, "KIND", "")]
    assert len(kinds) > 10
    for kind in kinds:
        assert f">{kind.KIND}<" in page
        assert [one.name for one in fields(kind) if f"<code>{one.name}</code>" not in page] == []
