"""A hook of mkdocs: links of docs/ to files outside of it lead to the repository, whose address is
the package's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from package_metadata import repository

_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_ROOT = Path(__file__).resolve().parent.parent


def on_config(config: Any) -> Any:
    """Give the site the address of the repository."""
    config.repo_url, config.repo_name = repository(), "repository"
    return config


def on_page_markdown(markdown: str, *, config: Any, page: Any, files: Any) -> str:
    """Return the page with absolute links to what the site does not hold.

    Raises:
        FileNotFoundError: the repository does not hold it either.
    """

    def absolute(found: re.Match[str]) -> str:
        if not (_ROOT / found[1]).exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {found[1]}, which is not there")
        return f"]({config['repo_url']}/blob/main/{found[1]}{found[2] or ''})"

    # Generated pages lie in a folder: there `..` is the site.
    return markdown if "/" in page.file.src_path else _OUTSIDE.sub(absolute, markdown)
