"""Resolves jobs: `PYTHON resolve.py FOLDER` writes FOLDER/NAME.resolved.toml, which has every key,
for each FOLDER/NAME.toml. PYTHON is that of the checkout whose defaults are recorded."""

from __future__ import annotations

import sys
from pathlib import Path

from offloadtrain.config import job as jobs

for path in sorted(Path(sys.argv[1]).glob("*.toml")):
    path.with_suffix(".resolved.toml").write_text(jobs.dump(jobs.load(path)))
