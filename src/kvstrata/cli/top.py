"""`kvstrata top`: a running server's cache, live in the terminal.

Knows HTTP only: it looks once a second. What changed between two looks is an event.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli import cache_tables as tables
from kvstrata.cli.remote import DEFAULT_URL, AdminKey, Remote, Url, connect

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVENTS_SHOWN = 8
BAR_CELLS = 48
# Counters that rise with every request, or rise and fall: totals, not events.
QUIET = ("queried_", "hit_", "stored_", "disk_read_", "disk_queue_", "disk_limit_", "remote_read_", "remote_queue_")


def top(
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between two looks.", metavar="seconds", min=0.2)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
) -> None:
    """Watch memory by tier and precision, hits, running requests and events. Ctrl-C ends."""
    from rich.console import Console

    # No markup: names may look like it.
    console = Console(markup=False, highlight=False)
    with connect(url, api_key) as remote:
        view = View()
        if once:
            console.print(view.look(remote))
            return
        ended = threading.Event()
        # Not an exception, which could be raised, and lost, anywhere.
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        (_watch if console.is_terminal else _print_on)(view, remote, every_s, console, ended)


def _watch(view: View, remote: Remote, every_s: float, console: Console, ended: threading.Event) -> None:
    from rich.live import Live

    with Live(view.look(remote), console=console, screen=True, auto_refresh=False) as live:
        while not ended.wait(every_s):
            live.update(view.look(remote), refresh=True)


def _print_on(view: View, remote: Remote, every_s: float, console: Console, ended: threading.Event) -> None:
    """For a pipe or a file: one look after another."""
    console.print(view.look(remote))
    while not ended.wait(every_s):
        console.print(view.look(remote))


class View:
    def __init__(self) -> None:
        self._counters: Mapping[str, int] | None = None
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def look(self, remote: Remote) -> RenderableType:
        from rich.console import Group

        usage = remote.ask("GET", "/cache/usage")
        props = remote.ask("GET", "/props")
        self._note(usage["counters"])
        parts = [heading(props, remote.url), memory(usage), tables.tiers(usage), tables.totals(usage)]
        if usage.get("replicas"):
            parts.append(tables.replicas(usage["replicas"], props.get("replicas", {})))
        if usage["sequences"]:
            parts.append(tables.sequences(usage["sequences"]))
        return Group(*parts, "", *self._events)

    def _note(self, counters: Mapping[str, int]) -> None:
        if self._counters is not None:
            for name, value in counters.items():
                risen = value - self._counters.get(name, 0)
                if risen > 0 and not name.startswith(QUIET):
                    rise = tables.size(risen) if name.endswith("_bytes") else f"{risen:,}"
                    self._events.append(f"{time.strftime('%H:%M:%S')}  {tables.words(name)} +{rise}")
        self._counters = counters


def heading(props: Mapping[str, Any], url: str) -> RenderableType:
    from rich.text import Text

    state = props["state"]
    text = Text().append(props["model"]["name"], style="bold").append(f"  {url}\n", style="dim")
    text.append(f"{state['running']} running, {state['prefilling']} of them prefill; {state['waiting']} wait    ")
    return text.append(f"decode {state['decode_tokens_s']:.1f} tokens/s, prefill {state['prefill_tokens_s']:.0f}\n")


def memory(usage: Mapping[str, Any]) -> RenderableType:
    """Of the budget: what runs, and what is stored in memory by precision."""
    from rich.text import Text

    budget = max(1, usage["budget_bytes"])
    held = {"running": usage["running_bytes"], **usage["tiers"]["hot"]["by_precision"]}
    bar, used = Text(), 0
    for name, nbytes in held.items():
        cells = min(BAR_CELLS - used, -(-BAR_CELLS * nbytes // budget))
        bar.append("█" * cells, style="white" if name == "running" else tables.style_of(name))
        used += cells
    bar.append("·" * (BAR_CELLS - used), style="dim")
    names = ", ".join(f"{name} {tables.size(nbytes)}" for name, nbytes in held.items() if nbytes)
    return bar.append(f"  {names or 'nothing held'} of {tables.size(usage['budget_bytes'])}\n")
