"""What the server can say is in the docs: start errors and log lines in troubleshooting.md, answers to clients in
messages.md, every kind of error with its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstrata import errors
from tests.docs.make import MESSAGES, TABLES, messages_page, with_table
from tests.docs.sources import ROOT, SETTING, Message, error_classes, is_a, messages

TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OTHER_PROGRAMS = {"bench", "cli"}  # they say it to the person who has just called them
# Raised and caught inside: what is said of them is a line of the log that has an entry of its own.
INSIDE = ("MismatchedArrays", "UnreadableBlock", "StoreFault", "DamagedBlock")
NOTHING_TO_SAY = re.compile(r"[… .:]*")


def said_at_start_or_logged() -> list[Message]:
    def counts(message: Message) -> bool:
        if message.room in OTHER_PROGRAMS or any(is_a(message.said_by, kind) for kind in INSIDE):
            return False
        is_told = any(is_a(message.said_by, kind) for kind in ("ConfigError", "ModelError"))
        return is_told or message.is_logged or message.said_by == SETTING

    return [message for message in messages() if counts(message)]


def test_every_error_of_the_start_and_every_warning_has_an_entry() -> None:
    listed = TROUBLESHOOTING.replace("\\|", "|")
    found = said_at_start_or_logged()
    assert len(found) > 150  # it still sees them
    lost = {each.place: each.shown() for each in found if f"`{each.shown()}`" not in listed}
    unknown = {place: text for place, text in lost.items() if not NOTHING_TO_SAY.fullmatch(text)}
    assert not unknown, "Add to docs/troubleshooting.md, in backticks, what is said, and the next step"


def test_what_is_listed_can_still_be_said() -> None:
    sections = TROUBLESHOOTING.split("\n## ")
    tables = [text for text in sections if text.startswith(TITLES)]
    assert len(tables) == len(TITLES)
    said = {message.shown() for message in messages()}
    rows = [line for text in tables for line in text.splitlines() if line.startswith("| `")]
    listed = [shown for row in rows for shown in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(listed) > 150
    assert not [shown for shown in listed if shown.replace("\\|", "|") not in said], "Nothing says this any more"


TITLES = (
    "The address and the port",
    "Settings",
    "The model does not load",
    "A GGUF file does not load",
    "Warnings while the model loads",
    "The disk cache",
    "The shared store",
    "Routers and replicas",
    "Failures inside the server",
)


@pytest.mark.parametrize("name", [name for name in error_classes() if is_a(name, "RequestError")])
def test_every_answer_to_a_client_has_its_row(name: str) -> None:
    if name == "RequestError":
        return
    kind = getattr(errors, name)
    rows = [line for line in TROUBLESHOOTING.splitlines() if line.startswith(f"| {kind.status} |") and name in line]
    assert len(rows) == 1
    assert kind.code is None or f"`{kind.code}`" in rows[0]


def test_the_list_of_answers_is_the_code_s() -> None:
    assert MESSAGES.read_text(encoding="utf-8") == messages_page(), "Run: python -m tests.docs.make"


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_tables_of_endpoints_and_metrics_are_the_code_s(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_table(text, TABLES[page]()), "Run: python -m tests.docs.make"
