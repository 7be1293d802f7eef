"""The package's metadata that hold an address of the repository, made of the one in pyproject.toml.

A provider of scikit-build-core. An index shows the README and the links below it apart from the
repository: links and pictures that are relative here are absolute there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\])\((?!https?:|#)(?P<path>[^)]+)\)")


def repository() -> str:
    """Return its address, without a slash at the end."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address: str = settings["tool"]["offloadtrain"]["repository"]
    return address.rstrip("/")


def urls(base: str) -> dict[str, str]:
    return {
        "Repository": base,
        "Documentation": f"{base}/tree/main/docs",
        "Issues": f"{base}/issues",
        "Changelog": f"{base}/blob/main/CHANGELOG.md",
    }


def readme(base: str) -> dict[str, str]:
    """Return the README with absolute links; pictures as bytes, not as pages that show them."""

    def absolute(link: re.Match[str]) -> str:
        folder = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['text']}({base}/{folder}/main/{link['path']})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {"content-type": "text/markdown", "text": _LINK.sub(absolute, text)}


def dynamic_metadata(
    field: str, settings: Mapping[str, object], project: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Return the value of a field of `[project]` that is listed there as dynamic."""
    return {"urls": urls, "readme": readme}[field](repository())
