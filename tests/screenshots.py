"""`make screenshots`: pictures of the page of a real server, in both colour schemes and on a phone.

Makes conversations that share a system prompt, diverge, step down as memory fills and are offloaded to the disk; then
takes the pictures with Chromium.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from kvstrata.models.load import load
from tests.server.test_cache import wait_done
from tests.support.browser import HOW_TO_GET, Browser, Page, browsing, find_browser
from tests.support.servers import Served, running

SLOT_S = 2.0
PAUSE_S = 4.0  # between two questions of a user
# Memory for a part of the conversations: the rest steps down and is offloaded to the disk.
FLAGS: dict[str, Any] = {
    "memory_limit": "460MiB",
    "hot_cache_size": "30MiB",
    "options": {"cache": {"archives_planes": False}},
}
SYSTEM = (
    "You help a small team that keeps an orchard and the program that plans its work. Answer in one or two sentences. "
    "Say so when you do not know. "
    + "The trees stand in rows; each row has a number, a kind and the year in which it was planted. "
    * 6
)
# These are transcoded to fewer bits after each turn.
SALT, SALTED = "archive", {"release-notes", "harvest-report"}
TALKS = {
    "orchard-planner": (
        "Which rows should be pruned first in February?",
        "And what do we do when it is still freezing?",
        "Write that as a list for the two of us.",
    ),
    "parser-rewrite": (
        "The file with the rows has a comma inside a name. How do I read it in Python?",
        "It has a byte order mark, too.",
        "Now write a test for it.",
    ),
    "release-notes": (
        "Summarise: rows can be renamed, the map is faster, two crashes are mended.",
        "Make it shorter.",
        "And a title for it.",
    ),
    "harvest-report": (
        "Last year row 7 gave 310 kg and row 9 gave 280 kg. What is the mean?",
        "How would you show that over ten years?",
    ),
}


def main(folder: Path) -> None:
    program = find_browser()
    if program is None:
        sys.exit(HOW_TO_GET)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        disk, profile = Path(scratch, "disk"), Path(scratch, "profile")
        with running(load(None), slot_s=SLOT_S, disk_cache_dir=disk, **FLAGS) as served, served.openai() as client:
            converse(served, client)
            with browsing(program, profile) as browser:
                take_pictures(browser, served, folder)


def converse(served: Served, client: openai.OpenAI) -> None:
    """Continue each conversation by a turn, then each by the next turn."""
    histories: dict[str, list[Any]] = {name: [{"role": "system", "content": SYSTEM}] for name in TALKS}
    for turn, (k, v) in enumerate((("planes:4", "planes:4"), ("planes:8", "planes:4"), ("planes:8", "planes:8"))):
        for name, turns in TALKS.items():
            if turn < len(turns):
                ask(served, client, name, histories[name], turns[turn])
        served.ask("/cache/requantize", k=k, v=v, salt=SALT).raise_for_status()
        wait_done(served)
    # A prompt whose beginning has changed, as by a date in the system prompt.
    changed = [{"role": "system", "content": f"Today is Tuesday. {SYSTEM}"}, *histories["orchard-planner"][1:3]]
    ask(served, client, "orchard-planner", changed, "Is that still so?")


def ask(served: Served, client: openai.OpenAI, name: str, history: list[Any], text: str) -> None:
    history.append({"role": "user", "content": text})
    stream = client.chat.completions.create(
        model=served.name,
        messages=history,
        max_tokens=48,
        temperature=0,
        stream=True,
        extra_body={"prompt_cache_key": name, **({"cache_salt": SALT} if name in SALTED else {})},
    )
    reply = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    history.append({"role": "assistant", "content": reply})
    time.sleep(PAUSE_S)


def take_pictures(browser: Browser, served: Served, folder: Path) -> None:
    for name, width, height, dark in (
        ("page-light", 1280, 1240, False),
        ("page-dark", 1280, 1240, True),
        ("phone-light", 390, 2100, False),
        ("phone-dark", 390, 2100, True),
    ):
        page = browser.page()
        page.open(served.url, width=width, height=900 if width > 600 else 844, dark=dark)
        page.wait("document.querySelector('.conversation') && document.querySelector('tr.request')")
        open_request(page)
        page.wait("document.querySelector('.details:not([hidden]) .now')")
        page.run("document.activeElement.blur(), scrollTo(0, 0)")
        page.screenshot(folder / f"{name}.png", height)
        page.close()
    page = browser.page()
    page.open(served.url, width=1280, height=900)
    page.wait("document.querySelector('.conversation')")
    page.click('.conversation [data-action="drop"]')
    page.wait("document.getElementById('confirm').open")
    page.run("scrollTo(0, 0)")
    page.screenshot(folder / "confirm.png", 900)
    page.close()


def open_request(page: Page) -> None:
    """Open the last request that diverged, or the last one."""
    page.run(
        """([...document.querySelectorAll('tr.request')].find(it => it.innerText.includes('diverged'))
          ?? document.querySelector('tr.request')).click()"""
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
