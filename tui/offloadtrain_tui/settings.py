"""The user's settings of the monitor: `~/.config/offloadtrain/monitor.toml`.

theme = "color-blind-safe"
attention = "bell"          # at an alert and at the end: "off" or "bell"
log_axis = true
mean = 20
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from offloadtrain.boundary.safe_open import read_text
from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.config import toml

Attention = Literal["off", "bell"]
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    theme: name of a theme; "": Textual's default.
    attention: signal at an alert and at the end of a run.
    log_axis: True if charts begin with a logarithmic axis.
    mean: number of steps in moving averages; 0: none.
    """

    theme: str = ""
    attention: Attention = "bell"
    log_axis: bool = False
    mean: int = 20


DEFAULTS = Settings()


def path() -> Path:
    """Return the path of the settings file."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".config"
    return root / "offloadtrain" / "monitor.toml"


def load(file: Path, themes: Collection[str]) -> Settings:
    """Read the settings; return the defaults if the file does not exist.

    Raises:
        ConfigError: the file has errors; the message lists them.
        OSError: the file cannot be read, or belongs to another user.
    """
    try:
        text = read_text(file, max_bytes=_MOST_BYTES, follow_link=True, trusted_owner=True)
    except FileNotFoundError:
        return DEFAULTS
    kinds = toml.field_kinds(Settings)
    job = toml.parse(text, str(file), list(kinds))
    values = toml.read_table(job, kinds, job.tables)
    if (theme := values.get("theme")) and theme not in themes:
        job.problems.append(f"theme = {toml.shown(theme)} must be one of {', '.join(themes)}")
    if (mean := values.get("mean", 0)) < 0:
        job.problems.append(f"mean = {mean} must be 0 (none) or more steps")
    job.raise_problems()
    return Settings(**values)


def save(file: Path, settings: Settings) -> None:
    """Replace the settings file.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_file(file, toml.emit(asdict(settings)))
