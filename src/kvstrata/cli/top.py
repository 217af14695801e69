"""`kvstrata top`: usage, running requests and recent requests of a server, live in the terminal.

Uses HTTP only. The server keeps its recent requests, so starting late loses nothing. Text from clients and models may
hold anything: it reaches the terminal without control characters.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli import cache_tables as tables
from kvstrata.cli.http_client import DEFAULT_URL, AdminKey, RemoteServer, Url, connect
from kvstrata.errors import KvstrataError
from kvstrata.printable import printable, printable_values

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

KEPT_REQUESTS = 500  # as many as the server keeps
PRINTED_REQUESTS = 10  # without a screen
SHOWN_RUNNING = 4  # more would leave no rows for recent requests in 80x24; the first line has their number
DIVERGED_CHARS = 24  # of either text where prompts diverge


def top(
    url: Url = DEFAULT_URL,
    api_key: AdminKey = None,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between two refreshes.", metavar="seconds", min=0.2)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the current state, and end.")] = False,
) -> None:
    """Watch a server: memory by precision, running and recent requests. Ctrl-C ends.

    The recent requests are the server's: starting late loses nothing. NO_COLOR=1 takes the colours away.
    """
    from rich.console import Console

    # No markup: names may contain it.
    console = Console(markup=False, highlight=False)
    with connect(url, api_key) as server:
        recent = RecentRequests()
        if once:
            console.print(draw(ask_snapshot(server, recent), console.width, PRINTED_REQUESTS))
            return
        ended = threading.Event()
        # An event, because KeyboardInterrupt could be raised and lost anywhere.
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        has_screen = console.is_terminal and not console.is_dumb_terminal
        (_watch if has_screen else _print_repeatedly)(server, recent, every_s, console, ended)


def _watch(
    server: RemoteServer, recent: RecentRequests, every_s: float, console: Console, ended: threading.Event
) -> None:
    """Redraw one screen until the end. While the server does not answer, its last state stays, with the error."""
    from rich.live import Live

    snapshot, error = ask_snapshot(server, recent), ""
    # Live cuts what is below the last row of the screen.
    with Live(draw(snapshot, console.width, console.height), console=console, screen=True, auto_refresh=False) as live:
        while not ended.wait(every_s):
            try:
                snapshot, error = ask_snapshot(server, recent), ""
            except KvstrataError as problem:
                error = str(problem)
            live.update(draw(snapshot, console.width, console.height, error), refresh=True)


def _print_repeatedly(
    server: RemoteServer, recent: RecentRequests, every_s: float, console: Console, ended: threading.Event
) -> None:
    """Print the view at intervals, for a pipe or a file."""
    while True:
        console.print(draw(ask_snapshot(server, recent), console.width, PRINTED_REQUESTS))
        if ended.wait(every_s):
            return


class RecentRequests:
    """Recent requests of a server, assembled from successive /cache/history responses. Sends no requests."""

    def __init__(self) -> None:
        self._now_s = 0.0  # the server's clock; 0: no response yet
        self._requests: deque[Mapping[str, Any]] = deque(maxlen=KEPT_REQUESTS)

    @property
    def path(self) -> str:
        """Return the path that asks for new requests only."""
        return f"/cache/history?since={self._now_s!r}" if self._now_s else "/cache/history"

    def add_response(self, history: Mapping[str, Any]) -> None:
        if history["now"] < self._now_s:  # another server, or its clock was set back
            self._requests.clear()
        self._now_s = history["now"]
        # Replicas' clocks differ, so a request may be sent twice.
        known = set(map(_request_key, self._requests))
        self._requests.extend(each for each in history["requests"] if _request_key(each) not in known)

    def newest_first(self) -> list[Mapping[str, Any]]:
        return list(reversed(self._requests))


def _request_key(request: Mapping[str, Any]) -> tuple[Any, ...]:
    return request["time"], request["id"], request.get("replica")


@dataclass(frozen=True)
class ServerSnapshot:
    """The server's responses in one refresh."""

    url: str
    usage: Mapping[str, Any]
    props: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]]  # newest first


def ask_snapshot(server: RemoteServer, recent: RecentRequests) -> ServerSnapshot:
    usage, props = (printable_values(server.ask("GET", path)) for path in ("/cache/usage", "/props"))
    recent.add_response(server.ask("GET", recent.path))
    return ServerSnapshot(printable(server.url), usage, props, recent.newest_first())


def draw(snapshot: ServerSnapshot, width: int, num_requests: int, error: str = "") -> RenderableType:
    """Return the view, with at most `num_requests` recent requests, and the error in the place of the speeds."""
    from rich.console import Group

    usage = snapshot.usage
    parts: list[RenderableType] = [*_heading(snapshot, error), _usage_lines(usage)]
    if held := usage.get("replicas"):
        parts.append(tables.replicas(held, snapshot.props.get("replicas", {})))
    if running := usage["sequences"]:
        parts.append(tables.sequences(running[:SHOWN_RUNNING], width // 4))
    if snapshot.requests:
        parts.append(_request_table(snapshot.requests[:num_requests]))
    return Group(*parts)


def _heading(snapshot: ServerSnapshot, error: str) -> list[Text]:
    from rich.text import Text

    state = snapshot.props["state"]
    draining = ("  it is shutting down", "yellow") if snapshot.props.get("draining") else ""
    first = Text.assemble((snapshot.props["model"]["name"], "bold"), (f"  {snapshot.url}", "dim"), draining)
    requests = f"{state['running']} running, {state['prefilling']} of them prefill; {state['waiting']} wait    "
    speed = f"decode {state['decode_tokens_s']:.1f} tokens/s, prefill {state['prefill_tokens_s']:.0f}"
    second = Text(printable(error), style="red") if error else Text(requests + speed)
    for line in (first, second):
        line.no_wrap, line.overflow = True, "ellipsis"
    return [first, second]


def _usage_lines(usage: Mapping[str, Any]) -> Table:
    """Return memory by precision, the other tiers, and the cached share of all prompts."""
    from rich.text import Text

    budget, counters = usage["budget_bytes"], usage["counters"]
    precisions = usage["tiers"]["hot"]["by_precision"]
    used = usage["running_bytes"] + sum(precisions.values())
    owner = "" if usage["under"] == "all" else " by this key"
    table = tables.plain_table()
    memory = f"{tables.size(used)} of {tables.size(budget)} ({tables.share(used, budget)}){owner}"
    table.add_row("memory", f"{memory}, pinned {tables.size(usage['pinned_bytes'])}")
    by_precision = [
        ("running requests", usage["running_bytes"], "white"),
        *((f"cached at {name}", nbytes, tables.style_of(name)) for name, nbytes in precisions.items()),
    ]
    named = [(f"{name} {tables.size(nbytes)}", style) for name, nbytes, style in by_precision if nbytes]
    table.add_row("", Text(", ").join(Text(text, style=style) for text, style in named) if named else "nothing held")
    if disk := usage["tiers"].get("disk"):
        table.add_row("disk", f"{tables.size(disk['bytes'])}, {disk['tokens']:,} tokens")
    if usage.get("remote"):
        table.add_row("remote cache", tables.remote_state(usage["remote"]))
    queried, hit = counters.get("queried_tokens", 0), counters.get("hit_tokens", 0)
    target = f"new KV is cached as K {usage['target']['k']}, V {usage['target']['v']}"
    table.add_row("cached", f"{tables.share(hit, queried)} of {queried:,} prompt tokens; {target}")
    return table


def _request_table(requests: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    # Without lines and with narrow gaps: in 80 columns there is room for the reason of a miss.
    table = Table(
        title="Recent requests",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        expand=True,
        header_style="dim",
    )
    for name in ("time", "api", "prompt", "cached", "", "miss or error", "first", "tokens/s"):
        is_text = name in ("time", "api", "miss or error")
        table.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name == "miss or error" else None,
        )
    for request in requests:
        prompt, cached = request["prompt_tokens"], request["cached_tokens"]
        first_s, speed = request["first_token_s"], request["tokens_per_s"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(request["time"])),
            printable(_api_of(request["path"])),
            "" if prompt is None else f"{prompt:,}",
            "" if cached is None else f"{cached:,}",
            f"{100 * cached / prompt:.0f} %" if cached is not None and prompt else "",
            printable(_miss_or_error(request)),
            "" if first_s is None else f"{first_s:.2f} s",
            "" if speed is None else f"{speed:.1f}",
            style="red" if _has_failed(request) else "",
        )
    return table


def _api_of(path: str) -> str:
    """Return the part of a path that tells APIs apart: chat, completions, messages, responses."""
    return path.removeprefix("/v1/").partition("/")[0]


def _has_failed(request: Mapping[str, Any]) -> bool:
    return request["status"] >= 400 or bool(request["error"])


def _miss_or_error(request: Mapping[str, Any]) -> str:
    """Return why no more of the prompt was cached or, for a failed request, the error."""
    if _has_failed(request):
        return f"{request['status']} {request['error'] or ''}".strip()
    miss, diverged = request["miss"] or "", request["divergence"]
    if diverged is None or miss in ("", "complete"):
        return "" if miss == "complete" else miss
    place = " in a reply" if diverged["where"] == "reply" else ""
    was, now = (diverged[name][:DIVERGED_CHARS] for name in ("was", "now"))
    return f"{miss} at {diverged['at']:,}{place}: {was!r} became {now!r}"
