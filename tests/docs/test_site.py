"""`mkdocs build --strict` succeeds, and what it makes can be read without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.sources import ROOT
from tests.support.browser import HOW_TO_GET, browsing, find_browser

# What a browser loads by itself: links that a reader may click on are none of these.
LOADED = re.compile(
    r"<(?:script|img|source|iframe|link|audio|video|embed|object)\b[^>]*?\b(?:src|href|srcset|data)=\"?([^\"\s>]+)"
)
STYLES = re.compile(r"url\(([^)]+)\)|@import\s+[\"']([^\"']+)")
NOT_LOADED = re.compile(r"<link\b[^>]*\brel=\"?(?:canonical|next|prev|alternate)\b[^>]*>")
ELSEWHERE = re.compile(r"[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = NOT_LOADED.sub("", page.read_text(encoding="utf-8"))
        loaded = LOADED.findall(text)
        assert loaded, page
        assert not [each for each in loaded if ELSEWHERE.match(each)], page
    for sheet in site.rglob("*.css"):
        urls = ["".join(found) for found in STYLES.findall(sheet.read_text(encoding="utf-8"))]
        assert not [each for each in urls if ELSEWHERE.match(each)], sheet


def test_what_pages_load_is_there(site: Path) -> None:
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # that one is for web servers: its paths begin with /
        text = NOT_LOADED.sub("", page.read_text(encoding="utf-8"))
        names = [name.partition("?")[0] for name in LOADED.findall(text) if not name.startswith(("data:", "#"))]
        lost = [name for name in names if not (page.parent / name).exists()]
        assert not lost, page


def test_the_search_works_from_files(site: Path, tmp_path: Path) -> None:
    """Browsers read no JSON from a folder and start no worker there: docs/iframe-worker.js stands in for one."""
    program = find_browser()
    if program is None:
        pytest.skip(HOW_TO_GET)
    with browsing(program, tmp_path) as browser:
        page = browser.page()
        page.open((site / "replay.html").as_uri())
        page.click(".md-search__input")
        page.wait("!document.querySelector('.md-search-result__meta').textContent.includes('Initializing')")
        page.type(".md-search__input", "evicted")
        page.press("ArrowLeft")  # it looks at what was typed when a key comes up
        page.wait("document.querySelectorAll('.md-search-result__item').length > 1")
        assert page.complaints == []
