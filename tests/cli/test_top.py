"""`kvstrata top`: how it shares a terminal, and what it shows of a real server."""

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
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from kvstrata.cli import app, top_lines
from kvstrata.cli.remote import connect
from kvstrata.cli.top import View
from kvstrata.cli.top_fit import LEVELS, Wish, cells_of, share_rows, spark
from kvstrata.cli.top_hour import Hour, tokens_per_s
from kvstrata.errors import KvstrataError
from tests.server.conftest import Served, running
from tests.tiny import tiny_loaded

PROMPT = [5 + i % 80 for i in range(300)]
OTHER = [*PROMPT[:100], 1, *PROMPT[101:]]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
wishes = st.lists(st.builds(Wish, st.integers(0, 40), st.integers(0, 6), st.integers(0, 9)), max_size=9)


@given(st.integers(0, 120), wishes)
def test_rows_are_shared_and_none_is_wasted(height: int, asked: list[Wish]) -> None:
    given_rows = share_rows(height, asked)
    assert sum(given_rows) <= height
    for rows, wish in zip(given_rows, asked, strict=True):
        assert rows == 0 or min(wish.least, wish.wanted) <= rows <= wish.wanted
    wanting = [wish for rows, wish in zip(given_rows, asked, strict=True) if 0 < rows < wish.wanted]
    assert not wanting or sum(given_rows) == height
    if sum(min(wish.least, wish.wanted) for wish in asked) <= height:
        assert all(rows >= min(wish.least, wish.wanted) for rows, wish in zip(given_rows, asked, strict=True))


def test_what_matters_most_is_served_first() -> None:
    heading, requests, events = Wish(2, 2, 0), Wish(11, 2, 1), Wish(11, 2, 2)
    assert share_rows(3, [events, requests, heading]) == [0, 0, 2]
    assert share_rows(5, [events, requests, heading]) == [0, 3, 2]
    assert share_rows(10, [events, requests, heading]) == [4, 4, 2]


@given(st.lists(st.none() | st.floats(0, 1e12), max_size=80))
def test_a_line_has_a_cell_for_each_value(series: list[float | None]) -> None:
    drawn = spark(series)
    assert len(drawn) == len(series)
    for value, cell in zip(series, drawn, strict=True):
        assert (cell == " ") == (value is None)
    if known := [value for value in series if value]:
        assert drawn[series.index(max(known))] == LEVELS[-1]


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 1 << 40), max_size=9), st.integers(1, 200), st.floats(0.1, 4)
)
def test_what_is_there_has_a_cell_and_all_fit(parts: dict[str, int], width: int, slack: float) -> None:
    cells = cells_of(parts, sum(parts.values()) * slack, width)
    assert sum(cells.values()) <= width
    if sum(cells.values()) < width:
        assert cells.keys() == {name for name, size in parts.items() if size}


def slot(time_s: float, speed: float | None) -> dict[str, Any]:
    return {"time": time_s, "tokens_per_s": speed}


def told(now_s: float, slots: list[Any], requests: list[Any] | None = None) -> dict[str, Any]:
    return {"now": now_s, "slot_s": 10.0, "slots": slots, "requests": requests or [], "events": []}


def asked(id: str, time_s: float = 1.0) -> dict[str, Any]:
    return {"id": id, "time": time_s}


def test_an_hour_is_put_together_from_what_is_new() -> None:
    hour = Hour()
    assert hour.path == "/cache/history"
    hour.add(told(1015.0, [slot(1000.0, 4.0), slot(1010.0, None)], [asked("a")]))
    assert hour.path == "/cache/history?since=1015.0"
    hour.add(told(1025.0, [slot(1010.0, 8.0), slot(1020.0, None)], [asked("a"), asked("b"), asked("a", 2.0)]))
    assert [each["tokens_per_s"] for each in hour.slots.values()] == [4.0, 8.0, None]
    assert list(hour.requests) == [asked("a"), asked("b"), asked("a", 2.0)]
    # Ten minutes, the newest on the right. A slot of ten seconds is one of sixty cells, or two of a hundred and twenty.
    hour.add(told(1030.0, []))
    assert hour.series(tokens_per_s, 60)[-4:] == [None, 4.0, 8.0, None]
    assert hour.series(tokens_per_s, 120)[-7:] == [None, 4.0, 4.0, 8.0, 8.0, None, None]
    assert hour.series(tokens_per_s, 1) == [6.0]
    hour.add(told(5000.0, [slot(5000.0, None)]))
    assert list(hour.slots) == [5000.0]
    # Another server answers.
    hour.add(told(100.0, [slot(100.0, 1.0)], [asked("c")]))
    assert list(hour.requests) == [asked("c")]


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


def test_requests_are_shown_with_what_they_took_and_why_they_missed(tiny: Served) -> None:
    shown = printed(tiny)
    assert re.search(r"^Requests .* miss or error .*$", shown, re.MULTILINE)
    rows = re.findall(r"^\d\d:\d\d:\d\d completions .*$", shown, re.MULTILINE)
    failed, last, second, first = rows[:4]
    assert "400 context_length_exceeded" in failed
    assert re.search(r" 300 +299 +100 % +\d+\.\d\d s +\d+\.\d$", last), last
    assert re.search(r" 300 +100 +33 %  diverged at 100: .*… +\d+\.\d\d s ", second), second
    assert re.search(r" 300 +0 +0 %  (new|empty) ", first), first


def test_conversations_are_bars_of_their_parts(tiny: Served) -> None:
    """The newer one parts from the older at 100 of 300 tokens: what both have is drawn once."""
    newer, older = re.findall(r"^orchard-1 .*$", printed(tiny), re.MULTILINE)
    whole = re.search(r"^orchard-1 +(█{20,}) +303  151.5 KiB +\d+ s$", older)
    rest = re.search(r"^orchard-1 +(█{10,}) +303  101.5 KiB +\d+ s$", newer)
    assert whole is not None, older
    assert rest is not None, newer
    assert whole.end(1) == rest.end(1)
    assert (rest.start(1) - whole.start(1)) / len(whole[1]) == pytest.approx(1 / 3, abs=0.03)
    with tiny.http() as http:
        http.headers["authorization"] = "Bearer secret"
        http.post("/cache/requantize", json={"k": "planes:4", "v": "planes:4"}).raise_for_status()
        while http.get("/cache/requantize").json()["is_running"]:
            time.sleep(0.02)
        for row in re.findall(r"^orchard-1 .*$", printed(tiny), re.MULTILINE):
            assert "█" not in row
            assert "▒" * 10 in row
        http.post("/cache/requantize", json={"k": "raw", "v": "raw"}).raise_for_status()


def conversation(name: str, last_use: float, parts: list[tuple[str, int]], **fields: Any) -> dict[str, Any]:
    drawn = [{"tokens": n, "tier": tier, "k": "raw", "bytes": n} for tier, n in parts]
    fixed = {"session": name, "starts_at": 0, "pinned": False, "left_behind": False}
    return {"id": "0" * 32, **fixed, "tokens": 1000, "last_use": last_use, "parts": drawn, **fields}


def test_conversations_of_any_replica_are_the_newest_first_and_what_is_nowhere_is_not_drawn() -> None:
    rows = [
        conversation("old", 10.0, [("hot", 1000)], replica="a"),
        conversation("half", 30.0, [("disk", 500)], replica="a"),
        conversation("behind", 40.0, [("hot", 400)], starts_at=600, left_behind=True, replica="a"),
        conversation("new", 50.0, [("hot", 1000)], replica="b"),
    ]
    lines = top_lines.conversations({"has_more": False, "conversations": rows}, 80)
    title, *drawn = [line.plain for line in lines]
    assert top_lines.TIERS_TOLD in title
    assert [text.split()[0] for text in drawn] == ["new", "half", "old", "behind"]
    new, half, _, behind = (sum(text.count(shade) for shade in "█▁") for text in drawn)
    assert half == pytest.approx(new / 2, abs=1)
    assert behind == pytest.approx(0.4 * new, abs=1)


@given(st.lists(st.tuples(st.sampled_from(["raw", "planes:4", "disk", "remote"]), st.integers(1, 10**6))))
def test_strata_fill_their_cells_in_order(parts: list[tuple[str, int]]) -> None:
    for width in (1, 7, 60):
        drawn = top_lines.strata(parts, width)
        assert sum(len(text) for text, _ in drawn) == width
        shown = [text[0] for text, _ in drawn if text.strip()]
        assert shown == [top_lines.shade_of(name) for name, _ in parts][: len(shown)]
        if width >= 2 * len(parts):
            assert len(shown) == len(parts)


def test_budget_and_the_last_minutes_are_shown(tiny: Served) -> None:
    shown = printed(tiny)
    assert re.search(r"·  [\d.]+ [KM]iB of [\d.]+ [KMGT]iB \([\d.]+ %\)$", shown, re.MULTILINE)
    assert "Last 10 min" in shown
    assert re.search(r"^first token +.*[▁-█].* \d+\.\d\d s, at most \d+\.\d\d s$", shown, re.MULTILINE)


def test_a_plain_key_sees_its_own(tiny: Served) -> None:
    shown = printed(tiny, "--api-key", "plain")
    assert "orchard-1" not in shown
    assert "this key's: nothing held" in shown
    assert not re.search(r"^\d\d:\d\d:\d\d completions", shown, re.MULTILINE)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (40, 10), (80, 3)])
def test_a_screen_is_never_overfull(tiny: Served, width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="standard")
    with connect(tiny.url, "secret") as remote:
        shown = console.render_lines(View(remote).screen(console), pad=False)
    assert len(shown) <= height
    texts = ["".join(segment.text for segment in row) for row in shown]
    assert all(cell_len(text) <= width for text in texts)
    assert "tiny-llama" in texts[0]
    if height >= 24:
        for words in ("Last 10 min", "Conversations 2", "Requests", "orchard-1", "diverged at 100"):
            assert any(words in text for text in texts), words


def test_a_server_that_ends_leaves_the_last_look() -> None:
    console = Console(file=io.StringIO(), width=80, height=24)
    with running(tiny_loaded("llama")) as other, connect(other.url, None) as remote:
        view = View(remote)
        view.screen(console)
        other.server.end()
        other.thread.join(30)
        texts = ["".join(segment.text for segment in row) for row in console.render_lines(view.screen(console))]
        assert "No server answers" in texts[1]
        assert "tiny-llama" in texts[0]
        with pytest.raises(KvstrataError, match="No server answers"):
            View(remote).screen(console)


def test_nothing_that_a_client_named_reaches_the_terminal(tiny: Served) -> None:
    with tiny.openai("secret") as client:
        client.completions.create(
            model=tiny.name, prompt=[9, 8, 7], max_tokens=1, extra_body={"prompt_cache_key": "a\x1b[31mb\x07"}
        )
    assert "\x1b" not in printed(tiny)
    assert top_lines.fitted("a\x1b[2Jb", 8) == "a?[2Jb  "
    assert cell_len(top_lines.fitted("重" * 30, 9)) == 9


def on_a_terminal(tiny: Served, *arguments: str, **env: str) -> str:
    """What a terminal of 80 by 24 is sent. Ctrl-C is pressed when it was drawn twice."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", "from kvstrata.cli import main; main()", "top", *arguments],
        env={**kept, "TERM": "xterm-256color", "KVSTRATA_URL": tiny.url, "KVSTRATA_ADMIN_KEY": "secret", **env},
        stdout=theirs,
        stdin=subprocess.DEVNULL,
    )
    os.close(theirs)
    sent, is_pressed = b"", False
    try:
        while piece := os.read(ours, 65536):
            sent += piece
            if not is_pressed and sent.count(b"tiny-llama") >= 2:
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
    assert "orchard-1" in plain
    assert not COLOUR.search(plain)
    assert "\x1b" not in printed(tiny)


def test_a_terminal_is_left_as_it_was(tiny: Served) -> None:
    sent = on_a_terminal(tiny, "--every", "0.2")
    assert sent.startswith("\x1b[?1049h")  # a screen of its own
    assert "\x1b[?1049l" in sent
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")  # the cursor is back
    assert sent.count("tiny-llama") >= 2
