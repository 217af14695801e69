"""`kvstrata top`: a running server's cache, live in the terminal.

Uses HTTP, and knows the sections with their order and priority. `top_lines.py` has the content of each section,
`top_fit.py` distributes rows. The server keeps the history of the hour, so starting late loses nothing.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli import cache_tables as tables
from kvstrata.cli import top_lines as lines
from kvstrata.cli.remote import DEFAULT_URL, AdminKey, Remote, Url, connect
from kvstrata.cli.top_fit import Wish, share_rows
from kvstrata.cli.top_hour import Hour
from kvstrata.errors import KvstrataError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

CONVERSATIONS_EVERY_S = 4.0  # with a disk tier each request hashes the tokens of all conversations shown
PRINTED_ROWS = 11  # per section without a screen: the title and ten rows


def top(
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between two looks.", metavar="seconds", min=0.2)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
) -> None:
    """Watch a server: memory by precision, the last hour, conversations, requests and events. Ctrl-C ends.

    The history is the server's: starting late loses nothing. NO_COLOR=1 takes the colours away.
    """
    from rich.console import Console

    # No markup: names may contain it.
    console = Console(markup=False, highlight=False)
    with connect(url, api_key) as remote:
        view = View(remote)
        if once:
            console.print(view.printed(console))
            return
        ended = threading.Event()
        # An event, because KeyboardInterrupt could be raised and lost anywhere.
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        has_screen = console.is_terminal and not console.is_dumb_terminal
        (_watch if has_screen else _print_on)(view, every_s, console, ended)


def _watch(view: View, every_s: float, console: Console, ended: threading.Event) -> None:
    from rich.live import Live

    with Live(view.screen(console), console=console, screen=True, auto_refresh=False) as live:
        while not ended.wait(every_s):
            live.update(view.screen(console), refresh=True)


def _print_on(view: View, every_s: float, console: Console, ended: threading.Event) -> None:
    """Print the view at intervals, for a pipe or a file."""
    console.print(view.printed(console))
    while not ended.wait(every_s):
        console.print(view.printed(console))


@dataclass(frozen=True)
class Seen:
    """The server's responses in one refresh."""

    usage: Mapping[str, Any]
    props: Mapping[str, Any]
    conversations: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """Rows of a section. Below `least` rows it is left out; sections with smaller `first` get rows before others."""

    rows: list[Text]
    least: int
    first: int


class View:
    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._hour = Hour()
        self._seen: Seen | None = None
        self._conversations: Mapping[str, Any] = {}
        self._conversations_s = -math.inf  # time of the last request for conversations

    def printed(self, console: Console) -> RenderableType:
        """Return all sections, up to PRINTED_ROWS rows each, whatever the height of the terminal."""
        from rich.console import Group

        seen = self._look()
        rows = [row for section in self._sections(seen, console.width) for row in section.rows[:PRINTED_ROWS]]
        parts: list[RenderableType] = [*rows, "", tables.tiers(seen.usage), tables.totals(seen.usage)]
        return Group(*parts, *_replicas(seen))

    def screen(self, console: Console) -> RenderableType:
        """Return what fits the terminal. While the server does not answer, show its last state with the error."""
        from rich.console import Group

        trouble = ""
        try:
            seen = self._look()
        except KvstrataError as error:
            if self._seen is None:
                raise
            seen, trouble = self._seen, str(error)
        self._seen = seen
        width, height = console.size
        extras = _replicas(seen)
        taken = len(console.render_lines(Group(*extras), pad=False)) if extras else 0
        sections = self._sections(seen, width, trouble)
        wishes = [Wish(len(each.rows), each.least, each.first) for each in sections]
        given = share_rows(max(0, height - taken), wishes)
        rows = [row for each, number in zip(sections, given, strict=True) for row in each.rows[:number]]
        return Group(*rows, *extras)

    def _look(self) -> Seen:
        usage = self._remote.ask("GET", "/cache/usage")
        props = self._remote.ask("GET", "/props")
        self._hour.add(self._remote.ask("GET", self._hour.path))
        now_s = time.monotonic()
        if now_s - self._conversations_s >= CONVERSATIONS_EVERY_S:
            self._conversations = self._remote.ask("GET", "/cache/conversations")
            self._conversations_s = now_s
        return Seen(usage, props, self._conversations)

    def _sections(self, seen: Seen, width: int, trouble: str = "") -> list[Section]:
        """Return the sections from top to bottom."""
        hour, running = self._hour, seen.usage["sequences"]
        found = [
            Section(lines.heading(seen.props, self._remote.url, trouble), 2, 0),
            Section(lines.memory(seen.usage, width), 2, 1),
            Section(lines.last_hour(hour, width), 4, 3),
        ]
        if seen.conversations["conversations"]:
            found.append(Section(lines.conversations(seen.conversations, width), 2, 4))
        if running:
            found.append(Section(lines.running(running, width), 2, 6))
        if hour.requests:
            found.append(Section(lines.requests(hour, width), 2, 2))
        if hour.events:
            found.append(Section(lines.events(hour, width), 2, 5))
        return found


def _replicas(seen: Seen) -> list[RenderableType]:
    held = seen.usage.get("replicas")
    return [tables.replicas(held, seen.props.get("replicas", {}))] if held else []
