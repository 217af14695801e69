"""Markdown files as text: their headings, their links, their command blocks. Knows no page and no command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+")
NOT_RUN = re.compile(r"<!-- not run: ([^>]+) -->\s*\Z")
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HTML_LINK = re.compile(r"(?:src|srcset|href)=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    file: str
    line: int
    language: str
    text: str
    not_run: str  # the reason that the page gives; empty: it is run


def blocks(path: Path, name: str) -> Iterator[Block]:
    """Fenced ones. A page that is executed has no others (`indented`)."""
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        marked = NOT_RUN.search(before)
        yield Block(name, before.count("\n") + 1, found[1], found[2], marked[1] if marked else "")


def indented(path: Path) -> list[str]:
    return INDENTED.findall(FENCE.sub("", path.read_text(encoding="utf-8")))


def prose(path: Path) -> str:
    """Without code, where brackets are no links and # begins no heading."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return CODE.sub("", INDENTED.sub("", text))


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub names them. What repeats gets a number."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in HEADING.findall(INDENTED.sub("", text)):
        name = slug(heading)
        numbered = (f"{name}-{number}" for number in range(1, 100))
        found.add(name if name not in found else next(each for each in numbered if each not in found))
    return found


def slug(heading: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def links(path: Path) -> list[str]:
    text = prose(path)
    return [*LINK.findall(text), *HTML_LINK.findall(text)]
