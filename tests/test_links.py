"""Every link of every page leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "docs", "examples", ".github", "benchmarks", "native")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))

CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """The targets of its links and pictures; what stands in code is none."""
    plain = CODE.sub("", text)
    for form in (INLINE, NAMED):
        yield from form.findall(plain)


def anchor(heading: str) -> str:
    """The fragment that GitHub and the site give a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return frozenset(map(anchor, HEADING.findall(text)))


def broken(text: str, page: Path) -> list[str]:
    """Links of a page that lead nowhere. Other hosts are not asked."""
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        of_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (of_page and fragment and fragment not in anchors(target)):
            found.append(link)
    return found


def test_every_link_leads_somewhere() -> None:
    dead = {str(page.relative_to(ROOT)): broken(page.read_text(), page) for page in PAGES}
    assert {page: links for page, links in dead.items() if links} == {}


def test_the_pages_are_there_and_have_links() -> None:
    assert len(PAGES) > 40
    assert sum(1 for page in PAGES for _ in links(page.read_text())) > 200


def test_a_link_that_leads_nowhere_is_seen() -> None:
    text = "[a](docs/gone.md) [b](docs/plan.md#gone) `[c](gone.md)` [d](LICENSE) [e](#gone)\n"
    assert broken(text, ROOT / "README.md") == ["docs/gone.md", "docs/plan.md#gone", "#gone"]
