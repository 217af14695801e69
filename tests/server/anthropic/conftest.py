"""A server whose model says what the last turn asks for, and the `anthropic` client for it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.agents.forced import Forced, Prompt, call_text, serving
from tests.support.servers import Served

LONG = "again and " * 3000
SAID = {
    "hello": "Hello there.",
    "think": "<think>\nLet me see.\n</think>\n\nDone.",
    "look": "I look.\n" + call_text("look", {"at": "Größe", "deep": [1, {"a": None}]}),
    "look twice": call_text("look", {"at": "a"}) + "\n" + call_text("look", {"at": "b"}),
    "go on": LONG,
}


def script(prompt: Prompt) -> str:
    last = prompt.turns[-1]
    return f"It says: {last.text}" if last.role == "tool" else SAID.get(last.text, "What?")


# Not for the whole session: while it runs, no other server's replies are its model's own.
@pytest.fixture(scope="module")
def forced() -> Iterator[Forced]:
    with serving(script) as one:
        yield one


def client_of(served: Served, key: str = "none") -> anthropic.Anthropic:
    # Without TLS there is nothing to verify, and reading the machine's certificates takes a while.
    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=60, http_client=http)


@pytest.fixture(scope="module")
def claude(forced: Forced) -> Iterator[anthropic.Anthropic]:
    with client_of(forced.served) as one:
        yield one
