"""What the pages say about precision is what the report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "benchmarks" / "quality"
FULL_BITS = 16


def rows() -> dict[tuple[str, str], Any]:
    return {(row["k"], row["v"]): row for row in json.loads((REPORT / "results.json").read_text())}


def line_with(page: Path, start: str) -> str:
    (found,) = [line for line in page.read_text().splitlines() if line.startswith(start)]
    return found


@pytest.mark.parametrize(
    ("start", "precision"),
    [
        ("| long chats, or several agents |", "planes:8"),
        ("| too little memory for your chats |", "planes:4"),
    ],
)
def test_the_readme_quotes_the_report(start: str, precision: str) -> None:
    row, line = rows()[precision, precision], line_with(ROOT / "README.md", start)
    assert f"| {row['bits_per_value'] / FULL_BITS:.2f} |" in line
    assert f"| {round(1000 * row['top1'])} of 1,000 |" in line


@pytest.mark.parametrize(
    ("k", "v", "start"),
    [
        ("planes:8", "planes:8", "| 8 | 8 |"),
        ("planes:8", "planes:4", "| 8 | 4 |"),
        ("planes:4", "planes:4", "| 4 | 4 |"),
        ("planes:2", "planes:2", "| 2 | 2 |"),
    ],
)
def test_the_pages_quote_the_report(k: str, v: str, start: str) -> None:
    row = rows()[k, v]
    kl = f"{row['kl_mean']:.5f}".removeprefix("0")
    for page in (ROOT / "docs" / "precision.md", REPORT / "README.md"):
        line = line_with(page, start)
        assert f"| {row['bits_per_value']:.2f} | {round(1000 * row['top1'])} | {row['ppl']:.2f} | {kl} |" in line
