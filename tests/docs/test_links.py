"""Every relative link of every Markdown file leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import anchors, links, slug
from tests.docs.sources import ROOT

ELSEWHERE = ("http://", "https://", "mailto:")


def pages() -> list[str]:
    """All that git knows or would know."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = done.stdout.split() or [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    return sorted(name for name in found if (ROOT / name).exists())


def problem(page: Path, link: str) -> str:
    """Empty: it leads somewhere."""
    target, _, anchor = link.partition("#")
    file = (page.parent / target).resolve() if target else page
    if not file.is_relative_to(ROOT):
        return "leads out of the repository"
    if not file.exists():
        return "is not there"
    if anchor and file.suffix == ".md" and anchor not in anchors(file):
        return "has no such heading"
    return ""


@pytest.mark.parametrize("name", pages())
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    own = [link for link in links(page) if not link.startswith(ELSEWHERE)]
    assert not {link: why for link in own if (why := problem(page, link))}


def test_broken_links_are_seen(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert problem(page, "docs/nothing.md") == "is not there"
    assert problem(page, "docs/format.md#nothing") == "has no such heading"
    assert problem(page, "../other/README.md") == "leads out of the repository"
    assert problem(page, "docs/format.md#the-folder") == ""
    text = '# `kvstrata` and *more*: 2\n\n[a](x.md) `[b](y.md)`\n\n    [c](z.md)\n\n<img src="d.png">\n'
    (tmp_path / "page.md").write_text(text)
    assert links(tmp_path / "page.md") == ["x.md", "d.png"]
    assert slug("`kvstrata` and *more*: 2") == "kvstrata-and-more-2"


def test_the_repository_s_pages_are_looked_at() -> None:
    assert {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/index.md", "docs/benchmarks/README.md"} <= set(
        pages()
    )
