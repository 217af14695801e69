"""Tests of `kvstrata top`: recent requests over several responses, and the view of a real server."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen
from typer.testing import CliRunner

from kvstrata.cli import app
from kvstrata.cli.http_client import connect
from kvstrata.cli.top import RecentRequests, ServerSnapshot, ask_snapshot, draw
from kvstrata.errors import KvstrataError
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

PROMPT = [5 + i % 80 for i in range(300)]
OTHER = [*PROMPT[:100], 1, *PROMPT[101:]]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


def history(now_s: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"now": now_s, "slot_s": 10.0, "slots": [], "requests": list(requests), "events": []}


def a_request(id: str, time_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {"id": id, "time": time_s, **fields}


def test_recent_requests_are_assembled_from_new_ones() -> None:
    recent = RecentRequests()
    assert recent.path == "/cache/history"
    recent.add_response(history(1015.0, a_request("a")))
    assert recent.path == "/cache/history?since=1015.0"
    # Two replicas may have requests of one id, and one of them sends its own again.
    recent.add_response(history(1025.0, a_request("a"), a_request("b"), a_request("b", replica="two")))
    recent.add_response(history(1025.0, a_request("a", 2.0)))
    expected = [a_request("a", 2.0), a_request("b", replica="two"), a_request("b"), a_request("a")]
    assert recent.newest_first() == expected
    # Another server answers.
    recent.add_response(history(100.0, a_request("c")))
    assert recent.newest_first() == [a_request("c")]


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=["plain"], admin_key=["secret"]) as one:
        with one.openai("secret") as client:
            for prompt in (PROMPT, OTHER, OTHER):
                key = {"prompt_cache_key": "orchard-1"}
                client.completions.create(model=one.name, prompt=prompt, max_tokens=4, temperature=0, extra_body=key)
            with pytest.raises(Exception, match="context"):
                client.completions.create(model=one.name, prompt=PROMPT * 40, max_tokens=4)
        yield one


def printed(tiny: Served, *arguments: str, **env: str) -> str:
    keys = {"KVSTRATA_URL": tiny.url, "KVSTRATA_ADMIN_KEY": "secret", "COLUMNS": "100", **env}
    result = CliRunner().invoke(app, ["top", "--once", *arguments], env=keys)
    assert result.exit_code == 0, result.output
    return result.stdout


def snapshot_of(served: Served) -> ServerSnapshot:
    with connect(served.url, "secret") as server:
        return ask_snapshot(server, RecentRequests())


def rows_on(console: Console, snapshot: ServerSnapshot, error: str = "") -> list[str]:
    """Return the rows of a terminal that shows the view."""
    view = Screen(draw(snapshot, console.width, console.height, error))
    return ["".join(segment.text for segment in row) for row in console.render_lines(view, pad=False)]


def test_requests_are_shown_with_times_and_misses(tiny: Served) -> None:
    shown = printed(tiny)
    assert re.search(r"^time .* miss or error .* tokens/s *$", shown, re.MULTILINE)
    rows = re.findall(r"^\d\d:\d\d:\d\d +completions .*$", shown, re.MULTILINE)
    failed, last, second, first = rows[:4]
    assert "400 context_length_exceeded" in failed
    assert re.search(r" 300 +299 +100 % +\d+\.\d\d s +\d+\.\d *$", last), last
    assert re.search(r" 300 +100 +33 % +diverged at 100: .*… +\d+\.\d\d s ", second), second
    assert re.search(r" 300 +0 +0 % +(new|empty) ", first), first


def test_usage_is_shown_by_precision(tiny: Served) -> None:
    shown = printed(tiny)
    assert re.search(r"^memory +[\d.]+ [KM]iB of [\d.]+ [KMGT]iB \([\d.]+ %\), pinned 0 B *$", shown, re.MULTILINE)
    assert re.search(r"^ +cached at raw [\d.]+ KiB *$", shown, re.MULTILINE)
    assert re.search(r"^cached +44.5 % of 897 prompt tokens; new KV is cached as K raw, V raw *$", shown, re.MULTILINE)


def test_running_requests_and_replicas_are_shown(tiny: Served) -> None:
    snapshot = snapshot_of(tiny)
    parts = [{"tokens": 200, "k": "raw", "v": "raw", "bytes": 9, "shared_by": 2}]
    sequences = [{"id": f"request-{number}", "tokens": 200, "parts": parts} for number in range(9)]
    usage = {**snapshot.usage, "sequences": sequences, "replicas": {"a": snapshot.usage, "b": snapshot.usage}}
    console = Console(file=io.StringIO(), width=80, height=40)
    text = "\n".join(rows_on(console, ServerSnapshot(tiny.url, usage, snapshot.props, snapshot.requests)))
    assert re.search(r"request-3 +200 +9 B +█{20} 200 raw shared by 2", text)
    for words in ("Replicas", "Running", "Recent requests"):
        assert words in text


def test_a_plain_key_sees_its_own(tiny: Served) -> None:
    shown = printed(tiny, "--api-key", "plain")
    assert " by this key" in shown
    assert "nothing held" in shown
    assert not re.search(r"^\d\d:\d\d:\d\d +completions", shown, re.MULTILINE)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (40, 10), (80, 3)])
def test_view_fits_a_screen_and_begins_with_the_model(tiny: Served, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="standard")
    rows = rows_on(console, snapshot_of(tiny))
    assert len(rows) == height
    assert all(cell_len(row) <= width for row in rows)
    assert "tiny-llama" in rows[0]
    if height >= 24:
        for words in ("cached at raw", "Recent requests", "completions", "diverged at 100"):
            assert any(words in row for row in rows), words


def test_error_replaces_the_speeds(tiny: Served) -> None:
    console = Console(file=io.StringIO(), width=80, height=24)
    rows = rows_on(console, snapshot_of(tiny), "No server answers at \x1b[2J")
    assert rows[1].startswith("No server answers at \\x1b[2J")
    assert not any("tokens/s, prefill" in row for row in rows)
    with running(tiny_loaded("llama")) as other, connect(other.url, None) as server:
        other.server.end()
        other.thread.join(30)
        with pytest.raises(KvstrataError, match="No server answers"):
            ask_snapshot(server, RecentRequests())


def test_control_characters_of_clients_never_reach_the_terminal(tiny: Served) -> None:
    snapshot = snapshot_of(tiny)
    fields = {"prompt_tokens": 3, "cached_tokens": 0, "first_token_s": None, "tokens_per_s": None, "error": None}
    miss = {
        "status": 200,
        "miss": "diverged",
        "divergence": {"at": 1, "where": "reply", "was": "a\x1b[2J", "now": "\x07重"},
    }
    request = a_request("a", path="/v1/\x1b[31mx", **fields, **miss)
    shown = ServerSnapshot(snapshot.url, snapshot.usage, snapshot.props, [request])
    console = Console(file=io.StringIO(), width=120, height=40)
    text = "\n".join(rows_on(console, shown))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "diverged at 1 in a reply: 'a\\x1b[2J' became '\\x07重'" in text


def on_a_terminal(served: Served, *arguments: str, until: str = "", **env: str) -> str:
    """Return the output to a terminal of 80 by 24. Ctrl-C is pressed when it was drawn twice.

    The server is ended after the first drawing if `until` is given, and Ctrl-C is pressed when that text is there.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", "from kvstrata.cli import main; main()", "top", *arguments],
        env={**kept, "TERM": "xterm-256color", "KVSTRATA_URL": served.url, "KVSTRATA_ADMIN_KEY": "secret", **env},
        stdout=theirs,
        stdin=subprocess.DEVNULL,
    )
    os.close(theirs)
    sent, is_pressed, is_ended = b"", False, False
    try:
        while piece := os.read(ours, 65536):
            sent += piece
            if until and not is_ended and b"tiny-llama" in sent:
                served.server.end()
                is_ended = True
            if not is_pressed and (until.encode() in sent if until else sent.count(b"tiny-llama") >= 2):
                process.send_signal(signal.SIGINT)
                is_pressed = True
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    return sent.decode()


def test_colours_are_for_terminals_that_want_them(tiny: Served) -> None:
    assert COLOUR.search(on_a_terminal(tiny, "--once"))
    plain = on_a_terminal(tiny, "--once", NO_COLOR="1")
    assert "completions" in plain
    assert not COLOUR.search(plain)
    assert "\x1b" not in printed(tiny)


def test_a_terminal_is_left_as_it_was(tiny: Served) -> None:
    sent = on_a_terminal(tiny, "--every", "0.2")
    assert sent.startswith("\x1b[?1049h")  # a screen of its own
    assert "\x1b[?1049l" in sent
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")  # the cursor is back
    assert sent.count("tiny-llama") >= 2


def test_last_state_stays_when_the_server_ends() -> None:
    with running(tiny_loaded("llama")) as other:
        sent = on_a_terminal(other, "--every", "0.2", until="No server answers")
    last = sent[sent.rindex("tiny-llama") :]
    assert "No server answers" in last
    assert "memory" in last
