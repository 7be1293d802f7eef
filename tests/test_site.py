"""The documentation as a site: it builds without a warning, and its reference is complete."""

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


@pytest.mark.slow
def test_the_site_builds_and_its_reference_has_every_key_option_size_and_event(
    tmp_path: Path,
) -> None:
    """A link that leads nowhere is a warning, which ends the build."""
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = ("keys", "python", "sizes", "events")
    keys, python, sizes, events = (
        (tmp_path / f"reference/{page}/index.html").read_text() for page in pages
    )
    job: Config = load(ROOT / "examples/gpt_13b_32gb.toml")
    tables = [table for table in as_tables(job).values() if isinstance(table, dict)]
    assert [key for table in tables for key in table if f"<code>{key}</code>" not in keys] == []
    rows = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>", keys, re.DOTALL)
    assert len(rows) > 90
    assert [key for key, rest in rows if rest.rstrip().endswith("<td></td>")] == []
    for name, option in OPTIONS.items():
        row = f"<td><code>{name}</code></td>\n<td><code>config.{'.'.join(option.path)}</code></td>"
        assert python.count(row) == 1
        words = option.doc.partition("`")[0].partition('"')[0].partition("^")[0]
        assert words in python
    assert [name for name in SIZES if f"<code>{name}</code>" not in sizes] == []
    kinds = [kind for kind in vars(schema).values() if getattr(kind, "KIND", "")]
    assert len(kinds) > 10
    for kind in kinds:
        assert f">{kind.KIND}<" in events
        assert [f.name for f in fields(kind) if f"<code>{f.name}</code>" not in events] == []
